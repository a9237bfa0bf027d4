"""Entries and header of the index of a TensorFlow checkpoint.

Format: BundleHeaderProto and BundleEntryProto of tensorflow/core/protobuf/tensor_bundle.proto in
https://github.com/tensorflow/tensorflow. The two have only ten fields, so protobuf's wire format
(https://protobuf.dev/programming-guides/encoding) is read here without generated code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tokmill.training.runs.tensorflow.sstable import varint

VERSION = 1
"""Newest version of the format that can be read here."""
BFLOAT16 = 14
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"), 3: np.dtype("<i4"), 9: np.dtype("<i8"), BFLOAT16: np.dtype("<u2"),
    19: np.dtype("<f2"),
}  # fmt: skip
"""Number of a dtype in TensorFlow → how its values are read."""
OTHERS = {2: "float64", 4: "uint8", 5: "int16", 6: "int8", 7: "string", 10: "bool"}
MOST_AXES = 32


class TensorEntry(NamedTuple):
    """The entry of a tensor in the index."""

    dtype: int = 0
    """Number of the dtype in TensorFlow."""
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    """Bytes in the data shard."""
    crc: int = 0
    """Masked CRC-32C of these bytes."""
    slices: int = 0
    """Parts that a partitioned variable was saved in; 0: it is whole."""

    @property
    def kind(self) -> str:
        """The name of the dtype."""
        if self.dtype == BFLOAT16:
            return "bfloat16"
        if self.dtype in DTYPES:
            return DTYPES[self.dtype].name
        return OTHERS.get(self.dtype, f"dtype number {self.dtype}")


def shards_of(value: bytes) -> int:
    """Return the number of data shards from a BundleHeaderProto.

    Raises `ValueError` where the checkpoint is of a newer version, or big-endian.
    """
    shards, needed, big = 0, 0, False
    for number, field in fields(value):
        if number == 1 and isinstance(field, int):
            shards = field
        elif number == 2 and isinstance(field, int):
            big = field != 0
        elif number == 3 and isinstance(field, bytes):
            # A VersionDef: field 2 is the version that a reader has to know at least.
            needed = max([n for key, n in fields(field) if key == 2 and isinstance(n, int)] + [0])
    if needed > VERSION:
        raise ValueError(f"it needs a reader of version {needed}, and this one knows {VERSION}")
    if big:
        raise ValueError("its numbers are big-endian; only little-endian ones are read")
    if not 0 < shards < 1 << 31:
        raise ValueError(f"{shards} data shards are not possible")
    return shards


def check_entry(entry: TensorEntry, shards: int) -> None:
    """Raise `ValueError` where an entry is not possible."""
    if entry.shard >= shards:
        raise ValueError(f"it lies in data shard {entry.shard} of {shards}")
    if len(entry.shape) > MOST_AXES or max(entry.shape, default=0) >= 1 << 63:
        raise ValueError("its shape is not possible")
    if max(entry.offset, entry.size) >= 1 << 63:
        raise ValueError("its place is not possible")
    if entry.dtype in DTYPES and not entry.slices:
        wanted = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if entry.size != wanted:
            raise ValueError(
                f"it has {entry.size:,} bytes, and {entry.kind} of {list(entry.shape)[:8]} "
                f"{wanted if wanted < 1 << 63 else 'more'}"
            )


def entry_of(value: bytes) -> TensorEntry:
    """Parse a BundleEntryProto; raises `ValueError`."""
    numbers = {"dtype": 0, "shard": 0, "offset": 0, "size": 0, "crc": 0}
    names = {1: "dtype", 3: "shard", 4: "offset", 5: "size", 6: "crc"}
    shape: list[int] = []
    slices = 0
    for number, field in fields(value):
        if number in names and isinstance(field, int):
            numbers[names[number]] = field
        elif number == 2 and isinstance(field, bytes):
            # A TensorShapeProto: field 2 is an axis, whose field 1 is its size.
            for key, axis in fields(field):
                if key == 2 and isinstance(axis, bytes):
                    sizes = [n for one, n in fields(axis) if one == 1 and isinstance(n, int)]
                    shape.append(sizes[-1] if sizes else 0)
        elif number == 7:
            slices += 1
    return TensorEntry(shape=tuple(shape), slices=slices, **numbers)


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message; raises `ValueError`."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at, len(data))
        kind, length = tag & 7, 0
        if kind == 0:
            value, at = varint(data, at, len(data))
            yield tag >> 3, value
            continue
        if kind == 2:
            length, at = varint(data, at, len(data))
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of the unknown kind {kind}")
        if length > len(data) - at:
            raise ValueError("a field is cut short")
        part = data[at : at + length]
        at += length
        yield tag >> 3, part if kind == 2 else int.from_bytes(part, "little")
