"""Sorted tables of keys and values, as LevelDB and TensorFlow write them.

Format: https://github.com/google/leveldb/blob/main/doc/table_format.md. Blocks of entries follow
each other. A key is stored as the number of bytes that it shares with the previous key, and the
rest. After a block come its kind of compression (1 byte) and a masked CRC-32C of both. An index
block of the same form holds the place of each block, and the footer holds the place of the index
block.

Nothing in the file is trusted: places, lengths and the order of keys are checked, and memory is
bounded by `MOST_BYTES` and `MOST_KEY_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokmill.base.errors import TokmillError
from tokmill.base.files import reading

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
    """Yield the keys and values of a table, in the order of the keys.

    Raises `TokmillError` where the file is damaged or compressed, `MachineError` where it cannot be
    read.
    """
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
    """Yield the entries of a block that lies before `end`."""
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
