"""Padded windows in .npz files, in the format of the JSONL tokenization kit.

`input_ids` and `attention_mask`, both int32 of shape (windows, width); the mask is 1 where a token
stands. Beside them `tokenization_stats.json`. Source of the format: the JSONL tokenization kit.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, ClassVar

import msgspec
import numpy as np

from tokmill.base.bounds import bounded
from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors
from tokmill.base.headers import ZIP_ERRORS, array_header
from tokmill.builds.source import MAX_ITEM, Hash, Item, Request, Resources
from tokmill.formats.notes import Checked, Problem
from tokmill.formats.tokens import IdType, TokenOptions, TokenSource, store_dtype
from tokmill.formats.windows.npz_export import IDS, MASK, NpzExport
from tokmill.store.schema import Array, Drops, Records


class NpzOptions(TokenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of .npz files of padded windows."""

    ids_name: str = IDS
    """Name of the array of ids."""
    mask_name: str = MASK
    """Name of the array that is 1 at tokens and 0 at padding."""


class NpzSource(TokenSource):
    """.npz files of padded windows: a record is a window without its padding.

    Overlapping windows are not merged, as the files do not state which windows belong to the same
    document. A window without tokens is skipped; a mask with a hole is an error. A file is cut into
    items of at most 64 MiB of decoded ids; a record's place is its row. Only the arrays `ids_name`
    and `mask_name` are read. Nothing is unpickled.
    """

    Config: ClassVar[type[msgspec.Struct]] = NpzOptions
    places = "row"
    suffixes = (".npz",)
    config: NpzOptions

    def _open(self, path: Path) -> contextlib.AbstractContextManager[_Arrays]:
        return _open(path, (self.config.ids_name, self.config.mask_name))

    def file_dtype(self) -> IdType:
        dtypes = []
        for file in self.found():
            with self._open(file.path) as arrays:
                dtypes.append(arrays.ids.dtype)
        return store_dtype(dtypes)

    def items(self) -> Iterator[Item]:
        """Yield runs of rows; `start` and `stop` are their share of the file's bytes."""
        for file in self.found():
            with self._open(file.path) as arrays:
                count = max(1, math.ceil(arrays.rows / arrays.rows_of_item))
                expands = max(1, round(arrays.rows * arrays.ids.row_bytes / file.size))
            path = str(file.path.absolute())
            edges = [file.size * i // count for i in range(count + 1)]
            for start, stop in zip(edges, edges[1:], strict=False):
                yield Item(file.name, path, start, stop, file.digest, expands)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        path = Path(item.path)
        with self._open(path) as arrays:
            count = max(1, math.ceil(arrays.rows / arrays.rows_of_item))
            size = path.stat().st_size
            edges = [size * i // count for i in range(count + 1)]
            number = edges.index(item.start)
            row = first = number * arrays.rows_of_item
            last = min(arrays.rows, row + arrays.rows_of_item)
            block = max(1, self.resources.block_bytes // max(1, arrays.ids.row_bytes))
            arrays.skip(row, block)
            # A separate digest: mixed with the ids, it would depend on the blocks.
            masks = hashlib.sha256()
            while row < last:
                ids, mask = arrays.take(min(block, last - row))
                digest.update(ids.tobytes())
                masks.update(mask.tobytes())
                records = self._records(ids, mask, row, path)
                row += len(ids)
                records.done = (row - first) / (last - first)
                yield records
            digest.update(masks.digest())
            if last == arrays.rows:
                arrays.finish()

    def _records(self, ids: Array, mask: Array, row: int, path: Path) -> Records:
        kept = mask.astype(bool)
        if (mask != kept).any():
            bad = row + int((mask != kept).any(axis=1).argmax())
            raise TokmillError(
                "the attention mask is neither 0 nor 1",
                where=f"{path}, row {bad}",
                hint="the mask is 1 at tokens and 0 at padding: make the file again",
            )
        begins = kept.copy()
        begins[:, 1:] &= ~kept[:, :-1]
        holes = begins.sum(axis=1) > 1
        if holes.any():
            raise TokmillError(
                "the attention mask has a hole: its tokens are not one sequence",
                where=f"{path}, row {row + int(holes.argmax())}",
                hint="only padding at the ends can be taken off",
            )
        rows, lengths = np.flatnonzero(begins.any(axis=1)), kept.sum(axis=1)
        offsets = np.concatenate([[0], np.cumsum(lengths[rows])]).astype(np.int64)
        places = np.flatnonzero(kept.reshape(-1))
        width = ids.shape[1]

        def place(i: int) -> str:
            return f"{path}, row {row + places[i] // width}, position {places[i] % width}"

        token = self.checked(ids.reshape(-1)[places], place)
        empty = np.flatnonzero(lengths == 0) + row
        drops = [Drops(empty, "empty", False)] if len(empty) else ()
        return Records(offsets, {"token": token}, rows + row, drops)


class _Arrays:
    """The two arrays of a file, read from the front a few rows at a time."""

    def __init__(
        self,
        archive: zipfile.ZipFile,
        path: Path,
        opened: contextlib.ExitStack,
        arrays: tuple[str, str],
    ) -> None:
        self.path = path
        names = set(archive.namelist())
        for name, flag in zip(arrays, ("--ids-name", "--mask-name"), strict=True):
            if f"{name}.npy" not in names:
                present = ", ".join(sorted(n.removesuffix(".npy") for n in names)) or "nothing"
                raise TokmillError(
                    f"the file has no array {name!r}; it holds {present}",
                    where=str(path),
                    hint=f"{flag} says another name; "
                    "without a mask, tokens and padding cannot be told apart",
                )
        self.ids, self.mask = (
            _Member(opened.enter_context(archive.open(f"{name}.npy")), name, path)
            for name in arrays
        )
        if self.ids.shape != self.mask.shape:
            raise TokmillError(
                f"{arrays[0]} has shape {self.ids.shape}, {arrays[1]} {self.mask.shape}",
                where=str(path),
                hint="ids and mask have one shape, (windows, width): make the file again",
            )
        self.rows = self.ids.shape[0]
        self.rows_of_item = max(1, MAX_ITEM // max(1, self.ids.row_bytes))

    def take(self, rows: int) -> tuple[Array, Array]:
        return self.ids.take(rows), self.mask.take(rows)

    def skip(self, rows: int, block: int) -> None:
        """Skip rows by reading them, as a compressed stream has no seek."""
        for start in range(0, rows, block):
            self.take(min(block, rows - start))

    def finish(self) -> None:
        """Read to the ends, so that the checksums are compared."""
        for member in (self.ids, self.mask):
            if member.file.read(1):
                raise TokmillError(
                    f"{member.name} is longer than it says",
                    where=str(self.path),
                    hint="copy the file again, or make it again: it is damaged",
                )


class _Member:
    """One array of an archive, as a stream of rows."""

    def __init__(self, file: IO[bytes], name: str, path: Path) -> None:
        self.file, self.name, self.path = file, name, path
        self.shape, fortran, self.dtype = array_header(file)
        if self.dtype.hasobject:
            raise TokmillError(
                f"{name} is a pickled array, and nothing is unpickled",
                where=str(path),
                hint="save it as integers: np.asarray(rows, np.int32)",
            )
        if self.dtype.kind not in "iub" or len(self.shape) != 2:
            raise TokmillError(
                f"{name} has dtype {self.dtype} and shape {self.shape}; "
                "it should hold integers of shape (windows, width)",
                where=str(path),
                hint="make the file again: input_ids and attention_mask are matrices of integers",
            )
        self.row_bytes = self.shape[1] * self.dtype.itemsize
        if self.shape[0] and not 0 < self.row_bytes <= MAX_ITEM:
            raise TokmillError(
                f"{name} has windows of {self.shape[1]:,} ids",
                where=str(path),
                hint=f"a window has 1 to {MAX_ITEM // self.dtype.itemsize:,} ids: make it again",
            )
        if fortran and min(self.shape) > 1:
            raise TokmillError(
                f"{name} is stored by columns",
                where=str(path),
                hint="save it by rows: np.ascontiguousarray(array)",
            )

    def take(self, rows: int) -> Array:
        data = self.file.read(rows * self.row_bytes)
        if len(data) != rows * self.row_bytes:
            raise EOFError(f"{self.name} ends early")
        return np.frombuffer(data, self.dtype).reshape(rows, self.shape[1])


@contextlib.contextmanager
def _open(path: Path, names: tuple[str, str]) -> Iterator[_Arrays]:
    """Open a file; errors of zip, deflate and array headers become a `TokmillError`."""
    try:
        # zipfile unpacks .bz2 at once, however little is read of a member.
        with machine_errors("read", path), bounded(path), contextlib.ExitStack() as opened:
            archive = opened.enter_context(zipfile.ZipFile(path))
            yield _Arrays(archive, path, opened, names)
    except ZIP_ERRORS as error:
        raise TokmillError(
            f"the file is damaged or no .npz: {str(error) or type(error).__name__}",
            where=str(path),
            hint="its writer was killed or its copy cut off: make or fetch it again",
        ) from None


def check(path: Path, tokenizer: str | None = None) -> Checked:
    """Read all .npz files of a folder, or one, as a build would; return each that it would refuse.

    With a tokenizer, ids are compared with its size.
    """
    frozen = NpzSource.freeze(NpzOptions(), Request(inputs=(), tokenizer=tokenizer))
    files = [path] if path.is_file() else sorted(path.glob("*.npz"))
    problems = []
    for file in files:
        try:
            source = NpzSource(NpzOptions(), [str(file)], frozen, Resources())
            for item in source.items():
                for _ in source.read(item, hashlib.sha256()):
                    pass
        except TokmillError as error:
            problems.append(Problem(error.where, error.what))
    size = sum(file.stat().st_size for file in files)
    return Checked(str(path), len(files), size, ["npz of another program"], problems)


__all__ = ["NpzExport", "NpzSource"]
