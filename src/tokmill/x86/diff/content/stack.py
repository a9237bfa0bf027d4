"""Operands on the stack, compared by which argument or which place they are, not where it lies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import expand, numbered


class Slots(NamedTuple):
    """N operands on the stack of matched blocks, one beside the other."""

    match: Array
    """(N,) i8: the number of the pair of functions."""
    block: Array
    """(N,) i8: the number of the pair of blocks."""
    a: Array
    """(N,) i8: number of the operand in A."""
    b: Array
    same: Array
    """(N,) bool."""


def compare_slots(
    a: Graph, b: Graph, match: Array, block: Array, one: Array, other: Array
) -> Slots:
    """Return the operands on the stack of pairs of blocks (one, other) that have equally many.

    In a pair of functions, arguments are the same at the same place. Of other places each must have
    one partner, with as many bytes behind it where its address is taken. Where this does not hold,
    those places differ that did not move as most did.
    """
    bounds = [np.searchsorted(graph.slot_place, graph.block_instructions) for graph in (a, b)]
    sizes = bounds[0][one + 1] - bounds[0][one]
    first, second = expand(bounds[0][one], sizes), expand(bounds[1][other], sizes)
    owner, pair = np.repeat(match, sizes), np.repeat(block, sizes)
    left, right = a.slot[first], b.slot[second]
    argument = (left >= 0) | (right >= 0)
    same = ~argument | (left == right)
    local = np.flatnonzero(~argument)
    if not len(local):
        return Slots(owner, pair, first, second, same)
    of, left, right = owner[local], left[local], right[local]
    sized = a.slot_size[first[local]] == b.slot_size[second[local]]
    moved = right - left
    count = int(owner.max()) + 1
    # Places and moves as numbers of each function.
    keys = [_in_function(of, values) for values in (left, right, moved)]
    width = int(keys[1].max()) + 1
    pairs, row = np.unique(keys[0] * width + keys[1], return_index=True)
    clash = np.zeros(count, bool)
    for number in np.divmod(pairs, width):
        twice = np.bincount(number)[number] > 1
        clash[of[row[twice]]] = True
    clash[of[~sized]] = True
    # The most frequent move of each function.
    many = np.bincount(keys[2])
    where = np.zeros(len(many), np.int64)
    where[keys[2]] = of
    order = np.lexsort((-many, where))
    most = np.full(count, -1, np.int64)
    most[where[order][::-1]] = order[::-1]
    stays = keys[2] == most[of]
    odd = clash[of] & ~(stays & sized)
    # If all moved by the same distance, the sizes alone differ, or none is known to be the one.
    silent = clash.copy()
    silent[of[odd]] = False
    same[local] = ~(odd | silent[of])
    return Slots(owner, pair, first, second, same)


def _in_function(function: Array, values: Array) -> Array:
    """Return a number (i8) for each different pair of function and value."""
    span = np.int64(1 << 34)
    return numbered((function * span + values + (span >> 1)).astype(np.uint64))[1]


def slot_text(graph: Graph, number: int) -> str:
    """Return an operand on the stack as it is shown."""
    place, size = int(graph.slot[number]), int(graph.slot_size[number])
    if place >= 0:
        return f"argument at +{place:#x}"
    return f"stack at -{-place:#x}" + (f" ({size:,} bytes)" if size else "")
