"""Headerless token files (nanoGPT, CS336 trainers).

A headerless `.bin` is `np.fromfile(path, dtype)`: little-endian uint16, or uint32 above 65,536
ids, and nothing else. Source of the format: nanoGPT, `data/openwebtext/prepare.py`.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tokmill.base.errors import TokmillError, UsageError, shell_word
from tokmill.base.files import reading
from tokmill.builds.scan import InputFile
from tokmill.builds.source import MAX_ITEM, Frozen, Hash, Item, Request
from tokmill.formats import notes
from tokmill.formats.notes import exporting
from tokmill.formats.tokens import (
    IdType,
    TokenOptions,
    TokenSource,
    at_byte,
    read_exactly,
    store_dtype,
)
from tokmill.store.schema import Array, Records
from tokmill.store.store import Store

RECORD_TOKENS = 1 << 20
SAMPLE = 128 << 10
MAX_RECORD = 64 << 20
SEARCH = 1 << 20
NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)
HALVES = "the ids look like uint32, but were to be read as uint16"
WIDE = "the ids look like int64, which is not read"
WIDE_IDS = 16
"""Least number of ids above 0 in a sample that is called int64."""
NUMPY = b"\x93NUMPY"
LLMC = (20240520, 20240801, 20240522)
"""First number of the shards of llm.c, which have a header (`dev/data/data_common.py`)."""


class BinOptions(TokenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of headerless token files."""

    dtype: Literal["auto", "u2", "u4"] = "auto"
    """Width of the ids; auto: 4 bytes above 65,536 ids, else 2."""
    separator_id: int | None = None
    """Id that ends each document; by default the tokenizer's eot."""
    record_tokens: Annotated[int, Meta(ge=1, le=MAX_RECORD // 4)] | None = None
    """Cut records of this number of tokens instead; 1,048,576 if no separator is known."""


class BinSource(TokenSource):
    """Headerless token files.

    A record ends after each `separator_id`, or with the file; the separator stays in the record,
    like the `eot` of text stores. An item has the documents that begin in its range. A document
    that goes on in the next file of a numbered series is refused. Without a separator a file is cut
    into records of `record_tokens`.
    """

    Config: ClassVar[type[msgspec.Struct]] = BinOptions
    version = 2
    suffixes = (".bin",)
    config: BinOptions

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the tokenizer, if one is named; refuse options that contradict each other."""
        if config.separator_id is not None and config.record_tokens is not None:
            raise UsageError(
                "separator_id and record_tokens are two ways to cut records", hint="choose one"
            )
        frozen = super().freeze(config, request)
        size = frozen["token"].vocabulary.size if frozen else config.vocab_size or 1 << 32
        if config.separator_id is not None and not 0 <= config.separator_id < size:
            raise UsageError(
                f"separator_id = {config.separator_id} is none of the {size} ids",
                hint="--separator-id is the id that ends each document there",
            )
        return frozen

    @property
    def separator(self) -> int | None:
        """The id that ends documents, None where records are cut by number."""
        if self.config.record_tokens is not None:
            return None
        if self.config.separator_id is None and self.frozen is not None:
            return self.frozen.vocabulary.roles.get("eot")
        return self.config.separator_id

    def file_dtype(self) -> IdType:
        return store_dtype([self.ids_of(file.path)[0] for file in self.found()])

    def ids_of(self, path: Path) -> tuple[np.dtype[Any], int]:
        """Return dtype and number of a file's ids; refuse an impossible size, header or width."""
        with reading(path) as file:
            size = file.seek(0, 2)
            head = read_exactly(file, 0, min(size, SAMPLE), path)
        wanted = None if self.config.dtype == "auto" else np.dtype(f"<{self.config.dtype}")
        if {int.from_bytes(head[:4], "little"), int.from_bytes(head[:4], "big")} & {*LLMC}:
            raise TokmillError(
                "this is a shard of llm.c, which has a header of 1,024 bytes",
                where=f"{path}, byte 0",
                hint=f"take the ids out: tail -c +1025 {shell_word(path)} > ids.bin",
            )
        if head.startswith(NUMPY):
            raise TokmillError(
                "this is an array of numpy, which has a header",
                where=f"{path}, byte 0",
                hint=f'take the ids out: numpy.load("{path.name}").tofile("ids.bin")',
            )
        if wanted is None and path.with_suffix(".idx").exists():
            raise TokmillError(
                "there is a Megatron index next to it, with the beginnings of documents",
                where=str(path),
                hint="the index is not read: --dtype u2 (or u4) --separator-id ID, of the id that "
                "ends a document",
            )
        dtype = wanted or np.dtype("<u2" if (self.size or 0) <= 1 << 16 else "<u4")
        if size % dtype.itemsize:
            raise TokmillError(
                f"{size} bytes are not a whole number of {dtype.itemsize}-byte ids",
                where=f"{path}, byte {size - size % dtype.itemsize}",
                hint="its copy was cut off, or its ids have another width: --dtype u2 or u4",
            )
        sample = np.frombuffer(head[: len(head) - len(head) % dtype.itemsize], dtype)
        if wanted is None and (why := wrong_layout(sample)):
            raise TokmillError(why, where=str(path), hint=layout_hint(why, path.name))
        return dtype, size // dtype.itemsize

    def found(self) -> list[InputFile]:
        """Return the files, ordered by folder, name and the number that ends the name."""
        return sorted(super().found(), key=lambda f: (*numbered(PurePath(f.name)), f.name))

    def items(self) -> Iterator[Item]:
        """Yield the files in ranges of at most 64 MiB of whole ids (and of whole records)."""
        before: Path | None = None
        for file in self.found():
            dtype, tokens = self.ids_of(file.path)
            if before is not None and self.separator is not None:
                self._refuse_one_document(before, file.path)
            before = file.path
            step = MAX_ITEM
            if self.separator is None:
                record = (self.config.record_tokens or RECORD_TOKENS) * dtype.itemsize
                step = max(1, MAX_ITEM // record) * record
            end = tokens * dtype.itemsize
            for start in range(0, max(end, 1), step):
                stop = min(start + step, end)
                yield Item(file.name, str(file.path.absolute()), start, stop, file.digest)

    def _refuse_one_document(self, path: Path, after: Path) -> None:
        """Refuse two numbered files if a document begins in the first and ends in the second."""
        folder, name, number = numbered(path)
        if number < 0 or numbered(after) != (folder, name, number + 1):
            return
        dtype, tokens = self.ids_of(path)
        with reading(path) as file:
            last = Ids(file, path, dtype, tokens)[max(0, tokens - 1) : tokens]
        if len(last) and last[0] != self.separator:
            raise TokmillError(
                f"its last document does not end in it, and may go on in {after.name}",
                where=f"{path}, byte {(tokens - 1) * dtype.itemsize}",
                hint="join the files: cat FILE FILE > ALL.bin; or --record-tokens 1048576",
            )

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield the documents that begin in the item, or the records that it is cut into."""
        path = Path(item.path)
        dtype, tokens = self.ids_of(path)
        size = dtype.itemsize
        first, last = item.start // size, item.stop // size
        with reading(path) as file:
            part = Ids(file, path, dtype, tokens)
            if self.separator is None:
                record = self.config.record_tokens or RECORD_TOKENS
                records = part.even(first, last, record, self.resources.block_bytes)
            else:
                first, last = (
                    part.behind(at - 1, self.separator) if at else 0 for at in (first, last)
                )
                records = part.documents(first, last, self.separator, self.resources.block_bytes)
            for start, ids, offsets in records:
                token = self.checked(ids, at_byte(path, start * size, size))
                digest.update(ids.tobytes())
                done = (start + len(ids) - first) / max(1, last - first)
                yield Records(offsets, {"token": token}, (start + offsets[:-1]) * size, done=done)


def numbered(path: PurePath) -> tuple[str, str, int]:
    """Return folder, name and number of a file; -1: its name ends in none."""
    match = NUMBERED.fullmatch(path.stem)
    if match is None:
        return str(path.parent), path.stem, -1
    return str(path.parent), match[1], int(match[2])


class Ids:
    """The ids of an open file, by their numbers."""

    def __init__(self, file: BinaryIO, path: Path, dtype: np.dtype[Any], tokens: int) -> None:
        self.file, self.path, self.dtype, self.tokens = file, path, dtype, tokens

    def __getitem__(self, part: slice) -> Array:
        start, stop = (place * self.dtype.itemsize for place in (part.start, part.stop))
        return np.frombuffer(read_exactly(self.file, start, stop, self.path), self.dtype)

    def behind(self, place: int, separator: int) -> int:
        """Return the place after the first separator at or after `place`; without one the end."""
        at = place
        limit = min(self.tokens, place + MAX_RECORD // self.dtype.itemsize)
        while at < limit:
            ids = self[at : min(at + SEARCH, limit)]
            ends = np.flatnonzero(ids == separator)
            if len(ends):
                return at + int(ends[0]) + 1
            at += len(ids)
        if limit < self.tokens:
            raise TokmillError(
                f"no document ends within 64 MiB: the id {separator} does not occur",
                where=f"{self.path}, byte {place * self.dtype.itemsize}",
                hint="is separator_id right? --record-tokens 1048576 cuts records by number",
            )
        return self.tokens

    def documents(
        self, first: int, last: int, separator: int, block_bytes: int
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (first id, ids, offsets) of whole documents in first … last - 1."""
        step = max(1, block_bytes // self.dtype.itemsize)
        pending: list[Array] = []
        begin, before = first, 0
        for at in range(first, last, step):
            ids = self[at : min(at + step, last)]
            ends = np.flatnonzero(ids == separator) + 1
            if at + len(ids) == last and not (len(ends) and ends[-1] == len(ids)):
                ends = np.append(ends, len(ids))
            if not len(ends):
                pending.append(ids)
                before += len(ids)
                continue
            cut = int(ends[-1])
            yield (
                begin,
                np.concatenate([*pending, ids[:cut]]),
                np.concatenate([[0], ends + before]).astype(np.int64),
            )
            pending, before, begin = [ids[cut:]], len(ids) - cut, at + cut

    def even(
        self, first: int, last: int, record: int, block_bytes: int
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (first id, ids, offsets) of records of equal length; the last may be shorter."""
        step = max(1, block_bytes // self.dtype.itemsize // record) * record
        for at in range(first, last, step):
            ids = self[at : min(at + step, last)]
            yield at, ids, np.append(np.arange(0, len(ids), record), len(ids)).astype(np.int64)


def wrong_layout(sample: Array) -> str:
    """Return why ids seem to have another width or byte order, else "".

    Needs at least 32 ids. If (nearly) every second uint16 value is 0 or small and the others are
    not, they are halves of uint32 ids. If the upper halves of 8-byte numbers are the signs of the
    lower ones, and `WIDE_IDS` of these are not 0, they are int64. If all ids are multiples of 256,
    or their low bytes have fewer values than their high bytes, the bytes are swapped.
    """
    if len(sample) < 32 or not sample.any():
        return ""
    ids, above = sample[: len(sample) // 4 * 4].view("<u4").reshape(-1, 2).T
    signs = np.where(ids >> 31, above + 1, above)
    wide = sample.nbytes % 8 == 0 and not signs.any() and np.count_nonzero(ids) >= WIDE_IDS
    swapped = sample.byteswap()
    if sample.dtype.itemsize == 4:
        if wide:
            return WIDE
        if int(sample.max()) >= 1 << 24 and int(swapped.max()) < 1 << 24:
            return "the ids look like big-endian uint32"
        return ""
    low, high = sample[0::2], sample[1::2]
    few = (not high.any()) or (int(high.max()) < 32 and int(low.max()) >= 1024)
    if few or (wide and above.any()) or _fewer(high, 1, low, 16) or _fewer(high, 64, low, 1024):
        return WIDE if wide else HALVES
    if not (low & 255).any() and int(low.max()) >> 8 < 32:
        return "the ids look like big-endian uint32, but were to be read as uint16"
    low_bytes, high_bytes = sample & 255, sample >> 8
    spread = len(np.unique(high_bytes)) >= 200
    if not low_bytes.any() or (spread and int(low_bytes.max()) < int(high_bytes.max())):
        return "the ids look like big-endian uint16"
    return ""


def _fewer(high: Array, small: int, low: Array, large: int) -> bool:
    some, many = np.count_nonzero(high >= small), np.count_nonzero(low >= large)
    return bool(many >= 32 and many > 16 * some)


def layout_hint(why: str, name: str) -> str:
    """Return what can be done about a file of which `wrong_layout` says why."""
    convert = f'convert them: numpy.fromfile("{name}", "<i8").astype("<u4").tofile(NEW); or '
    right = "if the file is right, name the type of its ids: --dtype u2 or --dtype u4"
    return f"{convert if why == WIDE else ''}{right}"


class BinExportOptions(notes.ExportOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of headerless token files."""

    dtype: Literal["auto", "u2", "u4"] = "auto"
    """Width of the ids; auto: uint16, uint32 above 65,536 ids."""


class BinExport:
    """One headerless file of all ids, record after record."""

    Config: ClassVar[type[msgspec.Struct]] = BinExportOptions

    def __init__(self, config: BinExportOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write `out` (or `out/tokens.bin`) and return files, tokens, bytes and dtype."""
        config = self.config
        notes.check_column(store, config)
        kind = "u2" if notes.id_count(store, config.column) <= 1 << 16 else "u4"
        dtype = np.dtype(f"<{kind if config.dtype == 'auto' else config.dtype}")
        path = notes.output_file(out, ".bin")
        with exporting(
            store, "bin", config, path.parent, path.name, files=[path], named=out
        ) as export:
            export.put(path, notes.raw(notes.pieces(store, config.column, dtype)))
        return notes.summary([path], store.tokens, dtype=dtype.name)
