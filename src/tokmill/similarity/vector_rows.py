"""Vectors of functions, dense or sparse, as rows that are multiplied block by block."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.builds.selection.overlay_values import open_arrays
from tokmill.store.schema import Array

CELLS = 1 << 22
"""Numbers of a block of rows or products: in f8 32 MiB."""
MOST_DENSE = 1 << 25
"""Cells up to which a sparse matrix with many entries a row is held dense: 256 MiB."""
MANY = 1 / 50
"""Share of cells with an entry from which dense products are faster."""
TIE = 1e-9
"""Products that differ by no more tie: products of equal rows differ in their last bits."""


def is_sparse(matrix: Any) -> bool:
    return hasattr(matrix, "tocsr")


class Rows:
    """The rows of a matrix (n, d) in float64, each of length 1 or 0.

    Float64, so that equal vectors tie whatever the order of a sum. A dense matrix stays as it is
    (it may be mapped), and rows are scaled when they are taken. With `unit=False` rows stay as they
    are: their products may be sums of several cosines.
    """

    def __init__(self, matrix: Any, *, unit: bool = True, more: Any = None) -> None:
        """Take a dense (n, d) or CSR matrix of finite numbers.

        `more`: more columns of the same rows, sparse or dense, where rows stay as they are.
        """
        self.unit = unit
        self.sparse = is_sparse(matrix)
        self.matrix: Any = matrix.tocsr() if self.sparse else matrix
        n, d = self.matrix.shape
        if self.sparse and self.matrix.nnz > MANY * n * d and n * d <= MOST_DENSE:
            self.matrix, self.sparse = self.matrix.toarray(), False
        if self.sparse:
            self.matrix = self.matrix.astype(np.float64)
            squares = self.matrix.multiply(self.matrix).sum(axis=1)
            self.lengths = np.sqrt(np.asarray(squares, np.float64).reshape(-1))
        else:
            self.lengths = np.empty(n, np.float64)
            height = max(1, CELLS // max(1, d))
            for start in range(0, n, height):
                part = np.asarray(self.matrix[start : start + height], np.float64)
                # Numbers beyond 1e154 would overflow when they are squared.
                scale = np.abs(part).max(axis=1, initial=0.0)
                part = part / np.where(scale > 0, scale, 1)[:, None]
                self.lengths[start : start + height] = scale * np.sqrt((part**2).sum(1))
        self.parts: list[Rows] = [self]
        if more is not None:
            assert not unit
            self.parts.append(Rows(more, unit=False))
            self.lengths = np.hypot(self.lengths, self.parts[1].lengths)

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def zeros(self) -> int:
        return int(np.count_nonzero(self.lengths == 0))

    def take(self, rows: Array) -> Any:
        """Return some rows as a matrix, f8, scaled to length 1; rows of zeros stay."""
        if not self.unit:
            return self.matrix[rows] if self.sparse else np.asarray(self.matrix[rows], np.float64)
        lengths = self.lengths[rows]
        if self.sparse:
            scale = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
            sparse = plugins.require("scipy.sparse")
            return (sparse.diags_array(scale) @ self.matrix[rows]).tocsr()
        # The reciprocal of a length below 1e-308 would be infinite.
        return (
            np.asarray(self.matrix[rows], np.float64) / np.where(lengths > 0, lengths, 1)[:, None]
        )


def products(a: Rows, of_a: Array, b: Rows, of_b: Array) -> Iterator[tuple[int, Array]]:
    """Yield (first row, products of these rows of `of_a` with all of `of_b`), block by block.

    Products: (height, len(of_b)) f8. Memory holds the rows `of_b` and one block.
    """
    height = max(1, CELLS // max(1, len(of_b)))
    turned = []
    for part in b.parts:
        other = part.take(of_b)
        turned.append(other.T.tocsr() if is_sparse(other) else other.T)
    for start in range(0, len(of_a), height):
        rows = of_a[start : start + height]
        scores = np.zeros((len(rows), len(of_b)), np.float64)
        for part, columns in zip(a.parts, turned, strict=True):
            block = part.take(rows) @ columns
            scores += block.toarray() if is_sparse(block) else block
        yield start, scores


def ranks(
    rows: Rows, query: Array, target: Array, asked: Array | None = None
) -> tuple[Array, Array]:
    """Return how many targets rank above the match of each query, and how many tie with it.

    Query i is a row of `rows`, and so is its match, target i; all other targets are its negatives.
    `asked`: numbers of the queries to look at; None: all. Returns two (queries,) i8 arrays.
    """
    place = np.arange(len(query)) if asked is None else asked
    above, ties = np.empty(len(place), np.int64), np.empty(len(place), np.int64)
    for start, block in products(rows, query[place], rows, target):
        stop = start + len(block)
        own = np.arange(len(block)), place[start:stop]
        block -= block[own][:, None]
        block[own] = -np.inf
        above[start:stop] = (block > TIE).sum(1)
        ties[start:stop] = (block >= -TIE).sum(1) - above[start:stop]
    return above, ties


def check_matrix(matrix: Array, rows: int, where: str) -> None:
    """Refuse vectors that are not numbers, not finite, or not as many as there should be."""
    if matrix.ndim != 2 or matrix.dtype.kind not in "biuf":
        raise TokmillError(
            f"dtype {matrix.dtype} and shape {matrix.shape} are not vectors",
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


def _not_finite(matrix: Array) -> Array:
    if matrix.dtype.kind != "f":
        return np.zeros(0, np.int64)
    height = max(1, CELLS // max(1, matrix.shape[1]))
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
