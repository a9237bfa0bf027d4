"""Sparse vectors by row and by column: a query looks at rows that share something rare with it.

All columns of a query that few rows have are followed; the rows found are scored exactly, over all
columns. Columns that very many rows have are not followed unless there is nothing else, as they say
little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tokmill.similarity.dense_index import best_of, damaged
from tokmill.store.schema import Array
from tokmill.store.shards.strings import ranges

FOLLOWED = 1 << 16
"""Entries of columns that a query follows at most, the rarest columns first."""
CANDIDATES = 4096
"""Rows that are scored over all columns at most."""
BLOCK = 1 << 22
"""Entries that are multiplied at a time, if all are."""
ARRAYS = {
    "begin": "<i8", "column": "<u4", "value": "<f4",
    "column_begin": "<i8", "row": "<u4", "row_value": "<f2",
}  # fmt: skip
"""Array → dtype."""
KEYED = {"key": "<u8", "weight": "<f4"}
"""Arrays that an index may have, so that rows of other programs can be made: a key and a weight a
column."""


def sparse_arrays(matrix: Any) -> dict[str, Array]:
    """Return the arrays of an index of a CSR matrix (n, d), by name.

    `begin` (n + 1,), `column`, `value`: the entries by row. `column_begin` (d + 1,), `row`,
    `row_value`: the same by column, values rounded.
    """
    by_row = matrix.tocsr().astype(np.float32)
    by_row.sum_duplicates()
    by_row.eliminate_zeros()
    by_column = by_row.tocsc()
    return {
        "begin": by_row.indptr.astype(np.int64),
        "column": by_row.indices.astype(np.uint32),
        "value": by_row.data.astype(np.float32),
        "column_begin": by_column.indptr.astype(np.int64),
        "row": by_column.indices.astype(np.uint32),
        "row_value": by_column.data.astype(np.float16),
    }


class SparseIndex:
    """An index of n rows, opened for queries."""

    def __init__(self, arrays: Mapping[str, Array], where: str) -> None:
        """Take the arrays of `sparse_arrays`, mapped. Raises `TokmillError` if they do not fit."""
        self.begin, self.column, self.value = (arrays[k] for k in ("begin", "column", "value"))
        self.column_begin, self.row = arrays["column_begin"], arrays["row"]
        self.row_value, self.where = arrays["row_value"], where
        width = len(self.column_begin) - 1
        self.key, self.weight = arrays.get("key"), arrays.get("weight")
        for one in (self.key, self.weight):
            if one is not None and (one.shape != (width,) or not np.isfinite(one).all()):
                raise damaged(where)
        for begin, entries, values in (
            (self.begin, self.column, self.value),
            (self.column_begin, self.row, self.row_value),
        ):
            fit = (
                begin.ndim == entries.ndim == values.ndim == 1
                and len(begin) > 0
                and begin[0] == 0
                and begin[-1] == len(entries) == len(values)
                and bool((begin[1:] >= begin[:-1]).all())
            )
            if not fit:
                raise damaged(where)

    def __len__(self) -> int:
        return len(self.begin) - 1

    def entries(self, row: int) -> tuple[Array, Array]:
        """Return the columns of a row, ascending, and their values."""
        first, last = int(self.begin[row]), int(self.begin[row + 1])
        column = self.column[first:last].astype(np.int64)
        if len(column) and (
            int(column[-1]) >= len(self.column_begin) - 1 or (np.diff(column) <= 0).any()
        ):
            raise damaged(self.where)
        return column, np.asarray(self.value[first:last])

    def nearest(
        self, query: tuple[Array, Array], most: int, *, exact: bool = False
    ) -> tuple[Array, Array]:
        """Return the rows with the largest products with a row of (columns, values), the largest
        first, at most `most`; rows without a common column are none.

        `exact`: score every row. Rows that tie come in their order.
        """
        column, value = query
        if exact:
            score = self._all_products(column, value)
            there = np.flatnonzero(score > 0)
            return best_of(there, score[there], most)
        counts = self.column_begin[column + 1] - self.column_begin[column]
        order = np.argsort(counts, kind="stable")
        followed = np.cumsum(counts[order]) <= FOLLOWED
        followed[:1] = True
        chosen = order[followed]
        place = ranges(self.column_begin[column[chosen]], counts[chosen])
        row = self.row[place].astype(np.int64)
        if not len(row):
            return row, np.zeros(0, np.float32)
        if int(row.max()) >= len(self):
            raise damaged(self.where)
        part = self.row_value[place].astype(np.float32) * np.repeat(value[chosen], counts[chosen])
        there, number = np.unique(row, return_inverse=True)
        score = np.bincount(number.reshape(-1), part).astype(np.float32)
        there, _ = best_of(there, score, max(CANDIDATES, most))
        return best_of(there, self._products(there, column, value), most)

    def _all_products(self, column: Array, value: Array) -> Array:
        """Return the products of all rows with a query: (n,) f4."""
        dense = np.zeros(len(self.column_begin) - 1, np.float32)
        dense[column] = value
        score = np.zeros(len(self), np.float32)
        first = 0
        while first < len(self):
            last = int(np.searchsorted(self.begin, self.begin[first] + BLOCK, side="right")) - 1
            last = min(max(last, first + 1), len(self))
            begin, end = int(self.begin[first]), int(self.begin[last])
            columns = self.column[begin:end]
            if len(columns) and int(columns.max()) >= len(dense):
                raise damaged(self.where)
            full = first + np.flatnonzero(np.diff(self.begin[first : last + 1]))
            if len(full):
                part = self.value[begin:end] * dense[columns]
                score[full] = np.add.reduceat(part, self.begin[full] - begin)
            first = last
        if not np.isfinite(score).all():
            raise damaged(self.where)
        return score

    def _products(self, rows: Array, column: Array, value: Array) -> Array:
        begin, size = self.begin[rows], self.begin[rows + 1] - self.begin[rows]
        place = ranges(begin, size)
        here = self.column[place].astype(np.int64)
        order = np.argsort(column)
        at = np.searchsorted(column[order], here)
        at = order[np.minimum(at, len(order) - 1)]
        shared = column[at] == here
        part = np.where(shared, self.value[place] * value[at], 0)
        owner = np.repeat(np.arange(len(rows)), size)
        score = np.bincount(owner, part, len(rows)).astype(np.float32)
        if not np.isfinite(score).all():
            raise damaged(self.where)
        return score

    def shares(
        self, row: int, query: tuple[Array, Array], bounds: Mapping[str, int]
    ) -> list[float]:
        """Return the part of the product of a row and a query that each range of columns gives.

        `bounds`: name → its last column + 1, ascending.
        """
        column, value = self.entries(row)
        _, i, j = np.intersect1d(column, query[0], assume_unique=True, return_indices=True)
        kind = np.searchsorted(np.asarray([*bounds.values()]), column[i], side="right")
        found = np.bincount(kind, value[i] * query[1][j], len(bounds) + 1)
        return [float(part) for part in found[: len(bounds)]]
