"""Columns of a shard that is being built: in memory, above a limit in a temporary file."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from tokmill.base.files import machine_errors, nameless_file
from tokmill.store.schema import Array

MOST = 32 << 20
"""Bytes that are held in memory at most."""
CHUNK = 1 << 20
"""Bytes that are read back at a time."""


class Stored(NamedTuple):
    """Values in a file, end to end."""

    file: BinaryIO
    path: Path
    place: int
    nbytes: int
    dtype: np.dtype[np.generic]

    def pieces(self) -> Iterator[Array]:
        """Yield the values, flat, about 1 MiB at a time."""
        step = CHUNK // self.dtype.itemsize * self.dtype.itemsize
        for start in range(0, self.nbytes, step):
            with machine_errors("read", self.path):
                self.file.seek(self.place + start)
                data = self.file.read(min(step, self.nbytes - start))
            yield np.frombuffer(data, self.dtype)


class Offsets:
    """Offsets (0 and the running sums of lengths, uint64), computed when they are read."""

    def __init__(self, lengths: Sequence[Array | Stored]) -> None:
        self.lengths = lengths
        self.nbytes = 8 + sum(part.nbytes // part.dtype.itemsize for part in lengths) * 8

    def pieces(self) -> Iterator[Array]:
        yield np.zeros(1, "<u8")
        last = 0
        for lengths in pieces(self.lengths):
            for start in range(0, len(lengths), CHUNK // 8):
                sums = np.cumsum(lengths[start : start + CHUNK // 8], dtype="<u8")
                sums += np.uint64(last)
                last = int(sums[-1])
                yield sums


class Made(Protocol):
    """Values that are computed when they are read."""

    nbytes: int

    def pieces(self) -> Iterator[Array]:
        """Yield the values in order."""
        ...


Part = Array | Stored | Made


class Held:
    """Name → the parts of a flat column, in the order in which they were added.

    Without a folder everything stays in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.parts: dict[str, list[Array | Stored]] = {}
        self._in_memory = 0
        self._file: BinaryIO | None = None

    def add(self, name: str, values: Array) -> None:
        self.parts.setdefault(name, []).append(values)
        self._in_memory += values.nbytes
        if self.folder is not None and self._in_memory > MOST:
            self._store(self.folder)

    def get(self, name: str) -> list[Array | Stored]:
        return self.parts.get(name, [])

    def take(self, name: str) -> list[Array | Stored]:
        parts = self.parts.pop(name, [])
        self._in_memory -= sum(part.nbytes for part in parts if not isinstance(part, Stored))
        return parts

    def _store(self, folder: Path) -> None:
        with machine_errors("write", folder):
            if self._file is None:
                self._file = nameless_file(folder)
                weakref.finalize(self, self._file.close)
            place = self._file.seek(0, 2)
            for parts in self.parts.values():
                fresh = [part for part in parts if not isinstance(part, Stored)]
                if not fresh:
                    continue
                size = sum(part.nbytes for part in fresh)
                for part in fresh:
                    self._file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
                # Parts that are in the file already come before all others.
                parts[-len(fresh) :] = [Stored(self._file, folder, place, size, fresh[0].dtype)]
                place += size
        self._in_memory = 0


def pieces(parts: Iterable[Part]) -> Iterator[Array]:
    """Yield the values of parts as arrays."""
    for part in parts:
        if isinstance(part, np.ndarray):
            yield part
        else:
            yield from part.pieces()
