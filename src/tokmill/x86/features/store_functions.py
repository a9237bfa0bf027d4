"""Features of the functions of a store: its records are joined to the graphs they came from.

A record names its program by the columns `project program version compiler level`, and its function
by `address`. A graph has the name of its program, from which the layout of the store makes the same
columns. Parts of a long function have the features of the whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import MachineError, TokmillError
from tokmill.store.manifest import Plan, read_plan
from tokmill.store.schema import Array, Strings
from tokmill.store.store import Store
from tokmill.x86.features.bags import Bag, bag, matrices, normalized, tf_idf
from tokmill.x86.features.function_features import BAGS, functions_of
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import SUFFIX, read_about, read_graph
from tokmill.x86.graphs.lifting import find_inputs
from tokmill.x86.image.image import find, owners
from tokmill.x86.image.program import Key, KeyTemplate

CODES = "codes"
"""A bag beside `BAGS`: canonical encodings, which differ in more than numbers."""
KINDS = (CODES, *BAGS)


Part = tuple[dict[str, Bag], Array, Any]
"""Bags, shape and calls of the functions of one graph."""


@dataclass(slots=True)
class StoreFunctions:
    """Features of the functions of all graphs that a store was made of.

    R records of the store, F functions of the graphs. A function may stand in no record, as one
    that was left out is still called by others.
    """

    record: Array
    """(R,) i8: the function of each record."""
    bags: dict[str, Bag]
    """A bag over the F functions for each of `KINDS`."""
    shape: Array
    """(F, 7) f4, as of `tokmill.x86.features.function_features`."""
    calls: Any
    """(F, F) CSR, f4: 1 where a function calls another."""
    _weighed: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.record)

    def counts(self, kind: str) -> Any:
        """Return how often each function has each feature: CSR (F, features), f4."""
        return matrices([self.bags[kind]])[0]

    def weighed(self, kind: str) -> Any:
        """Return the TF-IDF of a kind over all functions: CSR (F, features), f4; it is kept."""
        if kind not in self._weighed:
            self._weighed[kind] = tf_idf([self.counts(kind)])[0]
        return self._weighed[kind]

    def around(self, kind: str) -> Any:
        name = f"{kind} of callees"
        if name not in self._weighed:
            self._weighed[name] = self.calls @ self.weighed(kind)
        return self._weighed[name]

    def rows(self, matrix: Any) -> Any:
        """Return rows of functions as rows of records, each of length 1 or 0."""
        return normalized(matrix.tocsr())[self.record]


def store_functions(store: Store, graphs: Sequence[Path | str]) -> StoreFunctions:
    """Return the features of the functions of a store."""
    check_columns(store)
    template = KeyTemplate(layout_of(store))
    numbers, keys = _programs(store)
    order = np.argsort(numbers, kind="stable")
    bounds = np.searchsorted(numbers[order], np.arange(len(keys) + 1))
    address = store.column("address").astype(np.uint64)
    record = np.full(len(numbers), -1, np.int64)
    parts: list[Part] = []
    first = 0
    for number, graph in _graphs(graphs, template, keys):
        rows = order[bounds[number] : bounds[number + 1]]
        place, there = find(graph.function_address, address[rows])
        record[rows[there]] = place[there] + first
        parts.append(_part(graph, first))
        first += len(graph.function_address)
    lost = int((record < 0).sum())
    if lost:
        raise TokmillError(
            f"{lost:,} of {len(record):,} records belong to none of the graphs",
            where=str(store.path),
            hint="name the graphs that the store was built of",
        )
    return _joined(record, parts, first)


def check_columns(store: Store) -> None:
    """Refuse a store that does not say to which function of which program a record belongs."""
    missing = [name for name in (*Key._fields, "address") if name not in store.schema]
    if missing:
        raise TokmillError(
            f"the store has no column {missing[0]!r}",
            where=str(store.path),
            hint="functions of programs come from `tokmill build x86`",
        )


def layout_of(store: Store) -> str:
    """Return the layout by which a store named its programs, by its plan or those it came from."""
    plan: Plan = read_plan(store.path)
    while plan.recipe["source"] == "select" and plan.roots:
        try:
            plan = read_plan(Path(plan.roots[0]))
        except (TokmillError, MachineError):
            break
    result = plan.options.get("layout") if plan.recipe["source"] == "x86" else None
    if not isinstance(result, str):
        raise TokmillError(
            "the store does not say by which layout its programs are called",
            where=str(store.path),
            hint="take a store of `tokmill build x86`, or one that was selected from such",
        )
    return result


def _programs(store: Store) -> tuple[Array, dict[Key, int]]:
    """Return the number of the program of each record, (R,) i8, and the key of each number."""
    keys: dict[Key, int] = {}
    programs = [np.zeros(0, np.int64)]
    for _, _, batch in store.batches(1 << 16):
        columns = [batch.columns[name] for name in Key._fields]
        strings = [column for column in columns if isinstance(column, Strings)]
        places = np.stack([column.distinct()[1] for column in strings], axis=1)
        _, first, inverse = np.unique(places, axis=0, return_index=True, return_inverse=True)
        texts = zip(*(column.take(first).decoded() for column in strings), strict=True)
        numbers = [keys.setdefault(Key(*text), len(keys)) for text in texts]
        programs.append(np.asarray(numbers, np.int64)[inverse.reshape(-1)])
    return np.concatenate(programs), keys


def _graphs(
    paths: Sequence[Path | str], template: KeyTemplate, keys: dict[Key, int]
) -> Iterator[tuple[int, Graph]]:
    done: set[int] = set()
    for file in find_inputs([str(path) for path in paths]).files:
        about = read_about(file.path) if file.path.suffix == SUFFIX else None
        if about is None:
            continue
        number = keys.get(template.key(about.program, about.compiler, about.level))
        if number is None or number in done:
            continue
        if not about.facts:
            raise TokmillError(
                "the graph knows no imports, strings and constants",
                where=str(file.path),
                hint="make it again: tokmill cfg PROGRAMS -o GRAPHS",
            )
        done.add(number)
        yield number, read_graph(file.path)


def _part(graph: Graph, first: int) -> Part:
    features = functions_of(graph)
    owner = owners(graph.block_instructions[graph.function_blocks])
    codes = bag(len(graph.function_address), owner, features.instructions.code)
    bags = {CODES: codes, **features.bags}
    for one in bags.values():
        one.row += first
    return bags, features.shape, features.calls


def _joined(record: Array, parts: Sequence[Part], size: int) -> StoreFunctions:
    sparse = plugins.require("scipy.sparse")
    bags = {
        kind: Bag(
            size,
            _end_to_end([bags[kind].row for bags, _, _ in parts], np.int64),
            _end_to_end([bags[kind].key for bags, _, _ in parts], np.uint64),
            _end_to_end([bags[kind].count for bags, _, _ in parts], np.float32),
        )
        for kind in KINDS
    }
    shape = np.concatenate([np.zeros((0, 7), np.float32), *(shape for _, shape, _ in parts)])
    calls = sparse.csr_array((size, size), dtype=np.float32)
    if parts:
        calls = sparse.csr_array(sparse.block_diag([calls for _, _, calls in parts], format="csr"))
    return StoreFunctions(record, bags, shape, calls)


def _end_to_end(arrays: list[Array], dtype: Any) -> Array:
    return np.concatenate([np.zeros(0, dtype), *arrays])
