"""Megatron's indexed datasets: `PREFIX.bin` and `PREFIX.idx`.

The .bin holds ids and nothing else. The .idx, little-endian: 9 bytes `MMIDIDX` and two zeros,
uint64 version 1, uint8 dtype code, uint64 number of sequences S, uint64 number of document indices
D (documents + 1); then S int32 lengths in tokens, S int64 byte offsets into the .bin, D int64
numbers of the sequence with which each document begins, the last one S. Multimodal sets add S int8
modes. Source of the format: megatron-core, `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors, make_folder, reading, remove
from tokmill.formats import exports
from tokmill.formats.indexed import Index, IndexedSource
from tokmill.formats.notes import exporting
from tokmill.formats.tokens import TokenOptions
from tokmill.store.schema import Array
from tokmill.store.store import Store

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
UINT16_IDS = 65_500
"""Megatron takes uint16 for fewer ids than this, int32 otherwise (`DType.optimal_dtype`)."""
CHECKED = 1 << 20


class MegatronOptions(TokenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of Megatron pairs."""

    unit: Literal["document", "sequence"] = "document"
    """What a record is; they differ where documents were split into sentences."""


class MegatronIndex(Index):
    """An .idx file, mapped."""

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
        """Return the tokens at which documents first … last begin."""
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


class MegatronSource(IndexedSource):
    """Megatron pairs, named by their prefix, by either file, or by a folder of pairs."""

    Config: ClassVar[type[msgspec.Struct]] = MegatronOptions
    token_suffix, companions = ".bin", (".idx",)

    def index_path(self, path: Path) -> Path:
        return path.with_suffix(".idx")

    def index(self, path: Path) -> MegatronIndex:
        with machine_errors("read", path):
            size = path.stat().st_size
        return MegatronIndex(self.index_path(path), size, self.config.unit)


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
            if not export.stands(data):
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
