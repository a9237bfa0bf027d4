"""Block vectors of intervals, projected at random, and how like each other they are overall.

A vector is scaled to the length 2,048 and its parts are rounded to whole numbers. A product of two
of them, and each partial sum of it, is a whole number below 2^24, which float32 holds exactly. So a
matrix product is the same in any order of summation: for any number of threads, on any machine.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.mining.mine_triplets import below, drawn
from tokmill.builds.selection.minhash import batches
from tokmill.builds.selection.overlay_values import open_arrays
from tokmill.store.checks.hashes import mix
from tokmill.store.overlay import vector_column
from tokmill.store.schema import Array
from tokmill.store.store import Store

BITS = 31
"""Random numbers are whole numbers from -2^31 to 2^31 - 1."""
WHOLE = 1 << 30
"""The whole of an interval: shares are whole numbers of this part of it."""
STEP = np.uint64(0x9E3779B97F4A7C15)


def projection_rows(ids: Array, dimensions: int, seed: int) -> Array:
    """Return a random row for each id, int64 (ids, dimensions), uniform in [-2^31, 2^31).

    The numbers are splitmix64 (Steele, Lea, Flood 2014) of seed, id and dimension.
    """
    with np.errstate(over="ignore"):
        key = mix(ids.astype(np.uint64) + STEP * np.uint64(seed & (2**64 - 1)))
        place = np.arange(1, dimensions + 1, dtype=np.uint64) * STEP
        bits = mix(key[:, None] + place)
    return (bits >> np.uint64(63 - BITS)).astype(np.int64) - (1 << BITS)


def shares_of(counts: Array, totals: Array) -> Array:
    """Return counts as parts of totals, int64 in units of 1 / `WHOLE`; 0 where a total is 0."""
    totals = totals.astype(np.float64)
    shares = counts.astype(np.float64) / np.where(totals > 0, totals, 1.0)
    return np.rint(shares * WHOLE).astype(np.int64)


UNIT = 2048
"""Length of a rounded vector."""


class VectorTable:
    """The vectors of a store's records: a column of an overlay, or a numpy file.

    Args:
        store: the store.
        named: name of an overlay with one column of vectors, or the path of an .npy file with a
            row for each record.
    """

    def __init__(self, store: Store, named: str) -> None:
        self.path = Path(named)
        if self.path.suffix == ".npy":
            self._read: Callable[[Array], Array] = _array(store, self.path).__getitem__
        else:
            overlay = Store(store.path, [named]).overlays[named]
            self.path = overlay.path
            self._read = partial(overlay.values, vector_column(overlay))

    def units(self, records: Array) -> Array:
        """Return the rounded vectors of some records, float32 (n, width); of zeros zeros."""
        rows = np.asarray(self._read(records), np.float32)
        bad = ~np.isfinite(rows).all(axis=1)
        if bad.any():
            raise TokmillError(
                f"the vector of record {int(records[bad][0])} is not finite",
                where=str(self.path),
                hint="make the vectors again without NaN and infinities",
            )
        return rounded(rows)


def rounded(vectors: Array) -> Array:
    """Return vectors (n, D) with length 2,048 and whole parts, float32; of zeros zeros."""
    # Scaled first, so that no square leaves the range of float64.
    large = np.abs(vectors).max(axis=1, keepdims=True, initial=0).astype(np.float64)
    scaled = vectors / np.where(large > 0, large, 1)
    length = np.sqrt((scaled * scaled).sum(axis=1, keepdims=True))
    return np.rint(scaled * (UNIT / np.where(length > 0, length, 1))).astype(np.float32)


def _array(store: Store, path: Path) -> Array:
    [array] = open_arrays(path, "vectors", "").values()
    if array.ndim != 2 or len(array) != len(store):
        raise UsageError(
            f"the array has the shape {array.shape}, and the store {len(store):,} records",
            where=str(path),
            hint="save a vector for each record: (records, width)",
        )
    return array


def similarity(left: Array, right: Array) -> Array:
    """Return the cosines of rounded vectors row by row, float64; exact but for the rounding."""
    return (left * right).sum(axis=1).astype(np.float64) / UNIT**2


TOKENS = 1 << 15
"""Blocks of intervals that are projected at a time."""
ROWS = 1 << 13
COSINES = 1 << 20
"""Cosines that are computed at a time."""
PAIRS = 1 << 16
"""Pairs of which a quantile is taken; of fewer all are."""


def projected(store: Store, dimensions: int, seed: int) -> Array:
    """Return each record's counts, projected and rounded (`vectors.rounded`), as int16 (n, D).

    The projection is that of SimPoint. Records without blocks have zeros.
    """
    parts = [np.zeros((0, dimensions), np.int16)]
    for place in range(len(store.shards)):
        for _, batch in batches(store, place):
            block = np.asarray(batch.columns["block"]).astype(np.int64)
            count = np.asarray(batch.columns["count"]).astype(np.float64)
            lengths = np.diff(batch.offsets)
            row = np.repeat(np.arange(len(batch)), lengths)
            total = np.bincount(row, count, minlength=len(batch))
            share = shares_of(count, total[row])
            sums = np.zeros((len(batch), dimensions), np.int64)
            for start in range(0, len(block), TOKENS):
                here = slice(start, start + TOKENS)
                used, which = np.unique(block[here], return_inverse=True)
                random = projection_rows(used, dimensions, seed)
                rows = row[here]
                begins = np.flatnonzero(np.concatenate([[True], np.diff(rows) != 0]))
                weighted = random[which] * share[here, None]
                sums[rows[begins]] += np.add.reduceat(weighted, begins, axis=0)
            parts.append(rounded(sums.astype(np.float64)).astype(np.int16))
    return np.concatenate(parts)


class Spread(NamedTuple):
    """Mean and standard deviation of the cosines of all pairs of different records."""

    mean: float
    deviation: float


def spread_of(units: Callable[[Array], Array], records: Array) -> Spread:
    """Return the spread of the cosines of all pairs, exactly, without looking at pairs.

    With U the matrix of the n vectors: the sum over all pairs of u·v is |Σu|², and of (u·v)² it is
    ‖UᵀU‖²; the pairs of a record with itself are taken off both.
    """
    n = len(records)
    if n < 2:
        return Spread(0.0, 0.0)
    blocks = [units(records[at : at + ROWS]).astype(np.float64) for at in range(0, n, ROWS)]
    width = blocks[0].shape[1]
    total, matrix = np.zeros(width), np.zeros((width, width))
    own, own_squared = [], []
    for block in blocks:
        # All are whole numbers below 2^53, so no order of summation changes them.
        total += block.sum(axis=0)
        matrix += block.T @ block
        lengths = (block * block).sum(axis=1) / UNIT**2
        own.append(math.fsum(lengths))
        own_squared.append(math.fsum(lengths * lengths))
    pairs = n * (n - 1)
    first = math.fsum((total / UNIT) ** 2) - math.fsum(own)
    second = math.fsum(((matrix / UNIT**2) ** 2).ravel()) - math.fsum(own_squared)
    mean = first / pairs
    return Spread(mean, math.sqrt(max(0.0, second / pairs - mean * mean)))


class Edges(NamedTuple):
    """The cosines of a program, and what is similar and what is not."""

    above: float
    """Positives are above it."""
    below: float
    """Negatives are below it."""
    moved: bool
    """Whether one of the two is a quantile, as no pair is beyond the mean and its deviations."""


def pairs_of(records: Array, salt: np.uint64) -> tuple[Array, Array]:
    """Return both sides of all pairs of different records, or of `PAIRS` that are drawn."""
    n = len(records)
    if n * (n - 1) // 2 < PAIRS:
        left, right = np.triu_indices(n, 1)
    else:
        left, right = (below(drawn(salt, np.arange(PAIRS), side), n) for side in (0, 1))
    return records[left], records[right]


def threshold(values: Array, deviations: float) -> float:
    """Return the quantile of some values at the place of a number of standard deviations.

    It is that of a normal distribution, such as 0.69 for 0.5, and below the largest value.
    """
    quantile = np.quantile(values, NormalDist().cdf(deviations), method="lower")
    return float(min(quantile, np.nextafter(values.max(), -np.inf)))


class Programs(NamedTuple):
    """The records that are used, program after program."""

    order: Array
    """Record numbers, ascending within a program."""
    begin: Array
    """For each record of the store: where its program begins in `order`."""
    end: Array
    """Where it ends."""


Units = Callable[[Array], Array]
"""Record numbers → their rounded vectors (`rounded`)."""
Allowed = Callable[[Array, Array], Array]
"""(anchors, candidates) → whether each pair may be (bool)."""


class Found(NamedTuple):
    """What a search found; both (n,)."""

    record: Array
    """int64; -1: nothing is below `high`."""
    below: Array
    """bool: nothing is between `low` and `high`, so it is the nearest below `low`."""


def search(
    programs: Programs,
    units: Units,
    anchor: Array,
    key: Array,
    low: Array,
    high: Array,
    allowed: Allowed,
) -> Found:
    """Find for each anchor a record of its program whose cosine is between `low` and `high`.

    `key` (uint64) draws one of them.
    """
    result = Found(np.full(len(anchor), -1), np.zeros(len(anchor), bool))
    for some, _, members, products in compared(programs, units, anchor):
        under = allowed(anchor[some], members) & (products < high[some, None] * UNIT**2)
        good = under & (products > low[some, None] * UNIT**2)
        result.below[some] = ~good.any(axis=1) & under.any(axis=1)
        nearest = members[np.where(under, products, -np.inf).argmax(axis=1)]
        drawn_one = drawn_of(good, members, key[some])
        result.record[some] = np.where(result.below[some], nearest, drawn_one)
    return result


def near_ones(
    programs: Programs,
    units: Units,
    anchor: Array,
    key: Array,
    low: Array,
    allowed: Allowed,
    count: int,
) -> tuple[Array, Array]:
    """Draw one of the `count` nearest records of each anchor's program, if its cosine is above
    `low`.

    Returns (record or -1, int64 (n,); cosine of the last of the nearest, float64 (n,)).
    """
    near, last = np.full(len(anchor), -1), np.full(len(anchor), 2.0)
    for some, own, members, products in compared(programs, units, anchor):
        products[np.arange(len(own)), own] = -2 * UNIT**2
        # Whole numbers; of equally near records the first ones.
        n = len(members)
        order = np.arange(n) - products.astype(np.int64) * n
        nearest = np.argpartition(order, min(count, n) - 1, axis=1)[:, :count]
        sorting = np.argsort(np.take_along_axis(order, nearest, axis=1), axis=1)
        nearest = np.take_along_axis(nearest, sorting, axis=1)
        their = np.take_along_axis(products, nearest, axis=1)
        good = np.take_along_axis(allowed(anchor[some], members), nearest, axis=1)
        good &= their > low[some, None] * UNIT**2
        near[some] = drawn_of(good, members[nearest], key[some])
        last[some] = their[:, -1] / UNIT**2
    return near, last


def compared(
    programs: Programs, units: Units, anchor: Array
) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Yield (numbers of anchors, their places in their program, its records, cosines · `UNIT`²)."""
    begin = programs.begin[anchor]
    order = np.argsort(begin, kind="stable")
    borders = np.flatnonzero(np.diff(begin[order])) + 1
    for rows in np.split(order, borders) if len(order) else []:
        members = programs.order[begin[rows[0]] : programs.end[anchor[rows[0]]]]
        vectors = units(members)
        height = max(1, COSINES // len(members))
        for start in range(0, len(rows), height):
            some = rows[start : start + height]
            own = np.searchsorted(members, anchor[some])
            yield some, own, members, vectors[own] @ vectors.T


def drawn_of(good: Array, members: Array, key: Array) -> Array:
    """Return a good member of each row that `key` (uint64) draws, or -1.

    `members`: the same for all rows, or (n, members).
    """
    count = np.count_nonzero(good, axis=1)
    wanted = below(key, np.maximum(count, 1)) + 1
    column = (np.cumsum(good, axis=1) == wanted[:, None]).argmax(axis=1)
    chosen = members[column] if members.ndim == 1 else members[np.arange(len(good)), column]
    return np.where(count > 0, chosen, -1)
