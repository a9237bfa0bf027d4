"""The calls of a graph; a stub of one of the program's own functions counts as that function."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.ranges import member


class Calls(NamedTuple):
    """The n edges that lead to a function or an import."""

    edge: Array
    """(n,) i8, ascending: edges of kind `CALL`, and `JUMP` to other functions (tail calls)."""
    caller: Array
    """(n,) i8, the function that calls."""
    function: Array
    """(n,) i8, the function that is called; -1: an import."""
    imported: Array
    """(n,) i8, the import that is called; -1: a function."""


def calls_of(graph: Graph) -> Calls:
    """Return the calls of a graph whose callee is known.

    A stub with the name of one function of the graph counts as that function: shared libraries call
    their own functions through stubs.
    """
    sizes = np.diff(graph.block_edges)
    block = np.repeat(np.arange(len(sizes)), sizes)
    owner = np.repeat(np.arange(len(graph.function_address)), np.diff(graph.function_blocks))
    caller = owner[block]
    target, kind = graph.edge_target, graph.edge_kind
    function = _rows(graph.function_address, target)
    imported = _rows(graph.import_address, target)
    own = _own(graph)
    through = (imported >= 0) & (function < 0)
    function[through] = own[imported[through]]
    imported[function >= 0] = -1
    leaves = (kind == Edge.CALL) | ((kind == Edge.JUMP) & (function != caller))
    edge = np.flatnonzero(leaves & ((function >= 0) | (imported >= 0)))
    return Calls(edge, caller[edge], function[edge], imported[edge])


def _rows(addresses: Array, target: Array) -> Array:
    """Return the rows (i8) of targets among ascending addresses; -1 if there is none."""
    if not len(addresses):
        return np.full(len(target), -1, np.int64)
    known = member(target, addresses)
    return np.where(known, np.searchsorted(addresses, target), -1).astype(np.int64)


def _own(graph: Graph) -> Array:
    """Return for each import the one function of the graph that has its name (i8), or -1."""
    rows: dict[str, int] = {}
    for row, name in enumerate(graph.function_name):
        # If several functions have the name, it is not known which is meant.
        rows[name] = -1 if name in rows or not name else row
    thunks = member(graph.import_address, graph.function_address)
    found = [
        -1 if thunk else rows.get(name, -1)
        for name, thunk in zip(graph.import_name, thunks.tolist(), strict=True)
    ]
    return np.asarray(found, np.int64)
