"""Block vectors of intervals, projected at random, and how like each other they are overall."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from tokmill.builds.mining.random_draws import below, drawn
from tokmill.builds.mining.vector_table import UNIT, rounded
from tokmill.builds.selection.minhash import batches
from tokmill.store.projection import projection_rows, shares_of
from tokmill.store.schema import Array
from tokmill.store.store import Store

TOKENS = 1 << 15
"""Blocks of intervals that are projected at a time."""
ROWS = 1 << 13
PAIRS = 1 << 16
"""Pairs of which a quantile is taken; of fewer all are."""


def projected(store: Store, dimensions: int, seed: int) -> Array:
    """Return each record's counts, projected and rounded (`vectors.rounded`), as int16 (n, D).

    The projection is that of SimPoint (`tokmill.store.projection`). Records without blocks have
    zeros.
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
    """The cosines of a program, and what is alike and unlike."""

    mean: float
    deviation: float
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
