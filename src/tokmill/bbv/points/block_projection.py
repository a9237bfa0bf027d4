"""Block vectors in a few dimensions, as SimPoint projects them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.store.projection import BITS, WHOLE, projection_rows, shares_of

Floats = npt.NDArray[np.float64]
Matrix = Any
"""A scipy CSR matrix: scipy ships no types."""

DIMENSIONS = 15
"""SimPoint's default."""
SEED = 2042712918
"""The default of SimPoint 3.2's `-seedproj`."""


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
    totals = np.asarray(vectors.sum(axis=1), dtype=np.float64).reshape(-1)
    data = shares_of(vectors.data, np.repeat(totals, np.diff(vectors.indptr)))
    parts = data, vectors.indices, vectors.indptr
    shares = plugins.require("scipy.sparse").csr_matrix(parts, vectors.shape)
    sums = np.asarray(shares @ projection_rows(np.asarray(ids), dimensions, seed))
    found: Floats = sums.astype(np.float64) / float(WHOLE << BITS)
    return found
