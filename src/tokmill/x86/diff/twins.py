"""Twins: two matches whose functions could as well be matched crosswise, as copies of one file."""

from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.diff.candidates import Pairs
from tokmill.x86.image.image import find

NEAR = 2.0
"""Evidence of their own that two matches lose at most by crossing, if they are twins."""


def crossed(pairs: Pairs, chosen: Array, own: Array) -> Array:
    """Return the pair that each match, `chosen` by number, would be: (M,) i8, itself for none.

    `own`: (n,) f4, what speaks for each pair without its neighbours.
    """
    i, j = pairs.i, pairs.j
    match = np.full(pairs.rows, -1), np.full(pairs.columns, -1)
    match[0][i[chosen]] = match[1][j[chosen]] = number = np.arange(len(chosen))
    one, other = match[0][i], match[1][j]
    pair = np.flatnonzero((one >= 0) & (other >= 0) & (one != other))
    back, there = find(pairs.key, i[chosen[other[pair]]] * pairs.columns + j[chosen[one[pair]]])
    pair, back = pair[there], back[there]
    one, other = one[pair], other[pair]
    loss = own[chosen[one]] + own[chosen[other]] - own[pair] - own[back]
    order = np.lexsort((other, loss, one))
    order = order[loss[order] < NEAR]
    first = order[np.unique(one[order], return_index=True)[1]]
    twin, instead = number.copy(), chosen.copy()
    twin[one[first]], instead[one[first]] = other[first], pair[first]
    return np.where(twin[twin] == number, instead, chosen)


def lost_together(calls: Any, pairs: Pairs, chosen: Array, instead: Array, loss: Array) -> Array:
    """Return what twins that call each other or lie side by side lose if all of them are crossed.

    (M,) f8, the mean of their `loss`, as neighbours decide about each other; others get infinity.
    """
    sparse = plugins.require("scipy.sparse")
    among = np.flatnonzero(instead != chosen)
    places = pairs.i[chosen[among]], pairs.j[chosen[among]]
    order = np.argsort(places[1])
    twin = order[np.searchsorted(places[1][order], pairs.j[instead[among]])]
    edges = [(np.arange(len(among)), twin)]
    for graph, place in zip(calls, places, strict=True):
        order = np.argsort(place)
        beside = np.flatnonzero(np.diff(place[order]) == 1)
        edges += [graph[place][:, place].nonzero(), (order[beside], order[beside + 1])]
    row, column = (np.concatenate(side) for side in zip(*edges, strict=True))
    table = sparse.csr_array((np.ones(len(row)), (row, column)), shape=(len(among), len(among)))
    number = plugins.require("scipy.sparse.csgraph").connected_components(table, False)[1]
    result = np.full(len(chosen), np.inf)
    result[among] = (np.bincount(number, loss[among]) / np.bincount(number))[number]
    return result
