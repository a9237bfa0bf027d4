"""Negatives that are like their anchors, by vectors: looked for in the anchor's cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tokmill.builds.mining.random_draws import below
from tokmill.builds.mining.vector_table import UNIT
from tokmill.store.schema import Array

ROWS = 512
"""Anchors that are compared with their cell at a time."""


class Asked:
    """Anchors, and what a negative of each may be.

    Args:
        anchor: record numbers (n,).
        key: a uint64 for each, which decides between candidates.
        low, high: cosines (n,): a candidate's lies between them, both excluded.
        allowed: (anchors, candidates) → whether each pair may be (bool).
        nearest: take the candidate with the largest cosine, not any.
    """

    def __init__(
        self,
        anchor: Array,
        key: Array,
        low: Array,
        high: Array,
        allowed: Callable[[Array, Array], Array],
        nearest: bool,
    ) -> None:
        self.anchor, self.key, self.nearest, self.allowed = anchor, key, nearest, allowed
        self.low, self.high = (np.asarray(edge) * UNIT**2 for edge in (low, high))


class Found(NamedTuple):
    """What a search found; both (n,)."""

    record: Array
    """int64; -1: nothing in the cell is below `high`."""
    below: Array
    """bool: nothing is between `low` and `high`, so it is the nearest below `low`."""


def search(cells: Array, units: Callable[[Array], Array], asked: Asked) -> Found:
    found = Found(np.full(len(asked.anchor), -1), np.zeros(len(asked.anchor), bool))
    for some, _, members, likeness in compared(cells, units, asked.anchor):
        under = asked.allowed(asked.anchor[some], members)
        under &= likeness < asked.high[some, None]
        good = under & (likeness > asked.low[some, None])
        found.below[some] = ~good.any(axis=1) & under.any(axis=1)
        found.record[some] = np.where(
            found.below[some],
            nearest(under, likeness, members),
            nearest(good, likeness, members)
            if asked.nearest
            else drawn_of(good, members, asked.key[some]),
        )
    return found


def near_ones(
    cells: Array,
    units: Callable[[Array], Array],
    anchor: Array,
    key: Array,
    low: Array,
    allowed: Callable[[Array, Array], Array],
    count: int,
) -> tuple[Array, Array]:
    """Draw one of the `count` nearest records of each anchor's cell, if its cosine is above `low`.

    Args:
        anchor, key, low, allowed: as of `Asked`.

    Returns (record or -1, int64 (n,); cosine of the last of the nearest, float64 (n,)).
    """
    found, last = np.full(len(anchor), -1), np.full(len(anchor), 2.0)
    for some, own, members, likeness in compared(cells, units, anchor):
        likeness[np.arange(len(own)), own] = -np.inf
        # Stable: of equally near records the first ones.
        nearest = np.argsort(-likeness, axis=1, kind="stable")[:, :count]
        their = np.take_along_axis(likeness, nearest, axis=1)
        good = np.take_along_axis(allowed(anchor[some], members), nearest, axis=1)
        good &= their > low[some, None] * UNIT**2
        number = np.count_nonzero(good, axis=1)
        wanted = below(key[some], np.maximum(number, 1)) + 1
        column = (np.cumsum(good, axis=1) == wanted[:, None]).argmax(axis=1)
        chosen = members[nearest[np.arange(len(own)), column]]
        found[some] = np.where(number > 0, chosen, -1)
        last[some] = their[:, -1] / UNIT**2
    return found, last


def compared(
    cells: Array, units: Callable[[Array], Array], anchor: Array
) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Yield (numbers of anchors, their places in their cell, its records, cosines · `UNIT`²)."""
    place = np.argsort(cells["record"], kind="stable")
    at = place[np.searchsorted(cells["record"], anchor, sorter=place)]
    cell = cells["cell"][at]
    order = np.argsort(cell, kind="stable")
    borders = np.flatnonzero(np.diff(cell[order])) + 1
    for rows in np.split(order, borders) if len(order) else []:
        begin, end = np.searchsorted(cells["cell"], [cell[rows[0]], cell[rows[0]] + 1])
        theirs = units(cells["record"][begin:end])
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            own = at[some] - begin
            yield some, own, cells["record"][begin:end], theirs[own] @ theirs.T


def nearest(good: Array, likeness: Array, members: Array) -> Array:
    """Return the good member of each row with the largest cosine (the first of equals), or -1."""
    column = np.where(good, likeness, -np.inf).argmax(axis=1)
    found: Array = np.where(good.any(axis=1), members[column], -1)
    return found


def drawn_of(good: Array, members: Array, key: Array) -> Array:
    """Return a good member of each row that `key` (uint64) draws, or -1."""
    count = np.count_nonzero(good, axis=1)
    wanted = below(key, np.maximum(count, 1)) + 1
    column = (np.cumsum(good, axis=1) == wanted[:, None]).argmax(axis=1)
    found: Array = np.where(count > 0, members[column], -1)
    return found
