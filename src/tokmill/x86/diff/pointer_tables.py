"""How functions stand in tables of pointers: support by what is beside them, and who uses them."""

from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.diff.candidates import Pairs
from tokmill.x86.features.tables import Tables
from tokmill.x86.image.image import expand, find, owners

PLACES = ("row before", "row behind", "same place")
"""Columns of `Places.support`."""
MOST = 16
"""Functions to which more pointers lead have no place of their own."""
REACH = 3
"""How many pointers before and after one are looked at."""
FADE = 0.7
"""Factor for each pointer in between."""
WEAK = 0.1
"""Pairs of functions with a lower probability say nothing about the tables that they use."""
STRONG = 0.2
"""Similarity of tables from which functions at the same places are candidates."""
RESIZED = 0.25
"""Factor of places in tables that have different numbers of functions."""


class Places:
    """The tables of two programs."""

    def __init__(self, a: Tables, b: Tables) -> None:
        self.sides = a, b
        self.users = [_scaled(one.users) for one in (a, b)]
        self.order = [np.argsort(one.function, kind="stable") for one in (a, b)]
        self.bounds = [
            np.searchsorted(one.function[order], np.arange(one.users.shape[0] + 1))
            for one, order in zip((a, b), self.order, strict=True)
        ]

    def slots(self, pairs: Pairs) -> tuple[Array, Array, Array]:
        counts = [np.diff(bounds) for bounds in self.bounds]
        counts = [np.where(one > MOST, 0, one) for one in counts]
        i, j = pairs.i, pairs.j
        many = counts[0][i] * counts[1][j]
        rows = np.flatnonzero(many)
        many = many[rows]
        pair = np.repeat(rows, many)
        number = expand(np.zeros_like(many), many)
        first, second = np.divmod(number, counts[1][j[pair]])
        one = self.order[0][self.bounds[0][i[pair]] + first]
        other = self.order[1][self.bounds[1][j[pair]] + second]
        return pair, one, other

    def similarity(self, pairs: Pairs, probability: Array) -> Any:
        """Return how far the users of two tables are matched: (tables of A, tables of B) CSR."""
        sparse = plugins.require("scipy.sparse")
        shape = (pairs.rows, pairs.columns)
        kept = probability > WEAK
        matched = sparse.csr_array((probability[kept], (pairs.i[kept], pairs.j[kept])), shape=shape)
        return (self.users[0].T.tocsr() @ matched @ self.users[1]).tocsr()

    def support(self, pairs: Pairs, probability: Array) -> Array:
        """Return what tables say of each pair: (n, len(PLACES)) f4 from 0 to 1."""
        result = np.zeros((len(pairs), len(PLACES)), np.float32)
        pair, one, other = self.slots(pairs)
        if not len(pair):
            return result
        a, b = self.sides
        for column, step in ((0, -1), (1, 1)):
            value = np.zeros(len(pair), np.float32)
            for far in range(1, REACH + 1):
                near, also = one + far * step, other + far * step
                inside = (
                    (near >= 0) & (near < len(a.function)) & (also >= 0) & (also < len(b.function))
                )
                near, also = np.where(inside, near, 0), np.where(inside, also, 0)
                inside &= a.place[near] - a.place[one] == b.place[also] - b.place[other]
                key = a.function[near] * pairs.columns + b.function[also]
                neighbour = _values(pairs.key, probability, key)
                np.maximum(
                    value, np.where(inside, neighbour, 0) * np.float32(FADE ** (far - 1)), out=value
                )
            np.maximum.at(result[:, column], pair, value)
        same = a.offset[one] == b.offset[other]
        pair, one, other = pair[same], one[same], other[same]
        table = self.similarity(pairs, probability)
        table.sort_indices()
        row = owners(table.indptr)
        key = row * table.shape[1] + table.indices
        value = _values(key, table.data, a.table[one] * table.shape[1] + b.table[other])
        value *= np.where(a.size[one] == b.size[other], 1, np.float32(RESIZED))
        np.maximum.at(result[:, 2], pair, np.minimum(value, 1))
        return result

    def candidates(self, pairs: Pairs, probability: Array) -> tuple[Array, Array]:
        """Return the pairs of functions at the same places of tables whose users are matched."""
        a, b = self.sides
        table = self.similarity(pairs, probability).tocoo()
        kept = table.data > STRONG
        one, other = table.row[kept], table.col[kept]
        starts = np.searchsorted(a.table, np.arange(a.users.shape[1] + 1))
        size = np.diff(starts)[one]
        number = np.repeat(np.arange(len(one)), size)
        slot = expand(starts[one], size)
        width = max(int(b.offset.max(initial=0)), int(a.offset.max(initial=0))) + 1
        key = b.table * width + b.offset
        wanted = other[number].astype(np.int64) * width + a.offset[slot]
        at, there = find(key, wanted)
        return a.function[slot[there]], b.function[at[there]]


def _values(keys: Array, values: Array, wanted: Array) -> Array:
    """Return the values of wanted keys, of which `keys` (ascending) has some; 0 of others."""
    place, there = find(keys, wanted)
    result = np.zeros(len(wanted), np.float32)
    result[there] = values[place[there]]
    return result


def _scaled(users: Any) -> Any:
    """Return users of tables with columns of length 1, so that a product is a mean over users."""
    uses = np.bincount(users.indices, minlength=users.shape[1])
    result = users.copy()
    result.data = (1 / np.sqrt(np.maximum(uses, 1)))[users.indices].astype(np.float32)
    return result
