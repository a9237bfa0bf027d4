"""A hash table from 16-byte keys to numbers with bulk access: open addressing in numpy."""

from __future__ import annotations

import numpy as np

from tokmill.store.schema import Array

_M1 = np.uint64(0x9E3779B97F4A7C15)
_M2 = np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)


class KeyIndex:
    """A map from keys to numbers below 2^31.

    A key is two u8, `low` and `high`, which are not both 0. Collisions go to the next slot; a
    quarter to a half of the slots is used.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self._make(1 << 12)

    def __len__(self) -> int:
        return self.count

    def _make(self, slots: int) -> None:
        self.low = np.zeros(slots, np.uint64)
        self.high = np.zeros(slots, np.uint64)
        self.number = np.full(slots, -1, np.int32)

    def _slots(self, low: Array, high: Array) -> Array:
        hashed = low * _M1
        hashed ^= high * _M2
        hashed ^= hashed >> _HALF
        hashed *= _M1
        hashed >>= np.uint64(65 - len(self.low).bit_length())
        return hashed.astype(np.intp)

    def find(self, low: Array, high: Array) -> Array:
        """Return the numbers (i4, n) of n keys; -1 for unknown keys."""
        slots = self._slots(low, high)
        result = self.number[slots]
        rest = np.flatnonzero((self.low[slots] != low) | (self.high[slots] != high))
        # An empty slot, whose number is -1, ends the search.
        rest = rest[result[rest] >= 0]
        slots = slots[rest]
        while len(rest):
            slots = (slots + 1) & (len(self.low) - 1)
            result[rest] = self.number[slots]
            other = (self.low[slots] != low[rest]) | (self.high[slots] != high[rest])
            other &= result[rest] >= 0
            rest, slots = rest[other], slots[other]
        return result

    def add(self, low: Array, high: Array, numbers: Array) -> None:
        self.count += len(low)
        if self.count * 2 > len(self.low):
            taken = self.number >= 0
            old = self.low[taken], self.high[taken], self.number[taken]
            self._make(1 << (self.count * 4 - 1).bit_length())
            self._put(*old)
        self._put(low, high, numbers)

    def _put(self, low: Array, high: Array, numbers: Array) -> None:
        rest, slots = np.arange(len(low)), self._slots(low, high)
        while len(rest):
            free = self.number[slots] < 0
            # If several keys need the same slot, the last one gets it.
            self.number[slots[free]] = rest[free]
            won = free & (self.number[slots] == rest)
            here, which = slots[won], rest[won]
            self.low[here], self.high[here] = low[which], high[which]
            self.number[here] = numbers[which]
            rest, slots = rest[~won], (slots[~won] + 1) & (len(self.low) - 1)
