"""Pairs of graphs as records: walks through both programs, each a sequence of instructions.

Nodes without instructions (imports, strings, exits of functions) give no tokens: a walk passes
through them. So a model reads only code, and learns about joins from the code around them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tokmill.store.schema import (
    PHRASE_BIT,
    Array,
    Drop,
    Phrases,
    Records,
    Strings,
    drops_of,
    take_flat,
)
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import changes, expand, offsets
from tokmill.x86.image.program import Key
from tokmill.x86.merged import Merged, merge
from tokmill.x86.records import Portion, cut_short, unknown_in
from tokmill.x86.tokens.templates import Table, Templates
from tokmill.x86.walks import Walker, Walking, Walks

TEXTS = ("function", "origin", "first", "second", *Key._fields)
"""Columns of strings."""
BOTH = "+"
"""Stands between the two values of a key in which the programs of a pair differ."""


@dataclass(frozen=True)
class Walked:
    """How records are made."""

    streams: tuple[str, ...]
    """Columns of tokens."""
    min_tokens: int = 1
    walking: Walking = dataclasses.field(default_factory=Walking)


def pair_records(
    graphs: tuple[Graph, Graph], keys: tuple[Key, Key], templates: Sequence[Templates],
    walked: Walked,
) -> Iterator[Records]:  # fmt: skip
    """Yield the walks of a pair in batches, in order of program, function and number.

    Args:
        templates: a cache for each; the same one if both programs have the same bits.

    Raises `NoFacts` for a graph without imports and strings.
    """
    merged = merge(graphs, walked.walking)
    pair = _Pair(graphs, keys, templates, walked, merged)
    notes = {
        "pairs": 1,
        "pairs of programs of two names": int(keys[0].program != keys[1].program),
        "imports of both programs": merged.shared,
        "strings of both programs": merged.strings,
        "blocks": pair.blocks,
        "edges": len(merged.walk_graph.flow.target),
    }
    walker = Walker(merged.walk_graph, walked.walking)
    sizes = np.diff(merged.walk_graph.function_blocks)[pair.functions]
    total, walked_so_far = walked.walking.walks * int(sizes.sum()), 0
    for walks in walker.walk(pair.functions, pair.tokens, 0):
        walked_so_far += len(walks.function)
        batch = pair.records(walks)
        batch.done = walked_so_far / total
        yield batch
    notes |= {
        "blocks walked": int(pair.seen[: pair.blocks].sum()),
        "edges walked": int(pair.edges_seen.sum()),
        "walks that cross from one program to the other": pair.crossings,
    }
    yield nothing(walked.streams, pair.drops, notes)


def nothing(
    streams: Sequence[str], drops: Sequence[Drop] = (), notes: Mapping[str, int] | None = None
) -> Records:
    none = np.zeros(0, np.int64)
    columns: dict[str, Array | Strings] = {"address": none, "walk": none}
    columns |= dict.fromkeys(TEXTS, Strings.constant("", 0))
    table = dict.fromkeys((*streams, "side"), none)
    start = np.zeros(1, np.int64)
    return Records(
        start, columns, none, drops_of(drops),
        phrases=Phrases(none.astype(np.uint32), start, start, table), done=1.0,
        notes={name: count for name, count in (notes or {}).items() if count},
    )  # fmt: skip


class _Pair:
    """The instructions of both programs as rows of one table, and which of them were walked."""

    def __init__(
        self, graphs: tuple[Graph, Graph], keys: tuple[Key, Key], templates: Sequence[Templates],
        walked: Walked, merged: Merged,
    ) -> None:  # fmt: skip
        self.graphs, self.walked = graphs, walked
        self.texts = {"first": graphs[0].program, "second": graphs[1].program}
        # Values that differ are joined, as in `O0+O2`.
        pairs = zip(*keys, strict=True)
        self.texts |= Key(*(a if a == b else f"{a}{BOTH}{b}" for a, b in pairs))._asdict()
        self.programs = Strings.of([graph.program for graph in graphs])
        functions = [len(graph.function_address) for graph in graphs]
        halves = [
            _half(Portion(graph, 0, count, key, cache), side, walked.streams)
            for side, (graph, count, key, cache) in enumerate(
                zip(graphs, functions, keys, templates, strict=True)
            )
        ]
        self.drops = [drop for half in halves for drop in half.portion.drops]
        rows = [len(half.table.offsets) - 1 for half in halves]
        self.ids: Array = np.concatenate([halves[0].ids, halves[1].ids + np.uint32(rows[0])])
        """(I,) u4, rows of the table of both programs, with the bits of `Phrases.ids`."""
        ends = [half.portion.ends for half in halves]
        self.ends = np.concatenate([ends[0], ends[1][1:] + ends[0][-1]])
        offsets = [half.table.offsets for half in halves]
        self.table = Table(
            np.concatenate([offsets[0], offsets[1][1:] + offsets[0][-1]]),
            {
                name: np.concatenate([half.table.columns[name] for half in halves])
                for name in halves[0].table.columns
            },
        )
        self.coded = {name: self.table.columns[name] for name in walked.streams}
        self.growing = object()
        """The table of all batches of the pair."""
        bounds = [half.portion.functions for half in halves]
        self.functions = np.concatenate([bounds[0], bounds[1] + functions[0]])
        filled = np.diff(merged.walk_graph.function_blocks) > 0
        self.functions = self.functions[filled[self.functions]]
        self.names = Strings.of(
            [name for g, n in zip(graphs, functions, strict=True) for name in g.names(range(n))]
        )
        self.addresses = np.concatenate([graph.block_address for graph in graphs])
        self.first_blocks = len(graphs[0].block_address)
        self.blocks = len(self.addresses)
        self._place_nodes(merged)
        self.seen = np.zeros(merged.nodes, bool)
        self.edges_seen = np.zeros(len(merged.walk_graph.flow.target), bool)
        self.crossings = 0

    def _place_nodes(self, merged: Merged) -> None:
        """Set the instructions of each node: none for dropped blocks and other kinds of nodes."""
        first, second = self.graphs
        begins = first.block_instructions, second.block_instructions + len(first.lengths)
        self.start = np.zeros(merged.nodes, np.int64)
        self.stop = np.zeros(merged.nodes, np.int64)
        self.start[: self.blocks] = np.concatenate([begins[0][:-1], begins[1][:-1]])
        self.stop[: self.blocks] = np.concatenate([begins[0][1:], begins[1][1:]])
        self.tokens = self.ends[self.stop] - self.ends[self.start]
        """(N,) i8."""
        self.stop[self.tokens == 0] = self.start[self.tokens == 0]

    def records(self, walks: Walks) -> Records:
        """Return some walks as records; those that are too short are skipped."""
        start, most = self.start[walks.block], self.walked.walking.walk_tokens
        stop, length = cut_short(walks, start, self.stop[walks.block], self.ends, most)
        kept = np.flatnonzero(length >= max(self.walked.min_tokens, 1))
        node, offsets = take_flat(np.arange(len(start)), walks.offsets, kept)
        self._see(walks, node, start, stop)
        full = start[node] < stop[node]
        bounds = np.concatenate([[0], np.cumsum(full)])[offsets]
        node = node[full]
        begin, end = start[node], stop[node]
        self._count_crossings(walks.block[node], bounds)
        first = walks.block[walks.offsets[:-1][kept]]
        result = self._records(begin, end, bounds, walks.function[kept], first, walks.number[kept])
        if len(kept) < len(length):
            result.skipped = {"too short": len(length) - len(kept)}
        return result

    def _see(self, walks: Walks, node: Array, start: Array, stop: Array) -> None:
        block = walks.block[node]
        visited = (start[node] < stop[node]) | (self.tokens[block] == 0)
        self.seen[block[visited]] = True
        edge = walks.edge[node[visited]]
        self.edges_seen[edge[edge >= 0]] = True

    def _count_crossings(self, block: Array, bounds: Array) -> None:
        second = block >= self.first_blocks
        crosses = changes(second)
        crosses[bounds[:-1][bounds[:-1] < len(crosses)]] = False
        before = np.concatenate([[0], np.cumsum(crosses)])[bounds]
        self.crossings += int((np.diff(before) > 0).sum())

    def _records(
        self, start: Array, stop: Array, bounds: Array, function: Array, block: Array, walk: Array
    ) -> Records:
        """Return n records, as `Portion.records`; `block` (n,) is the first of each."""
        n = len(bounds) - 1
        ends = offsets(stop - start)
        tokens = offsets(self.ends[stop] - self.ends[start])
        ids, table = self.ids[expand(start, stop - start)], self.table
        address = self.addresses[block]
        columns: dict[str, Array | Strings] = {
            "address": address,
            "function": self.names.take(function),
            "walk": walk,
            "origin": self.programs.take((block >= self.first_blocks).astype(np.int64)),
            **{name: Strings.constant(text, n) for name, text in self.texts.items()},
        }
        phrases = Phrases(ids, ends[bounds], table.offsets, table.columns, self.growing)
        return Records(
            tokens[bounds],
            columns,
            address.astype(np.int64),
            phrases=phrases,
            notes=unknown_in(ids, Table(table.offsets, self.coded)),
        )


@dataclass(slots=True)
class _Half:
    portion: Portion
    ids: Array
    """(I,) u4, rows of `table`, with the bits of `Phrases.ids`."""
    table: Table


def _half(portion: Portion, side: int, streams: Sequence[str]) -> _Half:
    """Return the instructions of one program, and the rows of its table that these use."""
    used, ids = np.unique(portion.ids & ~PHRASE_BIT, return_inverse=True)
    ids = ids.astype(np.uint32).reshape(-1) | (portion.ids & PHRASE_BIT)
    table, columns = portion.table, {}
    offsets = np.zeros(1, np.int64)
    if not len(used):
        columns = {name: table.columns[name][:0] for name in streams}
    for name in streams if len(used) else ():
        columns[name], offsets = take_flat(table.columns[name], table.offsets, used)
    columns["side"] = np.full(int(offsets[-1]), side, np.uint8)
    return _Half(portion, ids, Table(offsets, columns))
