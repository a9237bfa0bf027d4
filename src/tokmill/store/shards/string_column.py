"""A string column of a shard that is being built: a table of strings, or the strings in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tokmill.store.shards.column_buffers import Held, Offsets, Part, pieces
from tokmill.store.shards.strings import Array, Strings, joined

MOST = 1 << 17
"""Strings in a table at most: each takes about 150 bytes of memory meanwhile."""
FIRST = 1 << 12
"""Records after which the column decides whether most strings differ."""


class StringColumn:
    """Collects the strings of one column of a shard.

    They are written in one of two forms, whichever is smaller: as a table of different strings with
    a number for each record, or end to end. They are always written end to end if more than half of
    the first `FIRST` strings differ, or more than `MOST` of all. The form depends on the strings of
    the shard alone, not on the batches in which they are added.
    """

    def __init__(self, name: str, held: Held) -> None:
        self.name, self.held = name, held
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
        found, place = strings.distinct()
        rows = self.rows
        numbers = np.asarray([rows.setdefault(row, len(rows)) for row in found], np.uint32)
        lengths = np.asarray([len(row) for row in found], np.int64)
        self.bytes += int(lengths[place].sum())
        self.held.add(self.name, numbers[place])
        if len(rows) > MOST or (self.records == FIRST and len(rows) > FIRST // 2):
            self._write_out()

    def arrays(self) -> Iterator[tuple[str, str, Sequence[Part]]]:
        """Yield (name, dtype, parts) of the arrays of the shard."""
        if self.rows is not None:
            width = 1 if len(self.rows) <= 1 << 8 else 2 if len(self.rows) <= 1 << 16 else 4
            table, offsets = joined(list(self.rows))
            size = width * self.records + table.nbytes + offsets.nbytes
            if size < self.bytes + 8 * (self.records + 1):
                dtype = np.dtype(f"<u{width}")
                yield self.name, f"u{width}", [Narrowed(self.held.get(self.name), dtype)]
                yield f"{self.name}.values", "u1", [table]
                yield f"{self.name}.values.offsets", "u8", [offsets.astype("<u8")]
                return
            self._write_out()
        yield self.name, "u1", self.held.get(f"{self.name}.flat")
        yield f"{self.name}.offsets", "u8", [Offsets(self.held.get(f"{self.name}.lengths"))]

    def _add_flat(self, data: Array, offsets: Array) -> None:
        self.held.add(f"{self.name}.flat", data)
        self.held.add(f"{self.name}.lengths", np.diff(offsets))

    def _write_out(self) -> None:
        """Change to end to end: for the strings so far and all that follow."""
        assert self.rows is not None
        table, self.rows = joined(list(self.rows)), None
        for numbers in pieces(self.held.take(self.name)):
            self._add_flat(*Strings(numbers, *table).written_out())


class Narrowed:
    """Values converted to a smaller type when they are read."""

    def __init__(self, parts: Sequence[Part], dtype: np.dtype[np.generic]) -> None:
        self.parts, self.dtype = parts, dtype
        self.nbytes = sum(part.nbytes for part in parts) // 4 * dtype.itemsize

    def pieces(self) -> Iterator[Array]:
        """Yield the values in order."""
        for part in pieces(self.parts):
            yield part.astype(self.dtype)
