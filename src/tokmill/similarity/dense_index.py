"""Dense vectors in cells of near ones: the nearest of a million in milliseconds.

Rows are sorted into the cells of `tokmill.builds.mining.cells`, so those of a cell lie together. A
query looks at the cells whose centres are nearest to it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tokmill.builds.mining.cells import cells_of
from tokmill.builds.mining.vectors import rounded
from tokmill.errors import TokmillError
from tokmill.similarity.rows import Rows
from tokmill.store.schema import Array
from tokmill.store.strings import ranges

CELL = 256
"""Rows of a cell at most."""
PROBES = 48
"""Cells that a query looks at, if not all."""
BLOCK = 1 << 15
DIGITS = 9
"""Of a cosine: products of equal rows differ in their last bits."""
ARRAYS = {"vector": "<f4", "row": "<u4", "begin": "<u4", "centre": "<f4"}
"""Array → dtype."""


def dense_arrays(matrix: Array) -> dict[str, Array]:
    """Return the arrays of an index of the rows of a matrix (n, d), by name.

    `vector` (n, d) f4: the rows in the order of cells, of length 1, or 0 if the row is zeros;
    `row` (n,) u4: which each is; `begin` (cells + 1,) u4; `centre` (cells, d) f4.
    """
    n = len(matrix)

    def units(rows: Array) -> Array:
        return rounded(np.asarray(matrix[rows], np.float32))

    found = cells_of(units, np.arange(n), CELL, 0)
    row = found["record"].astype(np.uint32)
    begin = np.append(np.flatnonzero(np.diff(found["cell"], prepend=-1)), n).astype(np.uint32)
    unit = Rows(matrix)
    vector = np.zeros(matrix.shape, np.float32)
    for start in range(0, n, BLOCK):
        here = slice(start, start + BLOCK)
        vector[here] = unit.take(row[here].astype(np.int64))
    centre = np.zeros((len(begin) - 1, matrix.shape[1]), np.float32)
    for cell, (first, last) in enumerate(zip(begin[:-1], begin[1:], strict=True)):
        mean = vector[first:last].mean(axis=0)
        length = float(np.sqrt(mean @ mean))
        centre[cell] = mean / length if length else mean
    return {"vector": vector, "row": row, "begin": begin, "centre": centre}


class DenseIndex:
    """An index of n rows, opened for queries."""

    def __init__(self, arrays: Mapping[str, Array], where: str) -> None:
        """Take the arrays of `dense_arrays`, mapped. Raises `TokmillError` if they do not fit."""
        self.vectors, self.row = arrays["vector"], arrays["row"]
        self.begin, self.centre, self.where = arrays["begin"], arrays["centre"], where
        n, cells = len(self.row), len(self.centre)
        begin = self.begin.astype(np.int64)
        fit = (
            self.vectors.ndim == self.centre.ndim == 2
            and self.row.ndim == self.begin.ndim == 1
            and self.vectors.shape[0] == n
            and self.vectors.shape[1] == self.centre.shape[1]
            and len(begin) == cells + 1
            and bool((np.diff(begin) >= 0).all())
            and begin[0] == 0
            and begin[-1] == n
        )
        if not fit:
            raise damaged(where)
        self._place: Array | None = None

    def __len__(self) -> int:
        return len(self.row)

    def vector(self, row: int) -> Array:
        """Return the vector of a row, (d,) f4, of length 1 or 0."""
        if self._place is None:
            self._place = np.argsort(self.row, kind="stable")
        found: Array = self.vectors[int(self._place[row])]
        return found

    def nearest(self, query: Array, most: int, *, exact: bool = False) -> tuple[Array, Array]:
        """Return the rows nearest to a vector and their cosines, at most `most`, the nearest first.

        `exact`: look at all cells. Rows that tie come in their order. Zeros are near to nothing.
        """
        query = query.astype(np.float64)
        length = float(np.sqrt(query @ query))
        if not length:
            return np.zeros(0, np.int64), np.zeros(0)
        query = query / length
        near = self.centre @ query
        cells = np.arange(len(near))
        if not exact and len(cells) > PROBES:
            cells = np.sort(np.argpartition(-near, PROBES)[:PROBES])
        begin, end = self.begin[cells].astype(np.int64), self.begin[cells + 1].astype(np.int64)
        best: list[tuple[Array, Array]] = []
        for start in range(0, len(cells), max(1, BLOCK // CELL)):
            here = slice(start, start + max(1, BLOCK // CELL))
            place = ranges(begin[here], end[here] - begin[here])
            score = (self.vectors[place].astype(np.float64) @ query).round(DIGITS)
            best.append(best_of(self.row[place].astype(np.int64), score, most))
        row = np.concatenate([np.zeros(0, np.int64), *(one for one, _ in best)])
        score = np.concatenate([np.zeros(0), *(one for _, one in best)])
        row, score = best_of(row, score, most)
        if len(row) and (int(row.max()) >= len(self) or not np.isfinite(score).all()):
            raise damaged(self.where)
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
