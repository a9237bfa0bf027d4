"""Random projection: vectors of blocks, as wide as there are blocks, to a few dimensions.

SimPoint (Sherwood et al., ASPLOS 2002) multiplies the normalised vectors with a matrix of random
numbers between -1 and 1. Here a row of that matrix is a hash of the block's id: a block has the
same row in every file and for any set of other blocks, and no matrix of all ids is ever made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokmill.errors import UsageError
from tokmill.store.hashes import mix

Floats = npt.NDArray[np.float64]
Matrix = Any
"""A scipy CSR matrix: scipy ships no types."""

DIMENSIONS = 15
"""SimPoint's default."""
SEED = 2042712918
"""The default of SimPoint 3.2's `-seedproj`."""
STEP = np.uint64(0x9E3779B97F4A7C15)


def project(vectors: Matrix, ids: npt.ArrayLike, dimensions: int, seed: int = SEED) -> Floats:
    """Return normalised vectors in a few dimensions, (intervals, dimensions) float64.

    A row is divided by its sum, so intervals of different lengths can be compared. A row without
    entries stays at zero.

    Args:
        vectors: (intervals, blocks) CSR, counts of instructions; not negative.
        ids: (blocks,) the id of each column, any 64-bit numbers.
        dimensions: of the result, at least 1.
        seed: another seed gives another projection.
    """
    if dimensions < 1:
        raise UsageError(
            f"{dimensions} dimensions are none", hint="give at least 1; 15 is SimPoint's default"
        )
    sums = np.asarray(vectors.sum(axis=1), dtype=np.float64).reshape(-1, 1)
    found = np.asarray(vectors @ rows(np.asarray(ids), dimensions, seed))
    normal: Floats = np.divide(found, sums, out=np.zeros_like(found), where=sums > 0)
    return normal


def rows(ids: npt.NDArray[Any], dimensions: int, seed: int) -> Floats:
    """Return a random row for each id, (ids, dimensions), uniform in [-1, 1).

    The numbers are splitmix64 (Steele, Lea, Flood 2014) of seed, id and dimension.
    """
    with np.errstate(over="ignore"):
        key = mix(ids.astype(np.uint64) + STEP * np.uint64(seed & (2**64 - 1)))
        place = np.arange(1, dimensions + 1, dtype=np.uint64) * STEP
        bits = mix(key[:, None] + place)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
