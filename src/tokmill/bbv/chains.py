"""Blocks of a producer that go on into the next blocks of the store.

A block of the store ends where another one begins, even if no jump is there. A producer that
translates code as it runs (valgrind, QEMU) goes on to the next jump or call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokmill.bbv.store_blocks import Program
from tokmill.store.schema import Array

LONGEST = 50
"""Instructions of a block of valgrind at most (`--vex-guest-max-insns`)."""


class Chains(NamedTuple):
    """The records of each row, and how many instructions of each it executes."""

    offsets: Array
    """int64, rows + 1."""
    records: Array
    """int64."""
    weights: Array
    """Instructions: int64, at least 1."""


def follow(program: Program, rows: Array, begun: Array, taken: Array | None) -> Chains:
    """Return the blocks through which some blocks that ran go.

    Args:
        program: the program in which they ran.
        rows: (n,) the row of `program` in which each begins.
        begun: (n,) whether it begins where that row begins; others stay in their row.
        taken: (rows of the program,) whether another block that ran begins there, where the blocks
            of a producer do not overlap; None where they do, and have at most 50 instructions.
    """
    n = len(rows)
    most = LONGEST if taken is None else 1 << 30
    first = program.instructions[rows]
    owners, at = [np.arange(n)], [rows]
    weights = [np.where(begun, first.clip(1, most), 1)]
    left = most - first
    open_rows = np.flatnonzero(begun & program.falls[rows] & (left > 0))
    current = rows[open_rows]
    while len(open_rows):
        current = current + 1
        if taken is not None:
            free = ~taken[current]
            open_rows, current = open_rows[free], current[free]
        length = np.minimum(program.instructions[current], left[open_rows])
        owners.append(open_rows)
        at.append(current)
        weights.append(length)
        left[open_rows] -= program.instructions[current]
        on = program.falls[current] & (left[open_rows] > 0) & (length > 0)
        open_rows, current = open_rows[on], current[on]
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    offsets = np.searchsorted(owner[order], np.arange(n + 1)).astype(np.int64)
    records = program.records[np.concatenate(at)[order]]
    return Chains(offsets, records, np.concatenate(weights)[order].clip(min=1))


def spread(counts: Array, offsets: Array, weights: Array) -> Array:
    """Return counts (uint64) divided among parts by their weights; what is left over goes to the
    first part.

    `offsets` (n + 1) and `weights` are the parts of each of the n counts. No count is lost.
    """
    lengths = np.diff(offsets)
    wholes = np.add.reduceat(weights, offsets[:-1]) if len(weights) else weights
    whole = np.repeat(wholes.astype(np.uint64), lengths)
    each = np.repeat(counts, lengths)
    weight = weights.astype(np.uint64)
    # count · weight / whole without 64 bits being exceeded.
    parts = each // whole * weight + each % whole * weight // whole
    if len(parts):
        parts[offsets[:-1]] += counts - np.add.reduceat(parts, offsets[:-1])
    return parts
