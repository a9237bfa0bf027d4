"""Compressed text: .gz and .zst as streams, cut at members or frames.

A member or frame can only be read from its beginning. Files with many of them (bgzip,
`cat a.gz b.gz`, seekable zstd, pzstd) are cut into items: after each 16 MiB, the next member or
frame begins an item. Its beginning is found by its magic number and a trial decompression. Reading
then verifies it, as a member must end where the next item begins.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from tokmill import plugins
from tokmill.errors import TokmillError
from tokmill.files import machine_errors

SUFFIXES = (".gz", ".zst")
STEP = 16 << 20
"""Compressed bytes of an item, about."""
SEARCH = 64 << 20
"""A file whose second member begins later than this is not cut."""
EXPANDS = 5
"""Usual ratio of content to compressed size; it only decides how many files share a shard."""
MAGIC = {".gz": b"\x1f\x8b\x08", ".zst": b"\x28\xb5\x2f\xfd"}
PIECE = {".gz": 1 << 16, ".zst": 1 << 13}
OUTPUT = 1 << 20


def is_stream(path: str) -> bool:
    """Say whether a file is compressed."""
    return path.lower().endswith(SUFFIXES)


def suffix(path: str) -> str:
    """Return the compression suffix of a file."""
    return next(ending for ending in SUFFIXES if path.lower().endswith(ending))


def inflate(
    path: str,
    start: int = 0,
    stop: int | None = None,
    tell: Callable[[int], None] | None = None,
) -> Iterator[bytes]:
    """Yield the content of the members or frames between two bytes of a compressed file.

    `tell` is called with the byte of the file up to which the yielded content was compressed.

    Raises `TokmillError` if a member is damaged, or does not end at `stop` or at the file's end.
    """
    kind = suffix(path)
    with machine_errors("read", path), open(path, "rb") as file:
        file.seek(start)
        left = (stop if stop is not None else file.seek(0, 2)) - start
        file.seek(start)
        current: Any = None
        data = b""
        while True:
            if not data:
                data = file.read(min(PIECE[kind], left))
                left -= len(data)
                if not data:
                    break
            if current is None:
                if kind == ".gz" and not data.strip(b"\0"):
                    data = b""
                    continue
                current = _decompressor(kind)
            try:
                if kind == ".gz":
                    out = current.decompress(data, OUTPUT)
                    data = current.unconsumed_tail or (current.unused_data if current.eof else b"")
                else:
                    out = current.decompress(data)
                    data = current.unused_data if current.eof else b""
            except Exception as error:
                if not isinstance(error, zlib.error) and type(error).__name__ != "ZstdError":
                    raise
                raise _broken(path, str(error)) from None
            if current.eof:
                current = None
            if out:
                if tell is not None:
                    tell(file.tell() - len(data))
                yield out
        if current is not None:
            raise _broken(path, "it ends in the middle of a member")


def _decompressor(kind: str) -> Any:
    if kind == ".gz":
        return zlib.decompressobj(31)
    zstandard = plugins.require("zstandard")
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def _broken(path: str, what: str) -> TokmillError:
    return TokmillError(
        f"the compressed file is damaged or cut off: {what}",
        where=path,
        hint="test it with gzip -t or zstd -t, and fetch it again",
    )


def members(path: str, size: int) -> list[int]:
    """Return the bytes at which a compressed file is cut: 0, and the beginnings of some members."""
    edges = [0]
    if size <= STEP:
        return edges
    with machine_errors("read", path), open(path, "rb") as file:
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
    trial = _decompressor(kind)
    try:
        out = trial.decompress(data, OUTPUT) if kind == ".gz" else trial.decompress(data)
    except Exception as error:
        if not isinstance(error, zlib.error) and type(error).__name__ != "ZstdError":
            raise
        return False
    return bool(out) or bool(trial.eof)
