"""Products of sparse rows for chosen pairs of rows, and the nearest rows, without a full table."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.store.hashes import mix
from tokmill.store.schema import Array

DENSE = 1 << 23
"""Cells of the dense rows that are held at a time (f4)."""
AT_ONCE = 1 << 22
"""Entries of the other rows that are multiplied at a time."""
CELLS = 1 << 23
"""Cells of a block of similarities (f4): 32 MiB."""


def row_products(a: Any, b: Any, i: Array, j: Array) -> Array:
    """Return a[i] · b[j] for pairs of rows of two CSR matrices of the same columns: (n,) f4.

    `i` ascends. Time grows with the entries of the rows.
    """
    found = np.zeros(len(i), np.float32)
    if not len(i) or not a.nnz or not b.nnz:
        return found
    begins = np.flatnonzero(np.diff(i, prepend=i[0] - 1))
    ends = np.append(begins, len(i))
    # Rows that are held at a time have no more different columns than entries.
    mean = a.nnz / a.shape[0]
    height = int(max(1, min(DENSE / a.shape[1], 1 << 16), (DENSE / max(mean, 1)) ** 0.5))
    local = np.full(a.shape[1], -1, np.int64)
    for first in range(0, len(begins), height):
        last = min(first + height, len(begins))
        entries, row = _entries(a, i[begins[first:last]])
        columns, column = np.unique(a.indices[entries], return_inverse=True)
        local[columns] = np.arange(len(columns))
        # One more column of zeros, for columns that no row here has: -1 is the last of a row.
        width = len(columns) + 1
        dense = np.zeros((last - first) * width, np.float32)
        dense[row * width + column] = a.data[entries]
        base = np.repeat(np.arange(last - first), np.diff(ends[first : last + 1])) * width
        pairs = slice(ends[first], ends[last])
        found[pairs] = _products(dense, width, local, b, base, j[pairs])
        local[columns] = -1
    return found


def _products(dense: Array, width: int, local: Array, b: Any, base: Array, j: Array) -> Array:
    """Return the products of rows of `b` with dense rows that begin at `base`."""
    ends = np.cumsum(np.diff(b.indptr)[j])
    parts = np.searchsorted(ends, np.arange(AT_ONCE, ends[-1] + 1, AT_ONCE)) + 1
    cuts = sorted({0, len(j), *parts.tolist()})
    found = np.empty(len(j), np.float32)
    for start, stop in pairwise(cuts):
        entries, row = _entries(b, j[start:stop])
        column = local[b.indices[entries]]
        column[column < 0] = width - 1
        values = dense[base[start:stop][row] + column] * b.data[entries]
        found[start:stop] = np.bincount(row, values, stop - start)
    return found


def _entries(matrix: Any, rows: Array) -> tuple[Array, Array]:
    """Return the places of the entries of some rows, end to end, and the number of the row."""
    sizes = np.diff(matrix.indptr)[rows]
    number = np.repeat(np.arange(len(rows)), sizes)
    begins = np.cumsum(sizes) - sizes
    place = np.arange(len(number)) + np.repeat(matrix.indptr[rows] - begins, sizes)
    return place, number


def sketch(matrix: Any, width: int, seed: int) -> Array:
    """Return the rows of a CSR matrix in few columns, (rows, width) f4, with nearly equal products.

    A column goes to one of `width` places with one of two signs (Charikar, Chen and
    Farach-Colton 2002), by a hash of its number.
    """
    sparse = plugins.require("scipy.sparse")
    columns = np.arange(matrix.shape[1])
    hashed = mix(columns.astype(np.uint64) + mix(np.asarray([seed], np.uint64)))
    sign = np.where(hashed & np.uint64(1), 1, -1).astype(np.float32)
    place = ((hashed >> np.uint64(1)) % np.uint64(width)).astype(np.int64)
    project = sparse.csr_array(
        (sign, place, np.arange(len(columns) + 1)), shape=(len(columns), width)
    )
    return np.asarray((matrix @ project).toarray(), np.float32)


def nearest_rows(a: Array, b: Array, k: int) -> tuple[Array, Array]:
    """Return for each row of `a` the k rows of `b` with the largest products, as (i, j) pairs.

    `a` (n, d) and `b` (m, d) are f4. Pairs ascend in i. Takes 32 MiB beside the arguments.
    """
    k = min(k, len(b))
    if not k or not len(a):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    found = np.zeros((len(a), k), np.int64)
    height = max(CELLS // len(b), 1)
    turned = np.ascontiguousarray(b.T)
    for first in range(0, len(a), height):
        found[first : first + height] = _largest(a[first : first + height] @ turned, k)
    return np.repeat(np.arange(len(a)), k), found.reshape(-1)


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
