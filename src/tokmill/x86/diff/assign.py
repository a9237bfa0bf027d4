"""One partner each: the assignment of the largest sum, where no partner is worth a threshold."""

from __future__ import annotations

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.diff.candidates import Pairs


def assign(pairs: Pairs, gain: Array) -> Array:
    """Return the numbers of the pairs that are chosen: i8, ascending.

    The sum of their gains (n,) is the largest; pairs without gain are never chosen. By the method
    of Jonker and Volgenant for sparse costs (scipy's `min_weight_full_bipartite_matching`), where
    each row may also take a place of its own.
    """
    kept = np.flatnonzero(gain > 0)
    if not len(kept):
        return kept.astype(np.int64)
    sparse = plugins.require("scipy.sparse")
    graph = plugins.require("scipy.sparse.csgraph")
    rows, i = np.unique(pairs.i[kept], return_inverse=True)
    columns, j = np.unique(pairs.j[kept], return_inverse=True)
    most = float(gain[kept].max()) + 1
    # Costs must not be 0, and a row's own place costs as much as a pair without gain.
    cost = np.concatenate([most - gain[kept].astype(np.float64), np.full(len(rows), most)])
    at = (
        np.concatenate([i, np.arange(len(rows))]),
        np.concatenate([j, len(columns) + np.arange(len(rows))]),
    )
    table = sparse.csr_matrix((cost, at), shape=(len(rows), len(columns) + len(rows)))
    row, column = graph.min_weight_full_bipartite_matching(table)
    paired = column < len(columns)
    chosen = rows[row[paired]] * pairs.columns + columns[column[paired]]
    found: Array = np.searchsorted(pairs.key, np.sort(chosen))
    return found
