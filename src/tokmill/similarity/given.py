"""Vectors that come from elsewhere: checked, so that what is wrong with them is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tokmill.builds.values import open_arrays
from tokmill.errors import TokmillError
from tokmill.similarity.rows import is_sparse
from tokmill.store.schema import Array

BLOCK = 1 << 22
"""Numbers that are looked at at a time."""


def check_matrix(matrix: Any, rows: int, where: str) -> None:
    """Refuse vectors that are not numbers, not finite, or not as many as there should be.

    Raises `TokmillError` that names the first such row.
    """
    if getattr(matrix, "ndim", 0) != 2 or np.dtype(matrix.dtype).kind not in "biuf":
        raise TokmillError(
            f"dtype {matrix.dtype} and shape {matrix.shape} are no vectors",
            where=where,
            hint="save an array of numbers with two axes, a row a function",
        )
    if matrix.shape[0] != rows:
        raise TokmillError(
            f"there are {matrix.shape[0]:,} vectors and {rows:,} functions",
            where=where,
            hint="row i is the vector of function i: make both from the same list",
        )
    bad = _not_finite(matrix)
    if len(bad):
        raise TokmillError(
            f"row {bad[0]:,} is not finite (NaN or infinite), as are {len(bad):,} rows in all"
            if len(bad) > 1
            else f"row {bad[0]:,} is not finite (NaN or infinite)",
            where=where,
            hint="rows are counted from 0; a function without a vector gets zeros, and scores as "
            "chance",
        )


def _not_finite(matrix: Any) -> Array:
    """Return the numbers of rows that hold a value that is not finite."""
    if np.dtype(matrix.dtype).kind != "f":
        return np.zeros(0, np.int64)
    if is_sparse(matrix):
        csr = matrix.tocsr()
        bad = np.flatnonzero(~np.isfinite(csr.data))
        return np.unique(np.searchsorted(csr.indptr, bad, side="right") - 1)
    height = max(1, BLOCK // max(1, matrix.shape[1]))
    parts = [np.zeros(0, np.int64)]
    for start in range(0, len(matrix), height):
        finite = np.isfinite(matrix[start : start + height]).all(1)
        parts.append(start + np.flatnonzero(~finite))
    return np.concatenate(parts)


def read_vectors(path: Path, rows: int) -> Array:
    """Return the vectors of an .npy file, (rows, d), mapped and checked; nothing is unpickled."""
    arrays = open_arrays(path, "vectors")
    if len(arrays) > 1:
        raise TokmillError(
            f"the file holds {len(arrays)} arrays", where=str(path), hint="save one, as .npy"
        )
    (matrix,) = arrays.values()
    check_matrix(matrix, rows, str(path))
    return matrix
