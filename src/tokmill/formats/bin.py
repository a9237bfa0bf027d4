"""Headerless token files (nanoGPT, CS336 trainers) and llm.c shards.

A headerless `.bin` is `np.fromfile(path, dtype)`: little-endian uint16, or uint32 above 65,536
ids, and nothing else. Source of the format: nanoGPT, `data/openwebtext/prepare.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from tokmill.build.source import MAX_ITEM, Frozen, Hash, Item, Request
from tokmill.errors import TokmillError, UsageError
from tokmill.files import machine_errors
from tokmill.formats import exports
from tokmill.formats.llmc import HEADER, LlmcExport, read_header
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
MAX_RECORD = 64 << 20
SAMPLE = 128 << 10
SEARCH = 1 << 20


class BinOptions(TokenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of headerless token files and llm.c shards."""

    dtype: Literal["auto", "u2", "u4"] = "auto"
    """Width of the ids; auto: the llm.c header, else 4 bytes above 65,536 ids and 2 below."""
    separator_id: int | None = None
    """Id that ends each document; if none is given, the tokenizer's eot."""
    record_tokens: int | None = None
    """Cut records of so many tokens instead; 1,048,576 where no separator is known."""


class Layout(NamedTuple):
    """Where the ids of a file begin (byte), how wide they are, how many there are."""

    header: int
    dtype: np.dtype[Any]
    tokens: int


class BinSource(TokenSource):
    """Headerless token files and llm.c shards, told apart by the magic number.

    A record ends after each `separator_id`, or with the file; the separator stays in the record,
    as the `eot` of the store's own text does. An item holds the documents that begin in its range.
    Without a separator a file is cut into records of `record_tokens`.
    """

    Config: ClassVar[type[msgspec.Struct]] = BinOptions
    suffixes = (".bin",)
    config: BinOptions

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the tokenizer, if one is named; refuse options that contradict each other."""
        if config.separator_id is not None and config.record_tokens is not None:
            raise UsageError(
                "separator_id and record_tokens are two ways to cut records", hint="choose one"
            )
        if config.record_tokens is not None and not 0 < config.record_tokens <= MAX_RECORD // 4:
            raise UsageError(
                f"record_tokens = {config.record_tokens} is not 1 to {MAX_RECORD // 4}"
            )
        frozen = super().freeze(config, request)
        size = frozen["token"].vocabulary.size if frozen else config.vocab_size or 1 << 32
        if config.separator_id is not None and not 0 <= config.separator_id < size:
            raise UsageError(f"separator_id = {config.separator_id} is none of the {size} ids")
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
        """Return the widest dtype of the files."""
        files = self.found()
        return store_dtype([self.layout(file.path).dtype for file in files])

    def layout(self, path: Path) -> Layout:
        """Return a file's layout; refuse a size, a header or a width that cannot be right."""
        with machine_errors("read", path), open(path, "rb") as file:
            size = file.seek(0, 2)
            head = read_exactly(file, 0, min(size, SAMPLE), path)
        wanted = None if self.config.dtype == "auto" else np.dtype(f"<{self.config.dtype}")
        told = read_header(head, size, path)
        if told is not None:
            if wanted not in (None, told):
                raise UsageError(
                    f"the llm.c header says {told.name}, not {wanted}",
                    where=str(path),
                    hint="leave dtype out",
                )
            return Layout(HEADER, told, (size - HEADER) // told.itemsize)
        if wanted is None and path.with_suffix(".idx").exists():
            raise TokmillError(
                "an index of Megatron's stands beside it, which says where documents begin",
                where=str(path),
                hint="`tokmill build megatron` reads the pair; --dtype u2 reads the ids alone",
            )
        dtype = wanted or np.dtype("<u2" if (self.size or 0) <= 1 << 16 else "<u4")
        if size % dtype.itemsize:
            raise TokmillError(
                f"{size} bytes are no whole number of {dtype.itemsize}-byte ids",
                where=f"{path}, byte {size - size % dtype.itemsize}",
                hint="its copy was cut off, or its ids have another width: --dtype u2 or u4",
            )
        sample = np.frombuffer(head[: len(head) - len(head) % dtype.itemsize], dtype)
        if wanted is None and (why := look_alike(sample)):
            raise TokmillError(
                why,
                where=str(path),
                hint="if it is what it should be, say so: --dtype u2 or --dtype u4",
            )
        return Layout(0, dtype, size // dtype.itemsize)

    def items(self) -> Iterator[Item]:
        """Yield the files in ranges of at most 64 MiB of whole ids (and of whole records)."""
        for file in self.found():
            header, dtype, tokens = self.layout(file.path)
            step = MAX_ITEM
            if self.separator is None:
                record = self._record_tokens * dtype.itemsize
                step = max(1, MAX_ITEM // record) * record
            end = header + tokens * dtype.itemsize
            path = str(file.path.absolute())
            for start in range(header, max(end, header + 1), step):
                yield Item(file.name, path, start, min(start + step, end), file.digest)

    @property
    def _record_tokens(self) -> int:
        return self.config.record_tokens or RECORD_TOKENS

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield the documents that begin in the item, or the records that it is cut into."""
        path = Path(item.path)
        header, dtype, tokens = self.layout(path)
        size = dtype.itemsize
        first, last = (item.start - header) // size, (item.stop - header) // size
        with machine_errors("read", path), open(path, "rb") as file:
            part = _Part(file, path, header, dtype)
            if self.separator is None:
                found = part.even(first, last, self._record_tokens, self.resources.block_bytes)
            else:
                first = part.border(first, tokens, self.separator)
                last = part.border(last, tokens, self.separator)
                found = part.documents(first, last, self.separator, self.resources.block_bytes)
            for start, ids, offsets in found:
                digest.update(ids.tobytes())
                byte = header + start * size
                token = self.checked(ids, at_byte(path, byte, size))
                yield Records(offsets, {"token": token}, byte + offsets[:-1] * size)


class _Part:
    """The ids of an open file, by their numbers."""

    def __init__(self, file: BinaryIO, path: Path, header: int, dtype: np.dtype[Any]) -> None:
        self.file, self.path, self.header, self.dtype = file, path, header, dtype

    def ids(self, first: int, last: int) -> Array:
        """Return the ids first … last - 1."""
        start, stop = (self.header + place * self.dtype.itemsize for place in (first, last))
        return np.frombuffer(read_exactly(self.file, start, stop, self.path), self.dtype)

    def border(self, place: int, tokens: int, separator: int) -> int:
        """Return the first id at or after `place` with which a document begins, or the end."""
        at = place - 1
        limit = min(tokens, place + MAX_RECORD // self.dtype.itemsize)
        if place == 0:
            return 0
        while at < limit:
            ids = self.ids(at, min(at + SEARCH, limit))
            found = np.flatnonzero(ids == separator)
            if len(found):
                return at + int(found[0]) + 1
            at += len(ids)
        if limit < tokens:
            raise TokmillError(
                f"no document ends within 64 MiB: the id {separator} does not occur",
                where=f"{self.path}, byte {self.header + place * self.dtype.itemsize}",
                hint="is separator_id right? --record-tokens 1048576 cuts records by number",
            )
        return tokens

    def documents(
        self, first: int, last: int, separator: int, block_bytes: int
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (first id, ids, offsets) of whole documents in first … last - 1."""
        step = max(1, block_bytes // self.dtype.itemsize)
        pending: list[Array] = []
        begin, held = first, 0
        for at in range(first, last, step):
            ids = self.ids(at, min(at + step, last))
            ends = np.flatnonzero(ids == separator) + 1
            if at + len(ids) == last and not (len(ends) and ends[-1] == len(ids)):
                ends = np.append(ends, len(ids))
            if not len(ends):
                pending.append(ids)
                held += len(ids)
                continue
            cut = int(ends[-1])
            yield (
                begin,
                np.concatenate([*pending, ids[:cut]]),
                np.concatenate([[0], ends + held]).astype(np.int64),
            )
            pending, held, begin = [ids[cut:]], len(ids) - cut, at + cut

    def even(
        self, first: int, last: int, record: int, block_bytes: int
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (first id, ids, offsets) of records of equal length; the last may be shorter."""
        step = max(1, block_bytes // self.dtype.itemsize // record) * record
        for at in range(first, last, step):
            ids = self.ids(at, min(at + step, last))
            yield at, ids, np.append(np.arange(0, len(ids), record), len(ids)).astype(np.int64)


def look_alike(sample: Array) -> str:
    """Say why ids cannot be of the width and byte order that they were read with, else ''.

    Needs 32 ids for a verdict. uint16 ids whose every second value is 0 or tiny are uint32 ids in
    two halves; ids that are all multiples of 256, or in whose low bytes fewer values occur than in
    their high bytes, have their bytes swapped.
    """
    if len(sample) < 32 or not sample.any():
        return ""
    swapped = sample.byteswap()
    if sample.dtype.itemsize == 4:
        if int(sample.max()) >= 1 << 24 and int(swapped.max()) < 1 << 24:
            return "the ids look like big-endian uint32"
        return ""
    low, high = sample[0::2], sample[1::2]
    if (not high.any()) or (int(high.max()) < 32 and int(low.max()) >= 1024):
        return "the ids look like uint32, but were to be read as uint16"
    if not (low & 255).any() and int(low.max()) >> 8 < 32:
        return "the ids look like big-endian uint32, but were to be read as uint16"
    low_bytes, high_bytes = sample & 255, sample >> 8
    if not low_bytes.any():
        return "the ids look like big-endian uint16"
    spread = len(np.unique(high_bytes)) >= 200
    if spread and int(low_bytes.max()) < int(high_bytes.max()):
        return "the ids look like big-endian uint16"
    return ""


class BinExportOptions(
    exports.ExportOptions, frozen=True, forbid_unknown_fields=True, kw_only=True
):
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
        exports.check_column(store, config)
        dtype = exports.wide_dtype(store, config.column)
        if config.dtype != "auto":
            dtype = np.dtype(f"<{config.dtype}")
        path = exports.output_file(out, ".bin")
        with exporting(store, "bin", config, path.parent, path.name) as export:
            export.put(path, exports.raw(exports.pieces(store, config.column, dtype)))
        return exports.summary([path], store.tokens, dtype=dtype.name)


__all__ = ["BinExport", "BinSource", "LlmcExport"]
