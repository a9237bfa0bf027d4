"""Products of sparse rows for chosen pairs of rows, and the nearest rows, without a full table."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.store.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.features.bags import row_sums

DENSE = 1 << 22
"""Cells of the dense rows that are held at a time (f4)."""
AT_ONCE = 1 << 22
"""Entries of the other rows that are multiplied at a time."""
CELLS = 1 << 23
"""Cells of a block of similarities (f4): 32 MiB."""


def row_products(a: Any, b: Any, i: Array, j: Array) -> Array:
    """Return a[i] · b[j] for pairs of rows of two CSR matrices of the same columns: (n,) f4.

    `i` ascends. Time grows with the entries of the rows b[j].
    """
    found = np.zeros(len(i), np.float32)
    if not len(i) or not a.nnz or not b.nnz:
        return found
    used = np.unique(i)
    height = max(DENSE // a.shape[1], 1)
    cuts = np.searchsorted(i, used[::height])
    for first, last in zip(cuts, [*cuts[1:], len(i)], strict=True):
        rows, local = np.unique(i[first:last], return_inverse=True)
        dense = a[rows].toarray().reshape(-1)
        base = local.reshape(-1) * a.shape[1]
        sizes = np.diff(b.indptr)[j[first:last]]
        ends = np.cumsum(sizes)
        parts = np.searchsorted(ends, np.arange(AT_ONCE, ends[-1] + AT_ONCE, AT_ONCE), "right")
        start = 0
        for stop in [*parts.tolist(), len(sizes)]:
            if stop <= start and start < len(sizes):
                # One very long row alone.
                stop = start + 1
            some = slice(start, stop)
            offsets = np.concatenate([[0], np.cumsum(sizes[some])])
            place = np.arange(offsets[-1]) + np.repeat(
                b.indptr[j[first:last][some]] - offsets[:-1], sizes[some]
            )
            values = dense[np.repeat(base[some], sizes[some]) + b.indices[place]] * b.data[place]
            found[first + start : first + stop] = row_sums(values, offsets)
            start = max(stop, start)
    return found


def sketch(matrix: Any, width: int, seed: int) -> Array:
    """Return the rows of a CSR matrix in few columns (rows, width) f4; products nearly stay.

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
        similar = a[first : first + height] @ turned
        if k < len(b):
            found[first : first + height] = np.argpartition(similar, len(b) - k)[:, len(b) - k :]
        else:
            found[first : first + height] = np.arange(k)
    return np.repeat(np.arange(len(a)), k), found.reshape(-1)
