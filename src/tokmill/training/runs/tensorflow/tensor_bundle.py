"""Checkpoints of TensorFlow, format V2, read without TensorFlow.

NAME.index                  a sorted table: name of a tensor → its place
NAME.data-00000-of-0000N    the data shards: the tensors one after the other, row by row

Format: tensorflow/core/util/tensor_bundle and BundleHeaderProto and BundleEntryProto of
tensorflow/core/protobuf/tensor_bundle.proto in https://github.com/tensorflow/tensorflow. The two
have only ten fields, so protobuf's wire format (https://protobuf.dev/programming-guides/encoding)
is read here without generated code.

Sorted tables of keys and values are LevelDB's.
Format: https://github.com/google/leveldb/blob/main/doc/table_format.md. Blocks of entries follow
each other. A key is stored as the number of bytes that it shares with the previous key, and the
rest. After a block come its kind of compression (1 byte) and a masked CRC-32C of both. An index
block of the same form holds the place of each block, and the footer holds the place of the index
block.

Nothing in the file is trusted: places, lengths and the order of keys are checked, and memory is
bounded by `MOST_BYTES` and `MOST_KEY_BYTES`.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, nearest
from tokmill.base.files import machine_errors, reading
from tokmill.store.schema import Array

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
"""The last bytes of a table."""
FOOTER = 48
TRAILER = 5
"""Bytes after a block: compression and checksum."""
MOST_BYTES = 16 << 20
"""Largest size of a table; an index of 100,000 tensors has about 8 MB."""
LONGEST_KEY = 4096
MOST_KEY_BYTES = 64 << 20
"""Largest size of all keys together: a few bytes can encode a long key with a shared beginning."""

Checksum = Callable[[Any], int]
"""The CRC-32C of bytes or of an array of them."""


def read_table(path: Path, checksum: Checksum) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table, in the order of the keys."""
    with reading(path) as handle:
        size = handle.seek(0, 2)
        handle.seek(0)
        data = handle.read(MOST_BYTES + 1)
    try:
        if size > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, and an index has at most {MOST_BYTES:,}")
        yield from _entries(data, checksum)
    except ValueError as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, what: str) -> TokmillError:
    return TokmillError(
        f"the file cannot be read: {what}", where=str(path), hint="fetch the checkpoint again"
    )


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the variable-length number at a byte, below 2^64, and the position after it.

    It has seven bits a byte, the lowest first. Raises `ValueError` if it goes beyond `end`.
    """
    value = 0
    for number in range(10):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << 7 * number
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError(f"the number at byte {at} has no end")


def unmasked(masked: int) -> int:
    """Return the CRC-32C of a masked one, which is rotated by 15 bits and has a constant added."""
    turned = (masked - 0xA282EAD8) & 0xFFFFFFFF
    return (turned >> 17 | turned << 15) & 0xFFFFFFFF


def _entries(data: bytes, checksum: Checksum) -> Iterator[tuple[bytes, bytes]]:
    end = len(data) - FOOTER
    if end < 0 or not data.endswith(MAGIC):
        raise ValueError("it does not end as a table of TensorFlow does")
    _, at = varint(data, end, len(data))
    _, at = varint(data, at, len(data))
    place, _ = _place(data, at, len(data))
    before, last, total = 0, None, 0
    for _, handle in _block(data, place, end, checksum):
        place, _ = _place(handle, 0, len(handle))
        if place[0] < before:
            raise ValueError(f"the block at byte {place[0]} overlaps another")
        before = sum(place) + TRAILER
        for key, value in _block(data, place, end, checksum):
            if last is not None and key <= last:
                raise ValueError(f"the key {key[:80]!r} is out of order")
            last, total = key, total + len(key)
            if total > MOST_KEY_BYTES:
                raise ValueError(f"its names are longer than {MOST_KEY_BYTES:,} bytes together")
            yield key, value


def _place(data: bytes, at: int, end: int) -> tuple[tuple[int, int], int]:
    """Return the offset and the size of a block, and the position after both."""
    offset, at = varint(data, at, end)
    size, at = varint(data, at, end)
    return (offset, size), at


def _block(
    data: bytes, place: tuple[int, int], end: int, checksum: Checksum
) -> Iterator[tuple[bytes, bytes]]:
    offset, size = place
    if offset + size + TRAILER > end:
        raise ValueError(f"the block at byte {offset} goes beyond the file")
    behind = offset + size + 1
    crc = int.from_bytes(data[behind : behind + 4], "little")
    if checksum(data[offset:behind]) != unmasked(crc):
        raise ValueError(f"the checksum of the block at byte {offset} is wrong")
    if data[behind - 1]:
        raise ValueError(f"the block at byte {offset} is compressed; TensorFlow writes plain ones")
    block = data[offset : behind - 1]
    stop = size - 4
    if stop >= 0:
        stop -= 4 * int.from_bytes(block[-4:], "little")
    if stop < 0:
        raise ValueError(f"the block at byte {offset} is cut short")
    key, at = b"", 0
    while at < stop:
        shared, at = varint(block, at, stop)
        added, at = varint(block, at, stop)
        length, at = varint(block, at, stop)
        if shared > len(key) or added + length > stop - at:
            raise ValueError(f"an entry of the block at byte {offset} goes beyond it")
        if shared + added > LONGEST_KEY:
            raise ValueError(f"a name of more than {LONGEST_KEY:,} bytes")
        key = key[:shared] + block[at : at + added]
        at += added + length
        yield key, block[at - length : at]


INDEX, CONFIG = ".index", "config.json"
DATA = re.compile(r"\.data-\d{5,}-of-\d{5,}$")
VERSION = 1
"""Newest version of the format that can be read here."""
BFLOAT16 = 14
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"), 3: np.dtype("<i4"), 9: np.dtype("<i8"), BFLOAT16: np.dtype("<u2"),
    19: np.dtype("<f2"),
}  # fmt: skip
"""Number of a dtype in TensorFlow → how its values are read."""
MOST_AXES, MOST_TENSORS, MOST_PLACE = 32, 200_000, 1 << 63


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
        if self.dtype == BFLOAT16:
            return "bfloat16"
        dtype = DTYPES.get(self.dtype)
        return dtype.name if dtype is not None else f"dtype number {self.dtype}"

    def check(self, shards: int) -> None:
        """Raise `ValueError` where it is not possible."""
        if self.shard >= shards:
            raise ValueError(f"it lies in data shard {self.shard} of {shards}")
        if len(self.shape) > MOST_AXES or max(*self.shape, self.offset, self.size, 0) >= MOST_PLACE:
            raise ValueError("its shape or its place is not possible")
        if self.dtype in DTYPES and not self.slices:
            wanted = math.prod(self.shape) * DTYPES[self.dtype].itemsize
            if self.size != wanted:
                raise ValueError(f"it has {self.size:,} bytes, and its shape and dtype {wanted:,}")


class TensorBundle:
    """The tensors of a checkpoint: their entries, and on request each one as an array.

    Args:
        prefix: the checkpoint without the endings of its files, `…/bert_model.ckpt`.

    Raises:
        TokmillError: the files are damaged, are missing, or are of a kind that is not read.
        MissingExtraError: the package for checksums is missing.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.index = prefix.with_name(prefix.name + INDEX)
        self.checksum: Checksum = plugins.require("google_crc32c").value
        self.shards = 0
        self.entries: dict[str, TensorEntry] = {}
        """Name of a tensor → its entry in the index."""
        try:
            self._read_index()
        except ValueError as error:
            raise damaged(self.index, str(error)) from None
        self._check_places()

    def read(self, name: str) -> Array:
        """Return a tensor; its file is mapped, so values are read when they are used.

        float32, float16, int32 and int64 keep their dtype; bfloat16 becomes float32, which is
        exact. Changes to the array do not change the file.
        """
        if name not in self.entries:
            raise TokmillError(
                f"there is no tensor {name!r}", where=str(self.prefix),
                hint=nearest(name, self.entries, "`entries` has the names"),
            )  # fmt: skip
        entry = self.entries[name]
        if entry.slices or entry.dtype not in DTYPES:
            what = f"was saved in {entry.slices} parts" if entry.slices else f"is of {entry.kind}"
            raise TokmillError(
                f"the tensor {name!r} {what}; what is read is whole, and of float32, float16, "
                "bfloat16, int32 or int64",
                where=str(self.index),
                hint="let TensorFlow load it, and save it without a partitioner or as float32",
            )
        path = self.shard_path(entry.shard)
        data: Array = np.empty(0, np.uint8)
        if entry.size:
            with machine_errors("read", path):
                # Mode c maps private pages: torch needs arrays that can be written to.
                data = np.memmap(path, np.uint8, "c", entry.offset, (entry.size,))
        if self.checksum(data) != unmasked(entry.crc):
            raise damaged(path, f"the checksum of the tensor {name!r} is wrong")
        values = np.require(data.view(DTYPES[entry.dtype]), requirements="A")
        if entry.dtype == BFLOAT16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(entry.shape)

    def shard_path(self, number: int) -> Path:
        name = f"{self.prefix.name}.data-{number:05}-of-{self.shards:05}"
        return self.prefix.with_name(name)

    def _read_index(self) -> None:
        for key, value in read_table(self.index, self.checksum):
            if not key:
                self.shards = shards_of(value)
            elif not self.shards:
                break
            elif key[0]:  # A key that begins with a zero byte is a part of a variable.
                try:
                    name, entry = key.decode(), entry_of(value)
                    entry.check(self.shards)
                except ValueError as error:
                    raise ValueError(f"the tensor {key[:80]!r}: {error}") from None
                self.entries[name] = entry
                if len(self.entries) > MOST_TENSORS:
                    raise ValueError(f"it names more than {MOST_TENSORS:,} tensors")
        if not self.shards:
            raise ValueError("it is not an index of a checkpoint: it has no header")

    def _check_places(self) -> None:
        whole = (one for one in self.entries.items() if not one[1].slices and one[1].size)
        shard, size, end = -1, 0, 0
        for name, entry in sorted(whole, key=lambda one: one[1][2:4]):
            if entry.shard != shard:
                shard, end = entry.shard, 0
                path = self.shard_path(shard)
                if not path.is_file():
                    raise TokmillError(
                        f"there is no {path.name}, and the index names {self.shards} data shards",
                        where=str(self.index),
                        hint="fetch all files of the checkpoint into one folder",
                    )
                with machine_errors("read", path):
                    size = path.stat().st_size
            if entry.offset < end:
                raise damaged(self.index, f"the tensor {name!r} overlaps another")
            end = entry.offset + entry.size
            if end > size:
                raise damaged(path, f"it has {size:,} bytes, and {name!r} ends at byte {end:,}")


def shards_of(value: bytes) -> int:
    """Return the number of data shards from a BundleHeaderProto.

    Raises `ValueError` where the checkpoint is of a newer version, or big-endian.
    """
    header = {number: field for number, field in fields(value) if isinstance(field, int)}
    # Field 3 is a VersionDef, whose field 2 is the version that a reader has to know at least.
    versions = [f for number, f in fields(value) if number == 3 and isinstance(f, bytes)]
    needed = [n for one in versions for key, n in fields(one) if key == 2]
    if header.get(2) or any(not isinstance(n, int) or n > VERSION for n in needed):
        raise ValueError(
            f"it is big-endian, or needs a reader of a version above {VERSION}: it is not read"
        )
    shards = header.get(1, 0)
    if not 0 < shards < 1 << 31:
        raise ValueError(f"{shards} data shards are not possible")
    return shards


def entry_of(value: bytes) -> TensorEntry:
    """Parse a BundleEntryProto; raises `ValueError`."""
    names = {1: "dtype", 3: "shard", 4: "offset", 5: "size", 6: "crc"}
    numbers: dict[str, int] = {}
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


def is_tensorflow(place: Path) -> bool:
    """Say whether a folder, a file, or the prefix of files is a checkpoint of TensorFlow."""
    with machine_errors("read", place):
        if place.is_dir():
            names = [path.name for path in place.iterdir()]
            return CONFIG not in names and any(
                name.endswith(INDEX) or name == "bert_config.json" for name in names
            )
        return bool(place.name) and place.with_name(_prefix(place) + INDEX).is_file()


def find_bundle(place: Path) -> Path:
    """Return the prefix of a checkpoint; `place`: its folder, its prefix, or one of its files."""
    with machine_errors("read", place):
        if place.is_dir():
            indexes = sorted(place.glob(f"*{INDEX}"))
            if len(indexes) > 1:
                names = ", ".join(path.name.removesuffix(INDEX) for path in indexes[:4])
                names += ", …" * (len(indexes) > 4)
                raise TokmillError(
                    f"the folder has {len(indexes)} checkpoints: {names}",
                    where=str(place),
                    hint=f"name one: {indexes[-1]}",
                )
            place = indexes[0] if indexes else place / "NAME"
        name = _prefix(place)
        if not name or not place.with_name(name + INDEX).is_file():
            raise TokmillError(
                f"there is no checkpoint of TensorFlow: no file {name}{INDEX}",
                where=str(place.parent),
                hint=f"a checkpoint of the format V2 is NAME{INDEX} and "
                "NAME.data-00000-of-00001: name the folder of both; "
                "tf.compat.v1.train.Saver writes it of an older one",
            )
    return place.with_name(name)


def _prefix(place: Path) -> str:
    return DATA.sub("", place.name).removesuffix(INDEX)
