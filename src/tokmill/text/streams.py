"""Compressed text: .gz, .xz, .bz2 and .zst as streams; .gz and .zst are cut at members or frames.

A member or frame can only be read from its beginning. Files with many of them (bgzip,
`cat a.gz b.gz`, seekable zstd, pzstd) are cut into items: after each 16 MiB, the next member or
frame begins an item. Its beginning is found by its magic number and a trial decompression. Reading
then verifies it, as a member must end where the next item begins.
"""

from __future__ import annotations

import mmap
from typing import BinaryIO

from tokmill.files import reading
from tokmill.inflate import MAGIC, OUTPUT, decompressor, is_damage

SUFFIXES = tuple(MAGIC)
STEP = 16 << 20
"""Compressed bytes of an item, about."""
SEARCH = 64 << 20
"""A file whose second member begins later than this is not cut."""
EXPANDS = 5
"""Usual ratio of content to compressed size; it only decides how many files share a shard."""


def is_stream(path: str) -> bool:
    """Say whether a file is compressed."""
    return path.lower().endswith(SUFFIXES)


def suffix(path: str) -> str:
    """Return the compression suffix of a file."""
    return next(ending for ending in SUFFIXES if path.lower().endswith(ending))


def members(path: str, size: int) -> list[int]:
    """Return the bytes at which a compressed file is cut: 0, and the beginnings of some members."""
    edges = [0]
    if size <= STEP or suffix(path) not in (".gz", ".zst"):
        return edges
    with reading(path) as file:
        first = _next_member(file, 1, min(size, SEARCH), suffix(path))
        if first is None:
            return edges
        place = STEP
        while place < size:
            found = _next_member(file, place, size, suffix(path))
            if found is None:
                break
            edges.append(found)
            place = found + STEP
    return edges


def _next_member(file: BinaryIO, start: int, stop: int, kind: str) -> int | None:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        place = view.find(MAGIC[kind], start, stop)
        while place >= 0:
            if _begins_member(view[place : place + (1 << 16)], kind):
                return place
            place = view.find(MAGIC[kind], place + 1, stop)
    return None


def _begins_member(data: bytes, kind: str) -> bool:
    """Say whether bytes that begin with the magic number can be decompressed."""
    if kind == ".gz" and data[3] & 0xE0:
        return False
    trial = decompressor(kind)
    try:
        out = trial.decompress(data, OUTPUT) if kind == ".gz" else trial.decompress(data)
    except Exception as error:
        if not is_damage(error):
            raise
        return False
    return bool(out) or bool(trial.eof)
