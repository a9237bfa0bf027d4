"""Random projection: vectors as wide as there are blocks, to a few dimensions.

SimPoint (Sherwood et al., ASPLOS 2002) multiplies vectors with a matrix of random numbers between
-1 and 1. Here a row of that matrix is a hash of the block's id: a block has the same row in every
file and for any set of other blocks, and no matrix of all ids is ever made. Shares and random
numbers are whole numbers, so their sums are exact: no order of summation changes them.
"""

from __future__ import annotations

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array

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
