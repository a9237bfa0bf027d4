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
    found = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def member(values: Array, ordered: Array) -> Array:
    """Return for each value whether it is among sorted values: (n,) bool."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    found: Array = ordered[at] == values
    return found


def distinct(*parts: Array) -> Array:
    """Return the values of some arrays, each once, ascending.

    They are sorted; `np.unique` uses hashes, which takes many times as long.
    """
    values = np.sort(np.concatenate(parts) if len(parts) > 1 else parts[0])
    first = np.ones(len(values), bool)
    first[1:] = values[1:] != values[:-1]
    return values[first]


def without(values: Array, others: Array) -> Array:
    """Return the values that are not among others, each once, ascending."""
    found = distinct(values)
    return found[~member(found, np.sort(others))]
