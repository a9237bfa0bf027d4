"""How the neighbours of a pair of functions are matched: in the call graph and in the layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.diff.candidates import Pairs
from tokmill.x86.features.bags import normalized
from tokmill.x86.features.cosines import row_products
from tokmill.x86.features.function_features import find

SUPPORT = (
    "called",
    "calling",
    "called twice",
    "before",
    "behind",
    "turned",
    "from anchor",
    "to anchor",
)
"""Columns of `support`."""
REACH = 3
"""How many functions before and after are looked at."""
FADE = 0.7
"""Factor for each function in between."""
WEAK = 0.02
"""Pairs with a lower probability say nothing about their neighbours."""


class Neighbours:
    """The call graphs of two programs, weighted: callees with few callers say most."""

    def __init__(self, a: Any, b: Any) -> None:
        """Take two (F, F) CSR matrices of calls."""
        self.callees = [_weighed(one) for one in (a, b)]
        self.callers = [_weighed(one.T.tocsr()) for one in (a, b)]
        self.twice = [normalized((one @ one + one).tocsr()) for one in self.callees]

    def support(self, pairs: Pairs, probability: Array) -> Array:
        """Return how far the neighbours of each pair are matched: (n, len(SUPPORT)) f4 from 0 to 1.

        `probability`: (n,) f4, how probable each pair is so far.
        """
        sparse = plugins.require("scipy.sparse")
        i, j = pairs.i, pairs.j
        kept = probability > WEAK
        shape = (pairs.rows, pairs.columns)
        matched = sparse.csr_array((probability[kept], (i[kept], j[kept])), shape=shape)
        columns = [
            row_products((one @ matched).tocsr(), other, i, j)
            for one, other in (self.callees, self.callers, self.twice)
        ]
        known, value = pairs.key[kept], probability[kept]
        before = adjacent(pairs, known, value, -1, -1)
        behind = adjacent(pairs, known, value, 1, 1)
        turned = np.maximum(
            adjacent(pairs, known, value, -1, 1), adjacent(pairs, known, value, 1, -1)
        )
        anchors = anchored(pairs, probability)
        return np.column_stack([*columns, before, behind, turned, *anchors]).astype(np.float32)


def anchored(pairs: Pairs, probability: Array) -> tuple[Array, Array]:
    """Return how well a pair fits the nearest sure pairs before and behind: two (n,) f4.

    e^(-d / 2), where d is the difference of their distances, in functions, from their anchors.
    """
    best = np.zeros(pairs.rows, np.float32)
    np.maximum.at(best, pairs.i, probability)
    sure = (probability >= 0.5) & (probability == best[pairs.i])
    i, j = pairs.i, pairs.j
    at, to = i[sure], j[sure]
    at, first = np.unique(at, return_index=True)
    to = to[first]
    if not len(at):
        return np.zeros(len(i), np.float32), np.zeros(len(i), np.float32)
    found = []
    for place in (np.searchsorted(at, i) - 1, np.searchsorted(at, i, side="right")):
        there = (place >= 0) & (place < len(at))
        place = np.clip(place, 0, len(at) - 1)
        off = np.abs((i - at[place]) - (j - to[place]))
        found.append(np.where(there, np.exp(-off / 2), 0).astype(np.float32))
    return found[0], found[1]


def adjacent(pairs: Pairs, known: Array, value: Array, step_a: int, step_b: int) -> Array:
    """Return the best of the pairs next to each pair, in one direction of each program: (n,) f4."""
    best = np.zeros(len(pairs), np.float32)
    i, j = np.divmod(known, max(pairs.columns, 1))
    for far_a in range(1, REACH + 1):
        for far_b in range(1, REACH + 1):
            # From what is known to its neighbours: that is less than all pairs.
            one, other = i - far_a * step_a, j - far_b * step_b
            inside = (one >= 0) & (one < pairs.rows) & (other >= 0) & (other < pairs.columns)
            key = one[inside] * pairs.columns + other[inside]
            place, there = find(pairs.key, key)
            found = value[inside][there] * np.float32(FADE ** (far_a + far_b - 2))
            # Each pair has one neighbour in this direction, so no place is there twice.
            best[place[there]] = np.maximum(best[place[there]], found)
    return best


def _weighed(calls: Any) -> Any:
    """Return calls with columns weighted by how few rows have them; rows have length 1."""
    uses = np.bincount(calls.indices, minlength=calls.shape[1])
    made = calls.copy()
    made.data = (1 / np.log2(2 + uses))[calls.indices].astype(np.float32)
    return normalized(made)
