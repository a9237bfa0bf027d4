"""Read the bytes of an item as blocks of whole records, for any delimiter and compression.

A record begins after a delimiter. An item has the records that begin in (start, stop]; the first
item also has the record at 0. So each record is in exactly one item of a file, and two searches
find the records of an item. A compressed file is one item.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import BinaryIO, NamedTuple

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors
from tokmill.base.inflate import MAGIC, inflate
from tokmill.base.remote import open_input
from tokmill.builds.finish import HEAD, conversion, encoding_of
from tokmill.builds.source import MAX_ITEM, Hash, Item
from tokmill.store.schema import Array

BOM = b"\xef\xbb\xbf"
SUFFIXES = tuple(MAGIC)
EXPANDS = 5
"""Usual ratio of content to compressed size; it only decides how many files share a shard."""


def is_stream(path: str) -> bool:
    return path.lower().endswith(SUFFIXES)


def suffix(path: str) -> str:
    return next(ending for ending in SUFFIXES if path.lower().endswith(ending))


MAX_RECORD = 64 << 20
READ = 1 << 20
PEEK = 1 << 16


class Block(NamedTuple):
    """Whole records with their delimiters, and where they begin.

    Offsets count bytes of the file; for a compressed file, bytes of the item's content.
    """

    data: bytes
    start: int
    too_long: list[int]
    """Offsets of records above 64 MiB, which are not in `data`."""
    ends_part: bool
    done: float = 0.0
    """Share of the item that ends with this block."""


MOST_RECORDS = 1 << 16
"""Records of a block at most, as a reader may need some hundred bytes for each."""


def record_blocks(item: Item, delimiter: bytes, digest: Hash, block_bytes: int) -> Iterator[Block]:
    """Yield an item's records in blocks of about `block_bytes`; update `digest` with all bytes.

    A block has at most 65,536 records.
    """
    read = _Read(item)
    check_encoding = item.start == 0
    for block in _large_blocks(item, delimiter, digest, block_bytes, read):
        if check_encoding and (name := encoding_of(block.data[:HEAD])):
            raise TokmillError(
                f"the file is text in {name}, not in UTF-8",
                where=item.path,
                hint=conversion(item.path),
            )
        check_encoding = False
        before, after = read.done, read.after(block)
        share = (after - before) / max(1, len(block.data))
        for piece in few_records(block, delimiter, MOST_RECORDS):
            end = piece.start + len(piece.data) - block.start
            yield piece._replace(done=before + share * end if piece.data else after)


class _Read:
    """How much of an item has been read, in bytes of the file."""

    def __init__(self, item: Item) -> None:
        self.item, self.packed = item, is_stream(item.path)
        self.place, self.done = item.start, 0.0
        """`place`: for a compressed item, the byte up to which it is inflated."""

    def inflated(self, place: int) -> None:
        self.place = place

    def after(self, block: Block) -> float:
        """Return the share of the item up to the end of the last block."""
        if not self.packed:
            self.place = block.start + len(block.data)
        share = (self.place - self.item.start) / max(1, self.item.size)
        self.done = max(self.done, min(1.0, share))
        return self.done


def few_records(block: Block, delimiter: bytes, most: int) -> Iterator[Block]:
    data, start = block.data, block.start
    # Faster than to count delimiters; there are no more of them.
    last_bytes = np.count_nonzero(np.frombuffer(data, np.uint8) == delimiter[-1])
    if last_bytes <= most or data.count(delimiter) <= most:
        yield block
        return
    place = 0
    rest = data
    while len(pieces := rest.split(delimiter, most)) > most:
        stop = len(data) - len(pieces[-1])
        last = stop == len(data)
        yield Block(
            data[place:stop],
            start + place,
            block.too_long if last else [],
            block.ends_part and last,
        )
        place, rest = stop, pieces[-1]
    if rest:
        yield Block(rest, start + place, block.too_long, block.ends_part)


def _large_blocks(
    item: Item, delimiter: bytes, digest: Hash, block_bytes: int, read: _Read
) -> Iterator[Block]:
    with machine_errors("read", item.path):
        if is_stream(item.path):
            chunks = inflate(item.path, tell=read.inflated)
            yield from _cut(chunks, 0, delimiter, digest, block_bytes, False, item, True)
            return
        with open_input(item.path) as file:
            size = file.seek(0, 2)
            start, in_time = _record_start(file, item.start, size, delimiter)
            stop, _ = _record_start(file, item.stop, size, delimiter)
            file.seek(start)
            chunks = _read(file, stop - start)
            whole = stop == size
            yield from _cut(chunks, start, delimiter, digest, block_bytes, not in_time, item, whole)


def _record_start(file: BinaryIO, place: int, size: int, delimiter: bytes) -> tuple[int, bool]:
    """Return (first record start after `place`, True), searching at most 64 MiB.

    If there is none so near: (a byte inside of the too long record, False).
    """
    if place == 0 or place >= size:
        return min(place, size), True
    length = len(delimiter)
    at = max(0, place - length + 1)
    if _overlaps_itself(delimiter):
        at = _synchronized(file, at, delimiter)
    file.seek(at)
    window = b""
    last = place + MAX_RECORD + length
    while at <= last:
        chunk = file.read(PEEK)
        if not chunk:
            return size, True
        window += chunk
        begin = 0
        while (at_delimiter := window.find(delimiter, begin)) >= 0:
            begin = at_delimiter + length
            if at + begin > place:
                return (at + begin, True) if at + begin <= last else (place + MAX_RECORD, False)
        begin = max(begin, len(window) - length + 1)
        at, window = at + begin, window[begin:]
    return place + MAX_RECORD, False


def _overlaps_itself(delimiter: bytes) -> bool:
    """Say whether two delimiters can overlap, as two empty lines in three newlines."""
    return any(delimiter.startswith(delimiter[i:]) for i in range(1, len(delimiter)))


def _synchronized(file: BinaryIO, place: int, delimiter: bytes) -> int:
    """Return the nearest byte at or before `place` that lies inside of no possible delimiter.

    A search from there finds the same delimiters as a search from the beginning of the file.
    """
    length, low, window = len(delimiter), place, b""
    while True:
        if low and place - low < length:
            low = max(0, low - PEEK)
            file.seek(low)
            window = file.read(place - low + length - 1)
        at_delimiter = window.rfind(delimiter, 0, place - low + length - 1)
        if at_delimiter < 0 or low + at_delimiter + length <= place:
            return place
        place = low + at_delimiter


def _last_end(data: bytes, delimiter: bytes) -> int:
    """Return the end of the last delimiter when splitting from the left, or 0."""
    if not _overlaps_itself(delimiter):
        last_delimiter = data.rfind(delimiter)
        return last_delimiter + len(delimiter) if last_delimiter >= 0 else 0
    return len(data) - len(data.split(delimiter)[-1])


def _end_after(data: bytes, place: int, delimiter: bytes) -> int:
    """Return the end of the first delimiter that ends after `place`, or -1."""
    begin = 0 if _overlaps_itself(delimiter) else max(0, place - len(delimiter) + 1)
    while (at_delimiter := data.find(delimiter, begin)) >= 0:
        begin = at_delimiter + len(delimiter)
        if begin > place:
            return begin
    return -1


def _read(file: BinaryIO, left: int) -> Iterator[bytes]:
    while left:
        chunk = file.read(min(READ, left))
        if not chunk:
            return
        left -= len(chunk)
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

    `inside`: the first bytes belong to a too long record that another item reports. `whole`: the
    chunks end at the end of the file, so the last record needs no delimiter.
    """
    part, part_stop = 0, base + MAX_ITEM
    skipping = inside
    lost: list[int] = []
    data, position = b"", base

    def read(data: bytes) -> None:
        if part >= item.parts_done:
            digest.update(data)

    def whole_records(end: int, ends_part: bool) -> Iterator[Block]:
        nonlocal data, position, lost
        read(data[:end])
        if part >= item.parts_done:
            yield from _without_long(data[:end], position, delimiter, lost, ends_part)
        data, position, lost = data[end:], position + end, []

    for chunk in chain(_joined(chunks, block_bytes), (None,)):
        data += chunk or b""
        if skipping:
            gone, skipping = _skipped(data, delimiter, chunk is None)
            read(data[:gone])
            data, position = data[gone:], position + gone
        if skipping:
            continue
        while is_stream(item.path):
            # A part ends at the first record that begins after its 64 MiB.
            over = position > part_stop
            end = 0 if over else _end_after(data, part_stop - position, delimiter)
            if end < 0:
                break
            yield from whole_records(end, True)
            part += 1
            part_stop = position + MAX_ITEM
        end = len(data) if chunk is None and whole else _last_end(data, delimiter)
        if end:
            yield from whole_records(end, False)
        if len(data) >= MAX_RECORD + len(delimiter) or (data and chunk is None):
            lost.append(position)
            skipping = True
    read(data)
    if lost and part >= item.parts_done:
        yield Block(b"", position, lost, False)


def _joined(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    pending: list[bytes] = []
    for chunk in chunks:
        pending.append(chunk)
        if sum(map(len, pending)) >= size:
            yield b"".join(pending)
            pending.clear()
    yield b"".join(pending)


def _skipped(data: bytes, delimiter: bytes, last: bool) -> tuple[int, bool]:
    """Return how many first bytes belong to a too long record, and whether it goes on."""
    end = data.find(delimiter)
    if end >= 0:
        return end + len(delimiter), False
    # The last bytes may be the beginning of a delimiter.
    return len(data) if last else max(0, len(data) - len(delimiter) + 1), True


def _without_long(
    data: bytes, position: int, delimiter: bytes, lost: list[int], ends_part: bool
) -> Iterator[Block]:
    """Yield whole records as one block, or as several without the records above 64 MiB."""
    start = 0
    if len(data) > MAX_RECORD:
        place = 0
        for piece in data.split(delimiter):
            stop = min(place + len(piece) + len(delimiter), len(data))
            if len(piece) > MAX_RECORD:
                if place > start:
                    yield Block(data[start:place], position + start, lost, False)
                    lost = []
                lost = [*lost, position + place]
                start = stop
            place = stop
    yield Block(data[start:], position + start, lost, ends_part)


def line_starts(data: bytes) -> Array:
    """Return where each line begins (int64); the last one may have no newline."""
    starts, place = [0], data.find(b"\n") + 1
    while 0 < place < len(data):
        starts.append(place)
        place = data.find(b"\n", place) + 1
    return np.array(starts, np.int64)


WHITE = np.zeros(256, bool)
"""Bytes that `bytes.strip` removes."""
WHITE[list(b" \t\n\r\v\f")] = True


def blank_lines(data: bytes, starts: Array) -> Array:
    """Say of each line whether it is all ASCII white space (bool; `starts` as int64)."""
    solid = ~WHITE[np.frombuffer(data, np.uint8)]
    return ~np.logical_or.reduceat(solid, starts)
