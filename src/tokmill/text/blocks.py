"""Bytes of an item as blocks of whole records, whatever the delimiter and compression.

A record begins after a delimiter. An item owns the records that begin in (start, stop], the first
item also the one at 0; so the ranges of a file's items tile it, and each is found by two searches.
Members of compressed files follow the same rule, counted in the bytes that they inflate to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tokmill.build.source import MAX_ITEM, Hash, Item
from tokmill.files import machine_errors
from tokmill.text.streams import inflate, is_stream

MAX_RECORD = 64 << 20
READ = 1 << 20


class Block(NamedTuple):
    """Whole records with their delimiters, and where they begin.

    Offsets are those of the file; in a compressed one of the content of the item.
    """

    data: bytes
    start: int
    too_long: list[int]
    """Offsets of records above 64 MiB, which are not in `data`."""
    ends_part: bool


def record_blocks(item: Item, delimiter: bytes, digest: Hash, block_bytes: int) -> Iterator[Block]:
    """Yield an item's records in blocks of about `block_bytes`; hash all that they consist of."""
    with machine_errors("read", item.path):
        if is_stream(item.path):
            chunks = _members(item, delimiter)
            inside = item.start > 0
            yield from _cut(chunks, 0, delimiter, digest, block_bytes, inside, item, True)
            return
        with open(item.path, "rb") as file:
            size = file.seek(0, 2)
            start = _record_start(file, item.start, size, delimiter)
            stop = _record_start(file, item.stop, size, delimiter)
            inside = False
            if start:
                file.seek(max(0, start - len(delimiter)))
                inside = file.read(len(delimiter)) != delimiter and start < size
            file.seek(start)
            chunks = _read(file, stop - start)
            whole = stop == size
            yield from _cut(chunks, start, delimiter, digest, block_bytes, inside, item, whole)


def _record_start(file: BinaryIO, place: int, size: int, delimiter: bytes) -> int:
    """Return the first record start after `place`, looking at most 64 MiB further."""
    if place == 0 or place >= size:
        return min(place, size)
    at = max(0, place - len(delimiter) + 1)
    file.seek(at)
    tail = b""
    while at - place < MAX_RECORD:
        chunk = file.read(1 << 16)
        if not chunk:
            return size
        window = tail + chunk
        found = window.find(delimiter)
        if found >= 0:
            return at - len(tail) + found + len(delimiter)
        at += len(chunk)
        tail = window[-(len(delimiter) - 1) :] if len(delimiter) > 1 else b""
    return min(place + MAX_RECORD, size)


def _read(file: BinaryIO, left: int) -> Iterator[bytes]:
    while left:
        chunk = file.read(min(READ, left))
        if not chunk:
            return
        left -= len(chunk)
        yield chunk


def _members(item: Item, delimiter: bytes) -> Iterator[bytes]:
    """Yield the content of an item's members, and of the next ones up to the first delimiter."""
    size = Path(item.path).stat().st_size
    yield from inflate(item.path, item.start, item.stop)
    if item.stop < size:
        for chunk in inflate(item.path, item.stop):
            found = chunk.find(delimiter)
            if found >= 0:
                yield chunk[: found + len(delimiter)]
                return
            yield chunk


def _cut(
    chunks: Iterator[bytes],
    base: int,
    delimiter: bytes,
    digest: Hash,
    block_bytes: int,
    inside: bool,
    item: Item,
    whole: bool,
) -> Iterator[Block]:
    """Cut chunks into blocks of whole records.

    `inside`: the first bytes belong to an over-long record that another item reports. `whole`: the
    end of the chunks is the end of the file, so the last record needs no delimiter.
    """
    stream = is_stream(item.path)
    part = 0
    pending: list[bytes] = []
    size = 0
    skipping = inside
    lost: list[int] = []
    position = base
    for chunk in chunks:
        pending.append(chunk)
        size += len(chunk)
        next_part = (part + 1) * MAX_ITEM if stream else None
        crosses = next_part is not None and position + size > next_part
        if size < block_bytes and not crosses:
            continue
        data = b"".join(pending)
        if skipping:
            end = data.find(delimiter)
            if end < 0:
                keep = len(delimiter) - 1
                cut = len(data) - keep
                digest.update(memoryview(data)[:cut])
                pending, size, position = [data[cut:]], keep, position + cut
                continue
            end += len(delimiter)
            digest.update(memoryview(data)[:end])
            data, position, skipping = data[end:], position + end, False
        while next_part is not None and position + len(data) > next_part:
            # The part ends at the first record that begins after its 64 MiB.
            near = max(0, next_part - position - len(delimiter) + 1)
            end = data.find(delimiter, near)
            if end < 0:
                break
            end += len(delimiter)
            digest.update(memoryview(data)[:end])
            if part >= item.parts_done:
                yield Block(data[:end], position, lost, True)
            lost = []
            part += 1
            data, position = data[end:], position + end
            next_part = (part + 1) * MAX_ITEM
        end = data.rfind(delimiter) + len(delimiter) if delimiter in data else 0
        if end:
            digest.update(memoryview(data)[:end])
            if part >= item.parts_done:
                yield Block(data[:end], position, lost, False)
            lost = []
            data, position = data[end:], position + end
        if len(data) >= MAX_RECORD:
            lost.append(position)
            skipping = True
        pending, size = [data], len(data)
    data = b"".join(pending)
    digest.update(data)
    if skipping:
        end = data.find(delimiter)
        data, position = (
            (data[end + len(delimiter) :], position + end + len(delimiter))
            if end >= 0
            else (b"", position + len(data))
        )
    if not whole and data and not data.endswith(delimiter):
        end = data.rfind(delimiter) + len(delimiter) if delimiter in data else 0
        lost.append(position + end)
        data = data[:end]
    if (data or lost) and part >= item.parts_done:
        yield Block(data, position, lost, False)
