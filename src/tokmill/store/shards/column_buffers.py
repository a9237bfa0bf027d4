"""Columns of a shard that is being built: in memory, above a limit in a temporary file.

A column of strings is a table of strings, or the strings in a row (`StringColumn`).
"""

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from tokmill.base.errors import MachineError
from tokmill.base.files import machine_errors, nameless_file
from tokmill.store.schema import Array, Strings, joined

MOST = 32 << 20
"""Bytes that are held in memory at most."""
CHUNK = 1 << 20
"""Bytes that are read back at a time."""
MOST_STRINGS = 1 << 17
"""Strings in a table at most: each takes about 150 bytes of memory meanwhile."""
FIRST = 1 << 12
"""Records after which the column decides whether most strings differ."""


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


class Narrowed:
    """Values converted to a smaller type when they are read."""

    def __init__(self, parts: Sequence[Array | Stored], dtype: np.dtype[np.generic]) -> None:
        self.parts, self.dtype = parts, dtype
        self.nbytes = sum(part.nbytes for part in parts) // 4 * dtype.itemsize

    def pieces(self) -> Iterator[Array]:
        for part in pieces(self.parts):
            yield part.astype(self.dtype)


Part = Array | Stored | Offsets | Narrowed


class ColumnBuffers:
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


def mapped(folder: Path, count: int, parts: Callable[[], Iterable[Array]]) -> Array:
    """Return `count` int64 values, given in parts, as one array.

    Above `MOST` bytes it is mapped from a file without a name, whose pages the system takes back
    where memory is short; if the folder cannot be written, it is held.
    """
    if 8 * count > MOST:
        with suppress(MachineError), machine_errors("write", folder), nameless_file(folder) as file:
            for part in parts():
                file.write(part.data)
            file.flush()
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.int64)
    return np.concatenate([*parts()])


def pieces(parts: Iterable[Part]) -> Iterator[Array]:
    for part in parts:
        if isinstance(part, np.ndarray):
            yield part
        else:
            yield from part.pieces()


class StringColumn:
    """Collects the strings of one column of a shard.

    They are written in one of two forms, whichever is smaller: as a table of different strings with
    a number for each record, or end to end. They are always written end to end if more than half of
    the first `FIRST` strings differ, or more than `MOST_STRINGS` of all. The form depends on the
    strings of the shard alone, not on the batches in which they are added.
    """

    def __init__(self, name: str, buffers: ColumnBuffers) -> None:
        self.name, self.buffers = name, buffers
        self.rows: dict[bytes, int] | None = {}
        """String → its number, in the order of first use; None: the strings lie end to end."""
        self.records = self.bytes = 0

    def add(self, strings: Strings) -> None:
        if self.records < FIRST < self.records + len(strings):
            cut = FIRST - self.records
            self.add(strings.take(slice(cut)))
            strings = strings.take(slice(cut, None))
        self.records += len(strings)
        if self.rows is None:
            self._add_flat(*strings.written_out())
            return
        distinct, place = strings.distinct()
        rows = self.rows
        numbers = np.asarray([rows.setdefault(row, len(rows)) for row in distinct], np.uint32)
        lengths = np.asarray([len(row) for row in distinct], np.int64)
        self.bytes += int(lengths[place].sum())
        self.buffers.add(self.name, numbers[place])
        if len(rows) > MOST_STRINGS or (self.records == FIRST and len(rows) > FIRST // 2):
            self._write_out()

    def arrays(self) -> Iterator[tuple[str, str, Sequence[Part]]]:
        if self.rows is not None:
            width = 1 if len(self.rows) <= 1 << 8 else 2 if len(self.rows) <= 1 << 16 else 4
            table, offsets = joined(list(self.rows))
            size = width * self.records + table.nbytes + offsets.nbytes
            if size < self.bytes + 8 * (self.records + 1):
                dtype = np.dtype(f"<u{width}")
                yield self.name, f"u{width}", [Narrowed(self.buffers.get(self.name), dtype)]
                yield f"{self.name}.values", "u1", [table]
                yield f"{self.name}.values.offsets", "u8", [offsets.astype("<u8")]
                return
            self._write_out()
        yield self.name, "u1", self.buffers.get(f"{self.name}.flat")
        yield f"{self.name}.offsets", "u8", [Offsets(self.buffers.get(f"{self.name}.lengths"))]

    def _add_flat(self, data: Array, offsets: Array) -> None:
        self.buffers.add(f"{self.name}.flat", data)
        self.buffers.add(f"{self.name}.lengths", np.diff(offsets))

    def _write_out(self) -> None:
        """Change to end to end: for the strings so far and all that follow."""
        assert self.rows is not None
        table, self.rows = joined(list(self.rows)), None
        for numbers in pieces(self.buffers.take(self.name)):
            self._add_flat(*Strings(numbers, *table).written_out())
