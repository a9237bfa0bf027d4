"""Megatron's indexed datasets: `PREFIX.bin` and `PREFIX.idx`.

The .bin holds ids and nothing else. The .idx, little-endian: 9 bytes `MMIDIDX` and two zeros,
uint64 version 1, uint8 dtype code, uint64 number of sequences S, uint64 number of document indices
D (documents + 1); then S int32 lengths in tokens, S int64 byte offsets into the .bin, D int64
numbers of the sequence with which each document begins, the last one S. Multimodal sets add S int8
modes. Source of the format: megatron-core, `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import inside, machine_errors, make_folder, reading, remove, sampled_digest
from tokmill.builds.scan import InputFile, find_files
from tokmill.builds.source import MAX_ITEM, Hash, Item
from tokmill.formats import exports
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

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
UINT16_IDS = 65_500
"""Megatron takes uint16 for fewer ids than this, int32 otherwise (`DType.optimal_dtype`)."""
CHECKED = 1 << 20
DOCUMENTS = 1 << 16


class MegatronOptions(TokenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of Megatron pairs."""

    unit: Literal["document", "sequence"] = "document"
    """What a record is; they differ where documents were split into sentences."""


class MegatronIndex:
    """An .idx file, mapped: the beginnings of the documents of a .bin, read on demand."""

    def __init__(self, path: Path, bin_size: int, unit: str) -> None:
        self.path, self.unit = path, unit
        with reading(path) as file:
            size = file.seek(0, 2)
            if size < HEADER.size:
                raise self._damaged(f"it is {size} bytes long, its header {HEADER.size}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        magic, version, code, sequences, documents = HEADER.unpack(self._map[: HEADER.size])
        if magic != MAGIC:
            old = magic.startswith(OLD_MAGIC)
            raise TokmillError(
                "this is an index of the old kind (TNTIDX)" if old else "this is no Megatron index",
                where=f"{path}, byte 0",
                hint="make it again with --dataset-impl mmap" if old else "is it another file?",
            )
        if version != 1:
            swapped = version == 1 << 56
            raise TokmillError(
                f"the index has version {version}, this program reads 1",
                where=f"{path}, byte 9",
                hint="its bytes are swapped: it was written on a big-endian machine"
                if swapped
                else "it was written by another version of Megatron",
            )
        if code not in CODES:
            raise TokmillError(
                f"the dtype code {code} ({FLOATS.get(code, 'unknown')}) is no kind of token ids",
                where=f"{path}, byte 17",
                hint="codes 1 to 5 and 8 are integers",
            )
        self.dtype = np.dtype(CODES[code])
        expected = HEADER.size + 12 * sequences + 8 * documents
        if size == expected + sequences and sequences:
            raise TokmillError(
                "the index has modes: it is a multimodal dataset",
                where=f"{path}, byte {expected}",
                hint="only sets of token ids alone are read",
            )
        if size != expected or documents < 1:
            raise self._damaged(
                f"{sequences} sequences and {documents} document indices, of at least 1, take "
                f"{expected} bytes, it has {size}"
            )
        self._sequences = sequences
        place = HEADER.size
        self._lengths = np.frombuffer(self._map, "<i4", sequences, place)
        self._pointers = np.frombuffer(self._map, "<i8", sequences, place + 4 * sequences)
        self._documents = np.frombuffer(self._map, "<i8", documents, place + 12 * sequences)
        end = 0
        if sequences:
            end = int(self._pointers[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        if end != bin_size:
            raise TokmillError(
                f"the index promises {end} bytes of {self.dtype.name}, the .bin has {bin_size}",
                where=str(path.with_suffix(".bin")),
                hint="one of the two was cut off, or they do not belong together",
            )
        self.tokens = end // self.dtype.itemsize
        self.documents = sequences if unit == "sequence" else documents - 1

    def _damaged(self, what: str) -> TokmillError:
        return TokmillError(
            f"the index is damaged: {what}", where=str(self.path), hint="fetch or make it again"
        )

    def starts(self, first: int, last: int) -> Array:
        """Return the tokens at which documents first … last begin (int64, last - first + 1).

        Document `documents`, one past the last, begins where the file ends.
        """
        sequences = (
            np.arange(first, last + 1)
            if self.unit == "sequence"
            else self._documents[first : last + 1].astype(np.int64)
        )
        inside = (sequences >= 0) & (sequences < self._sequences)
        starts = np.full(len(sequences), self.tokens, np.int64)
        starts[inside] = self._pointers[sequences[inside]] // self.dtype.itemsize
        if (np.diff(starts) < 0).any() or (len(starts) and starts[0] < 0):
            raise self._damaged(f"documents {first} to {last} do not follow one another")
        return starts

    def start(self, document: int) -> int:
        return int(self.starts(document, document)[0])

    def check(self) -> None:
        """Refuse lengths below 0, sequences that leave gaps, document indices out of order."""
        size, expected, before = self.dtype.itemsize, 0, 0
        for at in range(0, self._sequences, CHECKED):
            lengths = self._lengths[at : at + CHECKED].astype(np.int64)
            pointers = self._pointers[at : at + CHECKED]
            ends = expected + np.cumsum(lengths * size)
            wrong = (lengths < 0) | (pointers != ends - lengths * size)
            if wrong.any():
                bad = at + int(wrong.argmax())
                raise self._damaged(f"sequence {bad} does not begin where the one before ends")
            expected = int(ends[-1])
        for at in range(0, len(self._documents), CHECKED):
            numbers = self._documents[at : at + CHECKED].astype(np.int64)
            if numbers[0] < before or (np.diff(numbers) < 0).any():
                raise self._damaged(f"its documents are out of order after document {at}")
            before = int(numbers[-1])
        if self._documents[0] != 0 or before != self._sequences:
            raise self._damaged(
                f"its documents cover the sequences {self._documents[0]} to {before} "
                f"of {self._sequences}"
            )


class MegatronSource(TokenSource):
    """Megatron pairs, named by their prefix, by either file, or by a folder of pairs.

    A record is a document. Files are cut at documents into items of at most 64 MiB (or one longer
    document), so all workers can share a file. An item's digest covers the index too; its `path` is
    the folder, as a pair has two files.
    """

    Config: ClassVar[type[msgspec.Struct]] = MegatronOptions

    def files(self) -> Iterator[InputFile]:
        """Yield the files of ids; an input may name the pair by its prefix or its index."""
        for file in self.found():
            index = file.path.with_suffix(".idx")
            if not index.is_file():
                raise TokmillError(
                    f"its index {index.name} is missing",
                    where=str(file.path),
                    hint="without an index: `tokmill build bin --dtype u2 --separator-id ID`",
                )
            yield InputFile(file.name, file.path, file.size, self._digest(file.path))

    def found(self) -> list[InputFile]:
        """Return the files of ids; their indexes are not counted as left out."""
        inputs = dict.fromkeys(self._named(argument) for argument in self.inputs)
        found = find_files(list(inputs), [".bin"], choice=self.config)
        self.left_out = {what: n for what, n in found.left_out.items() if what != ".idx"}
        return found.files

    def _named(self, argument: str) -> str:
        path = Path(argument)
        if path.is_dir():
            return argument
        name = path.name.removesuffix(".idx").removesuffix(".bin")
        return str(path.with_name(f"{name}.bin"))

    def index(self, path: Path) -> MegatronIndex:
        """Open the index of a file of ids and compare it with the file's size."""
        with machine_errors("read", path):
            size = path.stat().st_size
        return MegatronIndex(path.with_suffix(".idx"), size, self.config.unit)

    def _digest(self, path: Path) -> str:
        digest = hashlib.sha256()
        for part in (path, path.with_suffix(".idx")):
            with machine_errors("read", part):
                digest.update(sampled_digest(part, part.stat().st_size).encode())
        return digest.hexdigest()[:32]

    def file_dtype(self) -> IdType:
        """Return the widest dtype of the files."""
        return store_dtype([self.index(file.path).dtype for file in self.files()])

    def items(self) -> Iterator[Item]:
        """Yield runs of whole documents of at most 64 MiB (or one that is longer)."""
        for file in self.files():
            index = self.index(file.path)
            index.check()
            size = index.dtype.itemsize
            for start, stop in _runs(index, MAX_ITEM // size):
                folder = str(file.path.parent.absolute())
                yield Item(file.name, folder, start * size, stop * size, file.digest)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield the documents that begin in the item."""
        path = inside(item.path, PurePosixPath(item.name).name)
        self._check_unchanged(path, item)
        index = self.index(path)
        size = index.dtype.itemsize
        every = range(index.documents + 1)
        first = bisect_left(every, item.start // size, key=index.start)
        last = index.documents
        if item.stop // size < index.tokens:
            last = bisect_left(every, item.stop // size, key=index.start)
        # All lengths first: mixed with the ids, the digest would depend on the blocks.
        for at in range(first, last, DOCUMENTS):
            lengths = np.diff(index.starts(at, min(last, at + DOCUMENTS)))
            digest.update(np.ascontiguousarray(lengths, "<i8").tobytes())
        with reading(path) as file:
            for starts in _batches(index, first, last, self.resources.block_bytes // size):
                byte, stop = int(starts[0]) * size, int(starts[-1]) * size
                data = read_exactly(file, byte, stop, path)
                digest.update(data)
                ids = np.frombuffer(data, index.dtype)
                token = self.checked(ids, at_byte(path, byte, size))
                done = min(1.0, (stop - item.start) / max(1, item.size))
                yield Records(starts - starts[0], {"token": token}, starts[:-1] * size, done=done)
        self._check_unchanged(path, item)

    def _check_unchanged(self, path: Path, item: Item) -> None:
        if self._digest(path) != item.digest:
            raise TokmillError(
                "the file or its index has changed since the build was planned",
                where=str(path),
                hint="run the same command again: it plans anew and makes the changed shards again",
            )


def _runs(index: MegatronIndex, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, last token + 1) of runs of documents of at most `most` tokens."""
    documents, document, begin = range(index.documents + 1), 0, 0
    while index.tokens - begin > most:
        after = bisect_right(documents, begin + most, lo=document, key=index.start) - 1
        if index.start(after) == begin:
            after = bisect_right(documents, begin, lo=document, key=index.start)
        document, stop = after, index.start(after)
        yield begin, stop
        begin = stop
        if begin == index.tokens:
            return
    yield begin, index.tokens


def _batches(index: MegatronIndex, first: int, last: int, tokens: int) -> Iterator[Array]:
    """Yield the starts of documents first … last - 1, and the end, about `tokens` at a time."""
    for at in range(first, last, DOCUMENTS):
        starts = index.starts(at, min(last, at + DOCUMENTS))
        begin, end = 0, len(starts) - 1
        while begin < end:
            stop = int(np.searchsorted(starts, starts[begin] + tokens, side="right")) - 1
            stop = min(max(begin + 1, stop), end)
            yield starts[begin : stop + 1]
            begin = stop


class MegatronExport:
    """One pair `OUT.bin`, `OUT.idx`: one sequence a record, one document a sequence."""

    Config: ClassVar[type[msgspec.Struct]] = exports.ExportOptions

    def __init__(self, config: exports.ExportOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write the pair and return files, tokens, bytes and dtype.

        `out` is the prefix (a suffix .bin or .idx is taken off); in an existing folder it is
        `tokens`. Raises `TokmillError` for a record above 2^31 - 1 tokens.
        """
        exports.check_column(store, self.config)
        few = exports.id_count(store, self.config.column) < UINT16_IDS
        code, dtype = (8, np.dtype("<u2")) if few else (4, np.dtype("<i4"))
        prefix = out / "tokens" if out.is_dir() else out
        if prefix.suffix in (".bin", ".idx"):
            prefix = prefix.with_suffix("")
        make_folder(prefix.parent)
        data, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        head = np.frombuffer(
            HEADER.pack(MAGIC, 1, code, store.records, store.records + 1), np.uint8
        )
        arrays = chain(
            [head],
            _lengths(store),
            _pointers(store, dtype.itemsize),
            _document_numbers(store.records),
        )
        with exporting(
            store,
            "megatron",
            self.config,
            prefix.parent,
            prefix.name,
            files=[data, index],
            named=out,
        ) as export:
            # The index is the commit: while the .bin is being replaced there is none.
            remove(index)
            export.put(data, exports.raw(exports.pieces(store, self.config.column, dtype)))
            export.put(index, exports.raw(arrays))
        return exports.summary(
            [data, index], store.tokens, documents=store.records, dtype=dtype.name
        )


def _lengths(store: Store) -> Iterator[Array]:
    for lengths in exports.lengths(store):
        if len(lengths) and int(lengths.max()) >= 1 << 31:
            raise TokmillError(
                f"a record of {lengths.max()} tokens is too long for a Megatron index",
                where=str(store.path),
                hint="`tokmill build select STORE --max-length N -o NEW` leaves longer ones out",
            )
        yield lengths.astype("<i4")


def _pointers(store: Store, size: int) -> Iterator[Array]:
    base = 0
    for lengths in exports.lengths(store):
        ends = base + np.cumsum(lengths * size)
        yield (ends - lengths * size).astype("<i8")
        base = int(ends[-1]) if len(ends) else base


def _document_numbers(records: int) -> Iterator[Array]:
    for start in range(0, records + 1, CHECKED):
        yield np.arange(start, min(start + CHECKED, records + 1), dtype="<i8")
