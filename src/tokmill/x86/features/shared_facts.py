"""What functions share: the columns of their facts by kind, and its names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.features.baselines import CALLEES, FACTS, facts
from tokmill.x86.features.function_features import find, functions_of, import_names
from tokmill.x86.features.store_functions import StoreFunctions
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import read_about, read_graph
from tokmill.x86.graphs.graph_inputs import GRAPH, find_inputs
from tokmill.x86.image.keys import Key, KeyTemplate

SHOWN = 40
"""Characters of a string that are shown."""


def fact_rows(functions: StoreFunctions) -> tuple[Any, dict[str, int]]:
    """Return the rows of the baseline `facts`, and kind → its last column + 1."""
    matrix = facts(functions)
    ends = np.cumsum([functions.weighed(kind).shape[1] for kind in FACTS])
    assert ends[-1] == matrix.shape[1]
    return matrix, dict(zip(FACTS, ends.tolist(), strict=True))


def fact_keys(functions: StoreFunctions) -> tuple[Array, Array]:
    """Return the key (hash) of each column of `fact_rows`, u8, and its weight (IDF), f4.

    With them the row of a function of any other program can be made (`fact_row`).
    """
    keys, weights = [], []
    for kind in FACTS:
        counts = functions.counts(kind)
        having = np.bincount(counts.indices, minlength=counts.shape[1])
        # The columns of `matrices` are the keys, ascending; one column stands there for no keys.
        known = np.unique(functions.bags[kind].key)
        keys.append(np.resize(known, counts.shape[1]) if len(known) else np.zeros(1, np.uint64))
        weights.append(np.log((1 + counts.shape[0]) / (1 + having)))
    return np.concatenate(keys).astype(np.uint64), np.concatenate(weights).astype(np.float32)


def fact_row(
    graph: Graph, function: int, bounds: Mapping[str, int], keys: Array, weights: Array
) -> tuple[Array, Array]:
    """Return the row of a function of a graph, as `fact_rows` has those of its store.

    Args:
        graph: of a program that need not be one of the store's.
        function: its number in the graph.
        bounds: kind → its last column + 1, of `fact_rows`.
        keys: of `fact_keys`.
        weights: of `fact_keys`.

    Returns:
        (columns, ascending, i8; values, f4). What no function of the store has takes no column, but
        counts for the length, so that scores are cosines.
    """
    made = functions_of(graph)
    whole = float(np.max(weights, initial=0))
    callees = made.calls.indices[made.calls.indptr[function] : made.calls.indptr[function + 1]]
    columns: list[Array] = []
    values: list[Array] = []
    squares, start = 0.0, 0
    for kind in FACTS:
        stop = bounds[kind]
        bag = made.bags[kind]
        times = (bag.row == function).astype(np.float64) + CALLEES * np.isin(bag.row, callees)
        here = times > 0
        key, number = np.unique(bag.key[here], return_inverse=True)
        place, known = find(keys[start:stop], key)
        weight = np.where(known, weights[start:stop][np.where(known, place, 0)], whole)
        count = (1 + np.log(bag.count[here])) * times[here]
        value: Array = np.bincount(number.reshape(-1), count, len(key)) * weight
        squares += float((value**2).sum())
        columns.append(place[known] + start)
        values.append(value[known])
        start = stop
    length = np.sqrt(squares)
    row = np.concatenate(values) / (length if length else 1)
    return np.concatenate(columns).astype(np.int64), row.astype(np.float32)


def graphs_of(
    paths: Sequence[Path | str], layout: str, keys: Sequence[Key]
) -> Iterator[tuple[Key, Graph]]:
    """Yield the graphs of some programs of a store, each once; those that are missing not."""
    template, wanted = KeyTemplate(layout), set(keys)
    for file in find_inputs([str(path) for path in paths]).files:
        if not wanted:
            return
        about = read_about(file.path) if file.path.suffix == GRAPH else None
        key = template.key(about.program, about.compiler, about.level) if about else None
        if key in wanted:
            wanted.discard(key)
            yield key, read_graph(file.path)


def facts_of(graph: Graph, address: int) -> list[str]:
    """Return the strings, imports and constants of a function, by name, each once.

    Strings come first, the longest before others, then imports, then constants, the largest first:
    what is most telling first. 0 and 1, which nearly all functions have, are left out.
    Empty for an address where no function begins.
    """
    place, there = find(graph.function_address, np.asarray([address], np.uint64))
    if not there[0] or not graph.facts:
        return []
    first, last = graph.function_blocks[place[0] : place[0] + 2].tolist()
    strings = {graph.strings[i] for i in _of_blocks(graph.string, graph.block_strings, first, last)}
    constants = {int(c) for c in _of_blocks(graph.constant, graph.block_constants, first, last)}
    constants -= {0, 1}
    targets = _of_blocks(graph.edge_target, graph.block_edges, first, last)
    slot, known = find(graph.import_address, np.asarray(targets, np.uint64))
    names = import_names(graph)
    called = {names[i] for i in slot[known].tolist()}
    return [
        *(_quoted(text) for text in sorted(strings, key=lambda text: (-len(text), text))),
        *sorted(called),
        *(f"{value:#x}" for value in sorted(constants, key=lambda value: (-abs(value), value))),
    ]


def _of_blocks(values: Array, bounds: Array, first: int, last: int) -> list[Any]:
    found: list[Any] = values[int(bounds[first]) : int(bounds[last])].tolist()
    return found


def _quoted(text: str) -> str:
    short = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
    return f'"{short}"'
