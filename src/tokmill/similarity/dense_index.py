"""Dense vectors that are mapped: the nearest of a million in a second, by comparing with all."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.similarity.vector_rows import Rows
from tokmill.store.schema import Array

BLOCK = 1 << 15
DIGITS = 9
"""Tolerance of a cosine: products of equal rows differ in their last bits."""
ARRAYS = {"vector": "<f4"}
"""Array → dtype."""


def dense_arrays(matrix: Array) -> dict[str, Array]:
    """Return the arrays of an index of the rows of a matrix (n, d), by name.

    `vector` (n, d) f4: the rows, of length 1, or 0 if the row is zeros.
    """
    unit = Rows(matrix)
    vector = np.zeros(matrix.shape, np.float32)
    for start in range(0, len(matrix), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(matrix)))
        vector[rows] = unit.take(rows)
    return {"vector": vector}


class DenseIndex:
    """An index of n rows, opened for queries."""

    def __init__(self, arrays: Mapping[str, Array], where: str) -> None:
        """Take the arrays of `dense_arrays`, mapped. Raises `TokmillError` if they do not fit."""
        self.vectors, self.where = arrays["vector"], where
        if self.vectors.ndim != 2:
            raise damaged(where)

    def __len__(self) -> int:
        return len(self.vectors)

    def nearest(self, query: Array, most: int) -> tuple[Array, Array]:
        """Return the rows nearest to a vector and their cosines, at most `most`, the nearest first.

        Rows that tie come in their order. Zeros are near to nothing.
        """
        query = query.astype(np.float64)
        length = float(np.sqrt(query @ query))
        if not length:
            return np.zeros(0, np.int64), np.zeros(0)
        query = query / length
        row, score = np.zeros(0, np.int64), np.zeros(0)
        for start in range(0, len(self), BLOCK):
            block = self.vectors[start : start + BLOCK].astype(np.float64)
            cosines = (block @ query).round(DIGITS)
            if not np.isfinite(cosines).all():
                raise damaged(self.where)
            row = np.concatenate([row, np.arange(start, start + len(block))])
            row, score = best_of(row, np.concatenate([score, cosines]), most)
        return row, score


def best_of(row: Array, score: Array, most: int) -> tuple[Array, Array]:
    """Return the rows with the largest scores, the largest first; of equal ones the lower row."""
    if len(row) > most:
        least = np.partition(score, len(row) - most)[len(row) - most]
        kept = score >= least
        row, score = row[kept], score[kept]
    order = np.lexsort((row, -score))[:most]
    return row[order], score[order]


def damaged(where: str) -> TokmillError:
    """Return the error of an index whose arrays do not fit each other."""
    return TokmillError(
        "the index is damaged: its arrays do not fit each other",
        where=where,
        hint="make it again: tokmill similarity index … --fresh",
    )
