"""Arithmetic on ranges and on sorted arrays of numbers."""

from __future__ import annotations

import numpy as np

from tokmill.store.schema import Array


def expand(begins: Array, counts: Array) -> Array:
    """Return begins[0], begins[0] + 1, … (counts[0] numbers), then those of begins[1], … (i8)."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begins - ends + counts, counts) + np.arange(total)


def offsets(counts: Array) -> Array:
    """Return the beginning of each of n successive ranges, and the end of the last: (n + 1,) i8."""
    result = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=result[1:])
    return result


def member(values: Array, ordered: Array) -> Array:
    """Return for each value whether it is among sorted values: (n,) bool."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    result: Array = ordered[at] == values
    return result


def distinct(*parts: Array) -> Array:
    """Return the values of some arrays, each once, ascending.

    They are sorted; `np.unique` uses hashes, which takes many times as long.
    """
    values = np.sort(np.concatenate(parts) if len(parts) > 1 else parts[0])
    first = np.ones(len(values), bool)
    first[1:] = values[1:] != values[:-1]
    return values[first]


def numbered(values: Array) -> tuple[Array, Array]:
    """Return the different values (u8), ascending, and the number of each value among them (i8).

    As `np.unique` with `return_inverse`, in less than half of the time: a value and its place are
    sorted as one number.
    """
    size = len(values)
    if not size:
        return values, np.zeros(0, np.int64)
    bits = np.uint64((size - 1).bit_length())
    places = np.uint64((1 << int(bits)) - 1)
    short = int(values.max()) >> (64 - int(bits)) == 0
    # The lowest bits of long values give way to the place.
    packed = (values << bits) if short else (values & ~places)
    packed |= np.arange(size, dtype=np.uint64)
    packed.sort()
    packed &= places
    order = packed.astype(np.int64)
    values = values[order]
    if not short and (values[1:] < values[:-1]).any():
        # Values that differ in their lowest bits alone are not in order.
        again = np.argsort(values, kind="stable")
        values, order = values[again], order[again]
    first = np.ones(size, bool)
    first[1:] = values[1:] != values[:-1]
    number = np.empty(size, np.int64)
    number[order] = np.cumsum(first) - 1
    return values[first], number


def without(values: Array, others: Array) -> Array:
    """Return the values that are not among others, each once, ascending."""
    result = distinct(values)
    return result[~member(result, np.sort(others))]
