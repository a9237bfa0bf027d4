"""A small writer of TensorFlow's checkpoints, from the description of the format.

It writes what TensorFlow does not write here: several blocks in the index, headers of other
machines, and entries that lie. What TensorFlow itself wrote is in tests/golden/tensorflow.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import google_crc32c
import numpy as np

MAGIC = 0xDB4775248B80FB57


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def masked(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def header(shards: int = 1, endian: int = 0, needs: int = 0) -> bytes:
    version = field(1, 1) + (field(2, needs) if needs else b"")
    return field(1, shards) + (field(2, endian) if endian else b"") + field(3, version)


def entry(
    dtype: int,
    shape: Iterable[int],
    offset: int,
    size: int,
    crc: int,
    shard: int = 0,
    slices: int = 0,
) -> bytes:
    axes = b"".join(field(2, field(1, axis)) for axis in shape)
    data = field(1, dtype) + field(2, axes)
    for number, value in ((3, shard), (4, offset), (5, size)):
        data += field(number, value) if value else b""
    return data + varint(6 << 3 | 5) + crc.to_bytes(4, "little") + field(7, b"") * slices


def block(entries: Iterable[tuple[bytes, bytes]], restart: int = 16) -> bytes:
    data, before, restarts = b"", b"", []
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % restart == 0:
            restarts.append(len(data))
        else:
            while shared < min(len(key), len(before)) and key[shared] == before[shared]:
                shared += 1
        data += varint(shared) + varint(len(key) - shared) + varint(len(value))
        data += key[shared:] + value
        before = key
    restarts = restarts or [0]
    for place in (*restarts, len(restarts)):
        data += place.to_bytes(4, "little")
    return data


def table(entries: Mapping[bytes, bytes], each: int = 1000, kind: int = 0) -> bytes:
    """Return a table with `each` entries a block, said to be compressed by a kind."""
    rows, data = list(entries.items()), b""

    def put(made: bytes) -> bytes:
        nonlocal data
        handle = varint(len(data)) + varint(len(made))
        made += bytes([kind])
        data += made + masked(made).to_bytes(4, "little")
        return handle

    places = []
    for at in range(0, len(rows), each):
        part = rows[at : at + each]
        places.append((part[-1][0], put(block(part))))
    meta = put(block([]))
    footer = meta + put(block(places, 1))
    return data + footer.ljust(40, b"\0") + MAGIC.to_bytes(8, "little")


def write_bundle(
    prefix: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    each: int = 1000,
    head: bytes = b"",
    kind: int = 0,
    extra: Mapping[bytes, bytes] | None = None,
) -> None:
    """Write float32 tensors; `extra`: keys of the index and their values, in place of others."""
    rows, offset = {b"": head or header()}, 0
    shard = prefix.with_name(prefix.name + ".data-00000-of-00001")
    with open(shard, "wb") as file:
        for name in sorted(tensors):
            part = np.ascontiguousarray(tensors[name], "<f4").tobytes()
            rows[name.encode()] = entry(1, tensors[name].shape, offset, len(part), masked(part))
            offset += file.write(part)
    rows = dict(sorted({**rows, **(extra or {})}.items()))
    index = prefix.with_name(prefix.name + ".index")
    index.write_bytes(table(rows, each, kind))
