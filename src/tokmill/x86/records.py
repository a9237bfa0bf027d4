"""Graphs as records: functions, blocks or walks, each a sequence of instructions as phrases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
from tokmill.x86.image.image import expand
from tokmill.x86.image.image import offsets as cumulated
from tokmill.x86.image.program import Key
from tokmill.x86.tokens.rules import DecodeError
from tokmill.x86.tokens.templates import Table, Templates
from tokmill.x86.tokens.vocabularies.vocabulary import UNKNOWN

if TYPE_CHECKING:
    from tokmill.x86.walks import Walker, Walking, Walks

Unit = Literal["function", "block", "walk"]
AT_ONCE = 1 << 19
"""Instructions of the functions that are made into records together; a larger function is alone."""
NO_INSTRUCTION = "bytes that are no instruction to the rules"


@dataclass(frozen=True)
class Cutting:
    """How records are made."""

    unit: Unit = "function"
    max_tokens: int = 32_768
    min_tokens: int = 100
    """For walks only."""
    walking: Walking | None = None
    """For walks only; None: as `Walking()`."""


def records_of(graph: Graph, key: Key, templates: Templates, cutting: Cutting) -> Iterator[Records]:
    """Yield the records of a program in batches, in order of function and address.

    A function with bytes that are not instructions to the rules is rejected. The columns of a
    record are described in `x86.program_source`.
    """
    walker = None
    if cutting.unit == "walk":
        from tokmill.x86.walks import Walker, Walking, walk_graph_of

        walking = cutting.walking or Walking()
        walker = Walker(walk_graph_of(graph, walking), walking)
    seen = _Seen(graph, walker) if walker is not None else None
    notes = {
        "programs": 1,
        "functions": len(graph.function_address),
        "blocks": len(graph.block_address),
        "instructions": len(graph.lengths),
    }
    for first, last in graph.portions(AT_ONCE):
        portion = Portion(graph, first, last, key, templates)
        if walker is None or seen is None:
            yield portion.pieces(cutting, notes)
        else:
            yield from portion.walks(walker, seen, cutting, notes)
        notes = {}
    if seen is not None:
        # What was visited is known only at the end, so it is in a batch without records.
        yield nothing(cutting.unit, templates, notes=seen.notes())


def nothing(
    unit: Unit,
    templates: Templates,
    drops: Sequence[Drop] = (),
    notes: dict[str, int] | None = None,
) -> Records:
    none = np.zeros(0, np.int64)
    walk = {"walk": none} if unit == "walk" else {}
    columns: dict[str, Array | Strings] = {"address": none, "part": none, **walk}
    columns |= dict.fromkeys(("function", *Key._fields), Strings.constant("", 0))
    phrases = Phrases(
        none.astype(np.uint32), np.zeros(1, np.int64), *templates.table(), templates.growing
    )
    return Records(
        np.zeros(1, np.int64), columns, none, drops_of(drops), phrases=phrases, notes=notes or {}
    )


class _Seen:
    """Which blocks and edges the walks of a program have visited."""

    def __init__(self, graph: Graph, walker: Walker) -> None:
        self.blocks = np.zeros(len(graph.block_address), bool)
        self.edges = np.zeros(len(walker.flow.target), bool)

    def notes(self) -> dict[str, int]:
        return {
            "blocks walked": int(self.blocks.sum()),
            "edges": len(self.edges),
            "edges walked": int(self.edges.sum()),
        }


class Portion:
    """Some functions of a program, their instructions as rows of the table of templates."""

    def __init__(self, graph: Graph, first: int, last: int, key: Key, templates: Templates) -> None:
        self.graph, self.key, self.first, self.templates = graph, key, first, templates
        self.functions = np.arange(first, last)
        self.names = Strings.of(graph.names(range(first, last)))
        self.first_block, self.last_block = graph.function_blocks[[first, last]].tolist()
        self.base, stop = graph.block_instructions[[self.first_block, self.last_block]].tolist()
        self.lengths = graph.lengths[self.base : stop]
        self.drops: list[Drop] = []
        numbers, kept = self._numbers()
        self.table: Table = templates.table()
        self.growing = templates.growing
        self.ends = np.zeros(len(numbers) + 1, np.int64)
        """(I + 1,) i8: tokens before each instruction."""
        self.ends[1:][kept] = np.diff(self.table.offsets)[numbers[kept]]
        np.cumsum(self.ends, out=self.ends)
        begins = graph.block_instructions[self.first_block : self.last_block] - self.base
        numbers[begins[begins < len(numbers)]] |= PHRASE_BIT
        self.ids = numbers
        """(I,) u4, as in `Phrases.ids`."""

    def _numbers(self) -> tuple[Array, Array]:
        """Return the templates of all instructions (u4), and which instructions have one (bool).

        Functions with an instruction without a template are dropped.
        """
        try:
            numbers = self._ask(self.first_block, self.last_block)
            return numbers, np.ones(len(numbers), bool)
        except DecodeError:
            pass
        # One function after the other: a graph file may hold any number of bad ones.
        graph = self.graph
        good = np.ones(len(self.functions), bool)
        for place, function in enumerate(self.functions.tolist()):
            try:
                self._ask(*graph.function_blocks[function : function + 2].tolist())
            except DecodeError:
                address = int(graph.function_address[function])
                self.drops.append(Drop(address, NO_INSTRUCTION, True))
                good[place] = False
        # The good ones are asked for in one call, because the cache may begin anew between calls.
        bounds = graph.function_blocks[self.first : self.first + len(good) + 1]
        kept = np.repeat(good, np.diff(graph.block_instructions[bounds]))
        inside = slice(*graph.block_bytes[[self.first_block, self.last_block]].tolist())
        code = graph.code[inside][np.repeat(kept, self.lengths)]
        numbers = np.zeros(len(kept), np.uint32)
        numbers[kept] = self.templates.numbers(code, self.lengths[kept])
        self.functions = self.functions[good]
        return numbers, kept

    def _ask(self, begin: int, end: int) -> Array:
        graph = self.graph
        code = graph.code[slice(*graph.block_bytes[[begin, end]].tolist())]
        lengths = graph.lengths[slice(*graph.block_instructions[[begin, end]].tolist())]
        return self.templates.numbers(code, lengths)

    def pieces(self, cutting: Cutting, notes: dict[str, int]) -> Records:
        """Return each function or block as a record, the long ones in parts."""
        graph, function = self.graph, self.functions
        begins, ends = graph.function_blocks[function], graph.function_blocks[function + 1]
        address = graph.function_address[function]
        if cutting.unit == "block":
            function = np.repeat(function, ends - begins)
            blocks = np.arange(self.first_block, self.last_block)
            bounds = graph.function_blocks[self.first :] - self.first_block
            begins, _ = take_flat(blocks, bounds, self.functions - self.first)
            ends, address = begins + 1, graph.block_address[begins]
        start = graph.block_instructions[begins] - self.base
        stop = graph.block_instructions[ends] - self.base
        full = start < stop
        record, part, start, stop = self._cut(
            np.flatnonzero(full), start[full], stop[full], cutting.max_tokens
        )
        result = self.records(
            start, stop, np.arange(len(start) + 1), function[record], address[record], part
        )
        result.notes.update(notes)
        if not full.all():
            result.skipped = {"empty": int((~full).sum())}
        return result

    def _cut(
        self, record: Array, start: Array, stop: Array, most: int
    ) -> tuple[Array, Array, Array, Array]:
        """Return records of at most `max_tokens`: (record, part, first instruction, end)."""
        pieces = []
        part = 0
        while len(record):
            end = np.searchsorted(self.ends, self.ends[start] + most, side="right") - 1
            end = np.minimum(end, stop)
            pieces.append((record, np.full(len(record), part), start, end))
            more = end < stop
            record, start, stop = record[more], end[more], stop[more]
            part += 1
        if not pieces:
            return record, record, start, stop
        columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
        if part > 1:
            order = np.lexsort((columns[1], columns[0]))
            columns = [column[order] for column in columns]
        return columns[0], columns[1], columns[2], columns[3]

    def walks(
        self, walker: Walker, seen: _Seen, cutting: Cutting, notes: dict[str, int]
    ) -> Iterator[Records]:
        """Yield the walks of the functions; those that are too short are skipped."""
        graph, most = self.graph, walker.walking.walk_tokens
        begins = graph.block_instructions[self.first_block : self.last_block + 1] - self.base
        tokens = np.diff(self.ends[begins])
        functions = self.functions
        functions = functions[np.diff(graph.function_blocks)[functions] > 0]
        for walks in walker.walk(functions, tokens, self.first_block):
            block = walks.block - self.first_block
            start, stop = begins[block], begins[block + 1]
            stop, length = cut_short(walks, start, stop, self.ends, most)
            kept = np.flatnonzero(length >= cutting.min_tokens)
            piece, offsets = take_flat(np.arange(len(block)), walks.offsets, kept)
            # The last block may have no room for a single instruction.
            visited = piece[start[piece] < stop[piece]]
            seen.blocks[walks.block[visited]] = True
            edge = walks.edge[visited]
            seen.edges[edge[edge >= 0]] = True
            first = walks.block[walks.offsets[:-1][kept]]
            batch = self.records(
                start[piece], stop[piece], offsets, walks.function[kept],
                graph.block_address[first], np.zeros(len(kept), np.int64), walks.number[kept],
            )  # fmt: skip
            batch.notes.update(notes)
            notes = {}
            if len(kept) < len(length):
                batch.skipped = {"too short": len(length) - len(kept)}
            yield batch
        if self.drops or notes:
            drops, self.drops = self.drops, []
            yield nothing(cutting.unit, self.templates, drops, notes)

    def records(
        self, start: Array, stop: Array, offsets: Array, function: Array, address: Array,
        part: Array, walk: Array | None = None,
    ) -> Records:  # fmt: skip
        """Return n records of pieces of the instructions.

        Args:
            start: (m,) i8, first instruction of each piece, counted in the portion.
            stop: (m,) i8, end of each piece, exclusive.
            offsets: (n + 1,) i8, the pieces of each record.
            function: (n,) numbers of functions of the graph.
            address: (n,) u8.
            part: (n,).
            walk: (n,), numbers of walks.
        """
        n = len(offsets) - 1
        bounds = cumulated(stop - start)
        tokens = cumulated(self.ends[stop] - self.ends[start])
        ids = self.ids[expand(start, stop - start)]
        columns: dict[str, Array | Strings] = {
            "address": address,
            "function": self.names.take(function - self.first),
            **{name: Strings.constant(text, n) for name, text in self.key._asdict().items()},
            "part": part,
        }
        if walk is not None:
            columns["walk"] = walk
        drops, self.drops = self.drops, []
        table = self.table
        return Records(
            tokens[offsets],
            columns,
            address.astype(np.int64),
            drops_of(drops),
            phrases=Phrases(ids, bounds[offsets], table.offsets, table.columns, self.growing),
            notes=unknown_in(ids, table),
        )


def cut_short(
    walks: Walks, start: Array, stop: Array, ends: Array, most: int
) -> tuple[Array, Array]:
    """Return walks cut to a number of tokens, between instructions: (stop, tokens).

    Args:
        walks: n walks that visit m nodes.
        start: (m,), the first instruction of each visited node.
        stop: (m,), its end, exclusive.
        ends: (I + 1,), tokens before each instruction.
        most: largest number of tokens of a walk.

    Returns:
        The new end of each visited node (m,), and the tokens of each walk (n,).
    """
    size = ends[stop] - ends[start]
    before = np.concatenate([[0], np.cumsum(size)])
    within = before[:-1] - np.repeat(before[walks.offsets[:-1]], np.diff(walks.offsets))
    limit = np.searchsorted(ends, ends[start] + most - within, "right") - 1
    stop = np.minimum(stop, limit)
    return stop, np.add.reduceat(ends[stop] - ends[start], walks.offsets[:-1])


def unknown_in(ids: Array, table: Table) -> dict[str, int]:
    """Return how many tokens of each column are not in its vocabulary."""
    result = {}
    for column, tokens in table.columns.items():
        before = np.concatenate([[0], np.cumsum(tokens == UNKNOWN)])[table.offsets]
        if before[-1]:
            count = int(np.diff(before)[ids & ~PHRASE_BIT].sum())
            if count:
                result[f"tokens of {column} replaced by unk"] = count
    return result
