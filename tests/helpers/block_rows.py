"""Small basic block vectors."""

from typing import Any

import numpy as np

from tokmill.bbv.traces.block_vectors import BlockVectors


def from_rows(rows: list[dict[int, int]], **facts: Any) -> BlockVectors:
    """Return the vectors of rows {block id: instructions}."""
    indptr = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)
    ids = np.array([block for row in rows for block in row], np.int64)
    counts = np.array([count for row in rows for count in row.values()], np.uint64)
    return BlockVectors(indptr, ids, counts, **facts)
