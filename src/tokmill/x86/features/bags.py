"""Bags of hashed features, sparse matrices of several bags, and products and sketches of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.image.image import distinct, numbered

AT_ONCE = 1 << 21
"""Entries of rows that are multiplied at a time."""
CELLS = 1 << 23
"""Cells of a block of similarities (f4): 32 MiB."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class Bag:
    """How often each row (function or block) has each feature; no (row, feature) is there twice."""

    rows: int
    row: Array
    """(n,) i8, ascending."""
    key: Array
    """(n,) u8, hash of the feature."""
    count: Array
    """(n,) f4."""


def bag(rows: int, row: Array, key: Array) -> Bag:
    """Count (row, feature) pairs, given in any order and possibly repeated."""
    keys, number = numbered(key)
    width = max(len(keys), 1)
    pairs, count = np.unique(row.astype(np.int64) * width + number, return_counts=True)
    where, what = np.divmod(pairs, width)
    return Bag(rows, where, keys[what] if len(keys) else keys, count.astype(np.float32))


def grams(values: Array, size: int, ends: Array) -> tuple[Array, Array]:
    """Return hashes of all runs of `size` values, and the place of the first value of each.

    `ends` (ascending) are places that no run may cross.
    """
    n = len(values) - size + 1
    if n <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    hashed = np.zeros(n, np.uint64)
    for step in range(size):
        hashed = mix(hashed * _GOLDEN + values[step : step + n])
    unit = np.searchsorted(ends, np.arange(len(values)), side="right")
    whole = np.flatnonzero(unit[:n] == unit[size - 1 :])
    return hashed[whole], whole


def hash_texts(texts: Sequence[str]) -> Array:
    """Return a hash of each text: (n,) u8, the same on every machine."""
    import hashlib

    digests = b"".join(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for text in texts
    )
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def matrices(bags: Sequence[Bag]) -> list[Any]:
    """Return counts as CSR matrices (rows × features, f4); columns are the features of all bags."""
    sparse = plugins.require("scipy.sparse")
    keys = distinct(*(one.key for one in bags))
    result = []
    for one in bags:
        column = np.searchsorted(keys, one.key)
        starts = np.searchsorted(one.row, np.arange(one.rows + 1))
        shape = (one.rows, max(len(keys), 1))
        result.append(sparse.csr_array((one.count, column, starts), shape=shape))
    return result


def ones_at(row: Array, column: Array, shape: tuple[int, int]) -> Any:
    """Return a CSR matrix (f4) with a 1 at some places (i8), which may be repeated."""
    key = distinct(row * max(shape[1], 1) + column)
    row, column = np.divmod(key, max(shape[1], 1))
    starts = np.searchsorted(row, np.arange(shape[0] + 1))
    ones = np.ones(len(row), np.float32), column, starts
    return plugins.require("scipy.sparse").csr_array(ones, shape=shape)


def tf_idf(counts: Sequence[Any]) -> list[Any]:
    """Return TF-IDF of CSR counts with the same columns.

    A value is (1 + ln count) · ln((1 + n) / (1 + rows that have it)) over the n rows of all
    matrices together (Salton and Buckley 1988, with one added).
    """
    rows = sum(one.shape[0] for one in counts)
    having = sum(np.bincount(one.indices, minlength=one.shape[1]) for one in counts)
    idf = np.log((1 + rows) / (1 + having)).astype(np.float32)
    result = []
    for one in counts:
        copy = one.copy()
        copy.data = (1 + np.log(one.data)) * idf[one.indices]
        result.append(copy)
    return result


def normalized(matrix: Any) -> Any:
    """Return a CSR matrix with rows of length 1; rows of zeros are not changed.

    It shares its indices with the matrix that is given.
    """
    lengths = np.sqrt(row_sums(matrix.data**2, matrix.indptr))
    scale = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    data = (matrix.data * np.repeat(scale, np.diff(matrix.indptr))).astype(np.float32)
    return type(matrix)((data, matrix.indices, matrix.indptr), shape=matrix.shape, copy=False)


def row_sums(values: Array, offsets: Array) -> Array:
    """Return the sum of each run of values; run i is offsets[i] to offsets[i + 1]."""
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.float64)])
    return (sums[offsets[1:]] - sums[offsets[:-1]]).astype(np.float32)


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
    some = (np.diff(a.indptr) > 0)[i] & (np.diff(b.indptr) > 0)[j]
    for first, last in pairwise(sorted({0, len(i), *parts.tolist()})):
        kept = first + np.flatnonzero(some[first:last])
        both = a[i[kept]].multiply(b[j[kept]]).tocsr()
        result[kept] = row_sums(both.data, both.indptr)
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
