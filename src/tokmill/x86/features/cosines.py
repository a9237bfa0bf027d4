"""Products of sparse rows for chosen pairs of rows, and the nearest rows, without a full table."""

from itertools import pairwise
from typing import Any

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.features.bags import row_sums

AT_ONCE = 1 << 21
"""Entries of rows that are multiplied at a time."""
CELLS = 1 << 23
"""Cells of a block of similarities (f4): 32 MiB."""


def row_products(a: Any, b: Any, i: Array, j: Array) -> Array:
    """Return a[i] · b[j] for pairs of rows of two CSR matrices of the same columns: (n,) f4.

    Time and memory grow with the entries of the rows; at most some million are held at a time.
    """
    result = np.zeros(len(i), np.float32)
    if not len(i) or not a.nnz or not b.nnz:
        return result
    # Rows are multiplied many times as fast if their columns ascend.
    a, b = (one if one.has_sorted_indices else one.sorted_indices() for one in (a, b))
    ends = np.cumsum(np.diff(a.indptr)[i] + np.diff(b.indptr)[j], dtype=np.int64)
    parts = np.searchsorted(ends, np.arange(AT_ONCE, ends[-1] + 1, AT_ONCE)) + 1
    for first, last in pairwise(sorted({0, len(i), *parts.tolist()})):
        both = a[i[first:last]].multiply(b[j[first:last]]).tocsr()
        result[first:last] = row_sums(both.data, both.indptr)
    return result


def sketch(matrix: Any, width: int, seed: int) -> Array:
    """Return the rows of a CSR matrix in few columns, (rows, width) f4, with nearly equal products.

    A column goes to one of `width` places with one of two signs (Charikar, Chen and
    Farach-Colton 2002), by a hash of its number.
    """
    columns = np.arange(matrix.shape[1], dtype=np.uint64)
    hashed = mix(columns + mix(np.asarray([seed], np.uint64)))
    sign = np.where(hashed & np.uint64(1), 1, -1).astype(np.float32)
    place = ((hashed >> np.uint64(1)) % np.uint64(width)).astype(matrix.indices.dtype)
    entries = matrix.data * sign[matrix.indices], place[matrix.indices], matrix.indptr
    # Entries of a row in the same place are added, in the order of the row.
    return type(matrix)(entries, shape=(matrix.shape[0], width)).toarray()


def nearest_rows(a: Array, b: Array, k: int) -> tuple[Array, Array]:
    """Return for each row of `a` the k rows of `b` with the largest products, as (i, j) pairs.

    `a` (n, d) and `b` (m, d) are f4. Pairs ascend in i. Takes 32 MiB beside the arguments.
    """
    k = min(k, len(b))
    if not k or not len(a):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    nearest = np.zeros((len(a), k), np.int64)
    height = max(CELLS // len(b), 1)
    turned = np.ascontiguousarray(b.T)
    for first in range(0, len(a), height):
        nearest[first : first + height] = _largest(a[first : first + height] @ turned, k)
    return np.repeat(np.arange(len(a)), k), nearest.reshape(-1)


def _largest(values: Array, k: int) -> Array:
    """Return the places of the k largest values of each row: (n, k), ascending unless two tie."""
    columns = values.shape[1]
    # Selecting values is about ten times faster than selecting their places.
    least = np.partition(values, columns - k, axis=1)[:, columns - k, None]
    taken = values >= least
    places = np.zeros((len(values), k), np.int64)
    tied = taken.sum(1) > k
    places[~tied] = np.nonzero(taken[~tied])[1].reshape(-1, k)
    if tied.any():
        places[tied] = np.argpartition(values[tied], columns - k)[:, columns - k :]
    return places
