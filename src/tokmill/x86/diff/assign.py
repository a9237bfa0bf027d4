"""At most one partner for each: the assignment with the largest sum of gains."""

from __future__ import annotations

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.diff.candidates import Pairs


def assign(pairs: Pairs, gain: Array) -> Array:
    """Return the numbers of the chosen pairs: i8, ascending.

    The sum of their gains (n,) is the largest; pairs without gain are never chosen. This is the
    method of Jonker and Volgenant for sparse costs (scipy's `min_weight_full_bipartite_matching`);
    each row has one more column of its own, which means no partner.
    """
    kept = np.flatnonzero(gain > 0)
    i, j = pairs.i[kept], pairs.j[kept]
    # Most pairs are the only ones of both their functions.
    alone = (np.bincount(i, minlength=1)[i] == 1) & (np.bincount(j, minlength=1)[j] == 1)
    taken: Array = kept[alone].astype(np.int64)
    kept = kept[~alone]
    if not len(kept):
        return taken
    sparse = plugins.require("scipy.sparse")
    graph = plugins.require("scipy.sparse.csgraph")
    rows, i = np.unique(pairs.i[kept], return_inverse=True)
    columns, j = np.unique(pairs.j[kept], return_inverse=True)
    most = float(gain[kept].max()) + 1
    # Costs must not be 0, and a row's own column costs as much as a pair without gain.
    cost = np.concatenate([most - gain[kept].astype(np.float64), np.full(len(rows), most)])
    at = (
        np.concatenate([i, np.arange(len(rows))]),
        np.concatenate([j, len(columns) + np.arange(len(rows))]),
    )
    table = sparse.csr_matrix((cost, at), shape=(len(rows), len(columns) + len(rows)))
    row, column = graph.min_weight_full_bipartite_matching(table)
    paired = column < len(columns)
    chosen = rows[row[paired]] * pairs.columns + columns[column[paired]]
    found: Array = np.sort(np.concatenate([taken, np.searchsorted(pairs.key, chosen)]))
    return found
