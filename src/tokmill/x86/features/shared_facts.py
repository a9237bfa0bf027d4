"""What functions share: the columns of their facts by kind, and its names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.features.baselines import FACTS, facts
from tokmill.x86.features.functions import find, import_names
from tokmill.x86.features.store_functions import StoreFunctions
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.files import read_about, read_graph
from tokmill.x86.graphs.inputs import GRAPH, find_inputs
from tokmill.x86.image.keys import Key, KeyTemplate

SHOWN = 40
"""Characters of a string that are shown."""


def fact_rows(functions: StoreFunctions) -> tuple[Any, dict[str, int]]:
    """Return the rows of the baseline `facts`, and kind → its last column + 1."""
    matrix = facts(functions)
    ends = np.cumsum([functions.weighed(kind).shape[1] for kind in FACTS])
    assert ends[-1] == matrix.shape[1]
    return matrix, dict(zip(FACTS, ends.tolist(), strict=True))


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
    what is most telling first. Empty for an address where no function begins.
    """
    place, there = find(graph.function_address, np.asarray([address], np.uint64))
    if not there[0] or not graph.facts:
        return []
    first, last = graph.function_blocks[place[0] : place[0] + 2].tolist()
    strings = {graph.strings[i] for i in _of_blocks(graph.string, graph.block_strings, first, last)}
    constants = {int(c) for c in _of_blocks(graph.constant, graph.block_constants, first, last)}
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
