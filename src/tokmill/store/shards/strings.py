"""Strings of many records in arrays: a table of strings, and a row number for each record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Strings:
    """A string for each of n records.

    `numbers` (n, unsigned or int64) are rows of a table. Its m strings lie end to end in `data`
    (u1, UTF-8); row i is `data[offsets[i]:offsets[i + 1]]` (`offsets`: m + 1, int64). Two rows may
    be equal; a row may be unused.
    """

    numbers: Array
    data: Array
    offsets: Array

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def of(cls, values: Sequence[str]) -> Strings:
        """Return strings with a table row for each."""
        return cls.flat(*joined([value.encode("utf-8", "surrogatepass") for value in values]))

    @classmethod
    def flat(cls, data: Array, offsets: Array) -> Strings:
        """Return strings that lie end to end in `data`, one per record."""
        return cls(np.arange(len(offsets) - 1), data, offsets)

    @classmethod
    def constant(cls, value: str, n: int) -> Strings:
        """Return the same string for n records."""
        return cls(np.zeros(n, np.int64), *joined([value.encode("utf-8", "surrogatepass")]))

    def take(self, chosen: Array | slice) -> Strings:
        return Strings(self.numbers[chosen], self.data, self.offsets)

    def distinct(self) -> tuple[list[bytes], Array]:
        """Return (used rows in the order of first use, place in that list for each record).

        Places: (n,) int64. Two rows may hold equal strings.
        """
        if self._is_flat():
            return _cut(self.data, self.offsets), np.arange(len(self))
        used, first, inverse = np.unique(self.numbers, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty(len(used), np.int64)
        place[order] = np.arange(len(used))
        return _cut(*take_flat(self.data, self.offsets, used[order])), place[inverse.reshape(-1)]

    def each(self, function: Callable[[str], Any]) -> Array:
        """Return the results of a function for the string of each record; called once a row.

        Raises `UnicodeDecodeError` for strings that are not UTF-8.
        """
        rows, place = self.distinct()
        results = [function(row.decode("utf-8", "surrogatepass")) for row in rows]
        values = np.empty(len(results), object)
        values[:] = results
        each: Array = values[place]
        return each

    def decoded(self) -> list[str]:
        """Return the string of each record; raises `UnicodeDecodeError` if one is not UTF-8."""
        texts: list[str] = self.each(str).tolist()
        return texts

    def end_to_end(self) -> list[Array]:
        """Return the table's bytes and the length of each row (of `flat`: of each record)."""
        return [self.data, np.diff(self.offsets)]

    def written_out(self) -> tuple[Array, Array]:
        """Return the strings of all records end to end: (u1, offsets int64)."""
        if self._is_flat():
            return self.data, self.offsets
        return take_flat(self.data, self.offsets, self.numbers)

    def _is_flat(self) -> bool:
        n = len(self.numbers)
        return n == len(self.offsets) - 1 and bool((self.numbers == np.arange(n)).all())


def _cut(data: Array, offsets: Array) -> list[bytes]:
    blob, bounds = data.tobytes(), offsets.tolist()
    return [blob[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def joined(encoded: Sequence[bytes]) -> tuple[Array, Array]:
    """Return byte strings end to end, and the offsets between them."""
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(value) for value in encoded], out=offsets[1:])
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


def take_flat(data: Array, ends: Array, chosen: Array) -> tuple[Array, Array]:
    """Return the chosen pieces of an array end to end, and their offsets.

    `ends` are the offsets of all pieces. A piece may be chosen several times.
    """
    begins, lengths = ends[:-1][chosen], np.diff(ends)[chosen]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return data[ranges(begins, lengths)], offsets


def ranges(begins: Array | int, lengths: Array) -> Array:
    """Return the numbers of several ranges end to end: begin, begin + 1, … of each (int64)."""
    before = np.cumsum(lengths) - lengths
    result: Array = np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
    return result
