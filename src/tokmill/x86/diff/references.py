"""What operands refer to, by what it is and not by where it lies: compared in matched blocks."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from tokmill.store.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.diff.blocks import BlockMatches, greedy
from tokmill.x86.diff.functions import Matched
from tokmill.x86.diff.result import References as Changes
from tokmill.x86.diff.stack import compare_slots, slot_text
from tokmill.x86.features.bags import hash_texts
from tokmill.x86.features.functions import find, import_names
from tokmill.x86.features.instructions import Instructions
from tokmill.x86.graph import DIRECT, IMMEDIATE, PLACES, TEXT, Graph
from tokmill.x86.image.ranges import distinct, expand, member, numbered

FUNCTION, IMPORT, STRING, TABLE, CODE, DATA, UNKNOWN = range(7)
"""What lies at an address."""
CONTENT, SHIFT = 1 << 20, 0.5
"""What equal content, and the distance that most data moved, count beside one matched function
when data without a name is matched."""
SHOWN = 16
"""Bytes of data that are shown."""
NUMBERED = re.compile(r"\.\d+$")
"""What compilers add to the names of local variables, and count anew in each compilation."""
_STEP = np.uint64(0x9E3779B97F4A7C15)


class Pairs(NamedTuple):
    """N operands of matched blocks, one beside the other."""

    match: Array
    """(N,) i8: the number of the pair of functions."""
    block: Array
    """(N,) i8: the number of the pair of blocks."""
    a: Array
    """(N,) i8: number of the operand in A."""
    b: Array


class References:
    """All that the instructions and edges of one program refer to; R operands, by block."""

    def __init__(self, graph: Graph, instructions: Instructions, leaving: Array) -> None:
        """`leaving`: i8, the edges that count."""
        self.graph = graph
        self.memory = Memory(graph)
        rows = graph.reference_place // PLACES
        block = np.searchsorted(graph.block_instructions, rows, side="right") - 1
        edge_block = np.searchsorted(graph.block_edges, leaving, side="right") - 1
        last = graph.block_instructions[edge_block + 1] - 1
        direct = (graph.reference_place & DIRECT > 0) & (graph.reference_place & IMMEDIATE == 0)
        width = np.where(direct, instructions.width[rows], 0)
        text = np.full(len(rows), -1, np.int64)
        text[graph.reference_place & TEXT > 0] = graph.string
        none = np.full(len(leaving), -1, np.int64)
        order = np.argsort(np.concatenate([block, edge_block]), kind="stable")
        self.begin = np.searchsorted(
            np.concatenate([block, edge_block])[order], np.arange(len(graph.block_address) + 1)
        )
        """(B + 1,) i8: the operands of each block."""
        self.row = np.concatenate([rows, last])[order]
        """(R,) i8: the instruction."""
        self.width = np.concatenate([width, none])[order]
        """(R,) i8: the bytes that are read or written at the address; 0 where it is only taken or
        added to, -1 for the target of a call or a jump."""
        self.address = np.concatenate([graph.reference, graph.edge_target[leaving]])[order]
        """(R,) u8."""
        self.text = np.concatenate([text, none])[order]
        self._through_offset_table()
        self.kind, self.number = self._kinds(self.address)
        """(R,) i8: what lies there; which function, block or table, or a hash of a name."""
        texts = hash_texts(graph.strings)
        strings = (self.text >= 0) & np.isin(self.kind, (DATA, UNKNOWN))
        self.kind[strings] = STRING
        self.number[strings] = texts[self.text[strings]].view(np.int64)
        data = (self.kind == DATA) | (self.kind == UNKNOWN)
        self.memory.end_at(self.address[data])

    def _through_offset_table(self) -> None:
        """Replace words of the global offset table by the addresses that they hold."""
        memory = self.memory
        here = np.flatnonzero(memory.linked_at(self.address) & (self.width >= 0))
        here = here[~member(self.address[here], self.graph.import_slot)]
        held, known = memory.values(self.address[here], np.full(len(here), memory.word))
        known &= held > 0
        self.address[here[known]], self.width[here[known]] = held[known], 0

    def _kinds(self, address: Array) -> tuple[Array, Array]:
        graph = self.graph
        kind, number = np.full(len(address), UNKNOWN, np.int64), np.zeros(len(address), np.int64)
        kind[self.memory.holds(address)] = DATA
        # A block that several functions share is known by the first of them.
        starts, first = np.unique(graph.block_address, return_index=True)
        order = np.argsort(graph.table_address, kind="stable")
        slots = np.asarray([name != "" for name in graph.import_slot_name], bool)
        slot_names = [name.partition("@")[0] for name in graph.import_slot_name]
        for what, keys, values in (
            (CODE, starts, first),
            (TABLE, graph.table_address[order], order),
            (FUNCTION, graph.function_address, np.arange(len(graph.function_address))),
            (IMPORT, graph.import_slot[slots], hash_texts(slot_names)[slots].view(np.int64)),
            (IMPORT, graph.import_address, hash_texts(import_names(graph)).view(np.int64)),
        ):
            place, there = find(keys, address)
            kind[there], number[there] = what, values[place[there]]
        return kind, number

    def kinds_of_pointers(self) -> tuple[Array, Array]:
        """Return what lies at the targets of all pointers in data, as `kind` and `number`."""
        graph = self.graph
        kind, number = self._kinds(graph.pointer_target)
        strings = np.asarray([text != "" for text in graph.pointer_text], bool) & (kind == DATA)
        kind[strings] = STRING
        texts = [text for text in graph.pointer_text if text]
        known = np.asarray([text != "" for text in graph.pointer_text], bool)
        number[strings] = hash_texts(texts).view(np.int64)[np.cumsum(known)[strings] - 1]
        return kind, number

    def block_tables(self, numbers: Array) -> Array:
        """Return a hash (u8) of each jump table; `numbers`: of blocks, shared by matched ones."""
        graph = self.graph
        starts, first = np.unique(graph.block_address, return_index=True)
        place, there = find(starts, graph.table_target)
        value = np.full(len(place), -1, np.int64)
        value[there] = numbers[first[place[there]]]
        step = np.arange(len(value)) - np.repeat(
            graph.table_entries[:-1], np.diff(graph.table_entries)
        )
        mixed = mix(mix(value.astype(np.uint64)) + step.astype(np.uint64) * _STEP)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        found: Array = sums[graph.table_entries[1:]] - sums[graph.table_entries[:-1]]
        return found


class Memory:
    """The data of a program: where it ends, its names and its bytes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.word = graph.bits // 8
        self.begin = graph.data_address
        sizes = np.asarray([len(one) for one in graph.data], np.uint64)
        self.end = self.begin + sizes
        self.linker = np.asarray(
            [name.startswith((".got", ".plt")) for name in graph.data_name], bool
        )
        named = ~member(graph.symbol_address, graph.function_address)
        self.symbol = np.flatnonzero(named)
        self.symbol = self.symbol[np.argsort(graph.symbol_address[self.symbol], kind="stable")]
        self.starts = graph.symbol_address[self.symbol]
        self.code = distinct(graph.block_address)
        tables = graph.table_address + graph.table_size.astype(np.uint64)
        self.bounds = distinct(
            self.begin, self.end, self.starts, graph.table_address, tables, graph.pointer_target
        )
        """u8, ascending: where something else may begin."""

    def end_at(self, addresses: Array) -> None:
        """Let data end at some addresses."""
        self.bounds = distinct(self.bounds, addresses)

    def section(self, address: Array) -> Array:
        """Return the numbers of the sections that hold some addresses; -1: none."""
        if not len(self.begin):
            return np.full(len(address), -1, np.int64)
        at = np.searchsorted(self.begin, address, side="right") - 1
        return np.where((at >= 0) & (address < self.end[at]), at, -1)

    def linked_at(self, address: Array) -> Array:
        """Return which addresses lie in what a linker fills in an order of its own: bool."""
        at = self.section(address)
        return (at >= 0) & self.linker[at] if len(self.linker) else np.zeros(len(at), bool)

    def holds(self, address: Array) -> Array:
        """Return which addresses are data, also of what is not in the file: bool.

        That lies behind a section of data, before the code that comes next.
        """
        if not len(self.begin):
            return np.zeros(len(address), bool)
        at = np.searchsorted(self.begin, address, side="right") - 1
        place = np.searchsorted(self.code, address, side="right") - 1
        nearest = self.code[place] if len(self.code) else np.zeros(len(address), np.uint64)
        code = (place >= 0) & (nearest > self.begin[at])
        found: Array = (at >= 0) & ~(code & (address >= self.end[at]))
        return found & ~self.linked_at(address)

    def values(self, address: Array, width: Array) -> tuple[Array, Array]:
        """Return the numbers (u8) of 1 to 8 bytes at addresses, and which are in the file."""
        found, there = np.zeros(len(address), np.uint64), np.zeros(len(address), bool)
        section = self.section(address)
        for number in distinct(section[section >= 0]).tolist():
            content = self.graph.data[number]
            rows = np.flatnonzero(section == number)
            place = (address[rows] - self.begin[number]).astype(np.int64)
            there[rows] = place + width[rows] <= len(content)
            cells = content[np.minimum(place[:, None] + np.arange(8), len(content) - 1)]
            cells[np.arange(8) >= width[rows][:, None]] = 0
            found[rows] = cells.view("<u8")[:, 0]
        return found, there

    def names(self, address: Array) -> tuple[Array, Array]:
        """Return the symbol (i8, -1: none) that each address is in, and how far (i8)."""
        if not len(self.starts):
            return np.full(len(address), -1, np.int64), np.zeros(len(address), np.int64)
        first = np.searchsorted(self.starts, address, side="right") - 1
        first = np.searchsorted(self.starts, self.starts[np.maximum(first, 0)])
        symbol = self.symbol[first]
        inside = (address - self.starts[first]).astype(np.int64)
        size = self.graph.symbol_size[symbol].astype(np.int64)
        there = (address >= self.starts[first]) & (inside < np.maximum(size, 1))
        return np.where(there, symbol, -1), inside

    def room(self, address: Array) -> Array:
        """Return how many bytes lie at addresses before something else may begin: (n,) i8."""
        at = np.searchsorted(self.bounds, address, side="right")
        bound = np.append(self.bounds, np.uint64((1 << 64) - 1))[at]
        symbol, inside = self.names(address)
        size = self.graph.symbol_size[symbol].astype(np.int64) if len(self.starts) else inside
        return np.where(
            (symbol >= 0) & (size > inside), size - inside, (bound - address).astype(np.int64)
        )

    def read(self, address: int, size: int) -> Array:
        """Return up to so many bytes at an address; none where none are in the file."""
        number = int(self.section(np.asarray([address], np.uint64))[0])
        if number < 0:
            return np.zeros(0, np.uint8)
        place = address - int(self.begin[number])
        return self.graph.data[number][place : place + size]


class Compared:
    """The operands of two programs, which are the same where they refer to the same thing."""

    def __init__(self, a: References, b: References, names: bool) -> None:
        """`names`: whether symbols of data say what it is."""
        self.sides = a, b
        self.named = names
        self.pointers = a.kinds_of_pointers(), b.kinds_of_pointers()
        self.unverified = 0
        """Data without a name or content, also used where nothing could be compared."""
        self._partner: tuple[Array, Array] | None = None
        """Data of A without a name (u8, ascending), and its partner in B."""

    def number(self, functions: tuple[Array, Array], blocks: tuple[Array, Array]) -> None:
        """Give functions and blocks numbers (i8), which matched ones share."""
        self.functions, self.blocks = functions, blocks
        self.tables = [one.block_tables(b) for one, b in zip(self.sides, blocks, strict=True)]

    def pair(self, match: Array, block: Array, one: Array, other: Array) -> Pairs:
        """Return the operands of pairs of blocks (one, other) that have equally many."""
        begin_a, begin_b = self.sides[0].begin, self.sides[1].begin
        sizes = begin_a[one + 1] - begin_a[one]
        return Pairs(
            np.repeat(match, sizes),
            np.repeat(block, sizes),
            expand(begin_a[one], sizes),
            expand(begin_b[other], sizes),
        )

    def equal(self, pairs: Pairs) -> Array:
        """Return which pairs of operands refer to the same: (N,) bool.

        Data without a name is matched by the first call.
        """
        a, b = self.sides
        kind, other = a.kind[pairs.a], b.kind[pairs.b]
        return self._same((kind, a.number[pairs.a]), (other, b.number[pairs.b])) | self._same_data(
            pairs, kind, other
        )

    def _same(self, one: tuple[Array, Array], other: tuple[Array, Array]) -> Array:
        """Return which things are the same and no data, by their kinds and numbers: bool."""
        same = np.zeros(len(one[0]), bool)
        both = one[0] == other[0]
        for kind, values in (
            (FUNCTION, self.functions), (CODE, self.blocks), (TABLE, self.tables)
        ):  # fmt: skip
            rows = np.flatnonzero(both & (one[0] == kind))
            same[rows] = values[0][one[1][rows]] == values[1][other[1][rows]]
        rows = np.flatnonzero(both & np.isin(one[0], (IMPORT, STRING)))
        same[rows] = one[1][rows] == other[1][rows]
        # A library that is linked statically in one of the programs.
        for first, second, side in ((one, other, 0), (other, one, 1)):
            rows = np.flatnonzero((first[0] == FUNCTION) & (second[0] == IMPORT))
            if len(rows) and self.named:
                names = self.sides[side].graph.function_name
                called = hash_texts([names[i] for i in first[1][rows].tolist()])
                same[rows] = called.view(np.int64) == second[1][rows]
        return same

    def _same_data(self, pairs: Pairs, kind: Array, other: Array) -> Array:
        """Return which pairs of operands refer to the same data: (N,) bool."""
        a, b = self.sides
        found = np.zeros(len(kind), bool)
        rows = np.flatnonzero((kind == other) & ((kind == DATA) | (kind == UNKNOWN)))
        width = a.width[pairs.a[rows]]
        alike = width == b.width[pairs.b[rows]]
        rows, width = rows[alike], width[alike]
        addresses = a.address[pairs.a[rows]], b.address[pairs.b[rows]]
        ranked = [numbered(one) for one in addresses]
        different = max(len(ranked[1][0]), 1)
        key = (ranked[0][1] * different + ranked[1][1]) * 256 + np.maximum(width, 0)
        keys, first, number = np.unique(key, return_index=True, return_inverse=True)
        one, two, wide = addresses[0][first], addresses[1][first], width[first]
        constant = self._constant(0, one) & self._constant(1, two)
        content = self._same_content(one, two, wide)
        named, same_name = self._same_names(one, two)
        # How many matched functions have the two at the same place.
        users = distinct(
            number.reshape(-1) * (int(pairs.match.max(initial=0)) + 1) + pairs.match[rows]
        )
        votes = np.bincount(users // (int(pairs.match.max(initial=0)) + 1), minlength=len(keys))
        free = np.flatnonzero(~constant & ~named)
        if self._partner is None:
            shift = (two - one).astype(np.int64)
            values, counts = np.unique(shift[free], return_counts=True)
            common = shift == (values[counts.argmax()] if len(values) else 0)
            score = votes + CONTENT * content + SHIFT * common
            self._partner = _partners(one[free], two[free], score[free])
            self._count_unverified(pairs, rows, one[free], two[free])
        place, known = find(self._partner[0], one)
        best = np.zeros(len(keys), bool)
        best[known] = self._partner[1][place[known]] == two[known]
        same = np.where(constant, content, np.where(named, same_name, best & content))
        found[rows] = same[number.reshape(-1)]
        return found

    def _constant(self, side: int, address: Array) -> Array:
        memory = self.sides[side].memory
        at = memory.section(address)
        return (at >= 0) & memory.graph.data_constant[at] if len(memory.begin) else at >= 0

    def _same_names(self, one: Array, other: Array) -> tuple[Array, Array]:
        """Return which pairs of addresses lie in data with names, and which in the same: bool."""
        if not self.named:
            return np.zeros(len(one), bool), np.zeros(len(one), bool)
        texts, offsets = [], []
        for side, address in zip(self.sides, (one, other), strict=True):
            symbol, inside = side.memory.names(address)
            names = side.graph.symbol_name
            texts.append([names[i] if i >= 0 else "" for i in symbol.tolist()])
            offsets.append(inside)
        both = np.asarray(
            [bool(a and b) and not (NUMBERED.search(a) or NUMBERED.search(b))
             for a, b in zip(*texts, strict=True)], bool,
        )  # fmt: skip
        same = np.asarray([a == b for a, b in zip(*texts, strict=True)], bool)
        return both, same & (offsets[0] == offsets[1])

    def _same_content(self, one: Array, other: Array, width: Array) -> Array:
        """Return which pairs of addresses have the same bytes, as far as both are in the file."""
        memories = [side.memory for side in self.sides]
        same = np.zeros(len(one), bool)
        short = np.flatnonzero((width > 0) & (width <= 8))
        (left, in_a), (right, in_b) = (
            memory.values(address[short], width[short])
            for memory, address in zip(memories, (one, other), strict=True)
        )
        same[short] = (left == right) & (in_a == in_b)
        rest = np.flatnonzero((width <= 0) | (width > 8))
        rooms = [
            memory.room(address[rest])
            for memory, address in zip(memories, (one, other), strict=True)
        ]
        size = np.where(width[rest] > 0, width[rest], np.minimum(*rooms))
        # Words that hold addresses are compared by what is there.
        holds = np.zeros(len(rest), bool)
        for side, address in zip(self.sides, (one, other), strict=True):
            places = side.graph.pointer_address
            stop = address[rest] + size.astype(np.uint64)
            holds |= np.searchsorted(places, stop) > np.searchsorted(places, address[rest])
        rows = zip(
            rest.tolist(), one[rest].tolist(), other[rest].tolist(), size.tolist(),
            holds.tolist(), strict=True,
        )  # fmt: skip
        for row, a, b, length, pointed in rows:
            first, second = memories[0].read(a, length), memories[1].read(b, length)
            if pointed:
                same[row] = self._same_with_pointers(a, b, first, second)
            else:
                same[row] = first.tobytes() == second.tobytes()
        return same

    def _same_with_pointers(self, a: int, b: int, first: Array, second: Array) -> bool:
        """Return whether two runs of bytes that hold addresses are the same."""
        if len(first) != len(second):
            return False
        sides = []
        word = self.sides[0].memory.word
        for side, address, content in zip(self.sides, (a, b), (first, second), strict=True):
            places = side.graph.pointer_address
            low, high = np.searchsorted(places, [address, address + len(content)]).tolist()
            at = (places[low:high] - np.uint64(address)).astype(np.int64)
            bare = content.copy()
            cells = at[:, None] + np.arange(side.memory.word)
            bare[cells[cells < len(bare)]] = 0
            sides.append((at, bare, slice(low, high)))
        (at_a, bare_a, in_a), (at_b, bare_b, in_b) = sides
        if self.sides[1].memory.word != word or not np.array_equal(at_a, at_b):
            return False
        if not np.array_equal(bare_a, bare_b):
            return False
        one, other = (
            (kind[inside], number[inside])
            for (kind, number), inside in zip(self.pointers, (in_a, in_b), strict=True)
        )
        same = self._same(one, other)
        # Other data is compared where it is used.
        same |= (one[0] == other[0]) & np.isin(one[0], (DATA, UNKNOWN))
        return bool(same.all())

    def _count_unverified(self, pairs: Pairs, rows: Array, one: Array, other: Array) -> None:
        """Count data that only its use can tell, some of which was not compared."""
        doubtful = np.zeros(len(one), bool)
        for side, address, used in (
            (self.sides[0], one, pairs.a[rows]), (self.sides[1], other, pairs.b[rows])
        ):  # fmt: skip
            compared = np.zeros(len(side.address), bool)
            compared[used] = True
            elsewhere = distinct(side.address[~compared])
            empty = side.memory.section(address) < 0
            doubtful |= empty & member(address, elsewhere)
        self.unverified = len(distinct(one[doubtful]))


def _partners(one: Array, other: Array, score: Array) -> tuple[Array, Array]:
    """Return the pairs of addresses that are matched, the best first, by those of A."""
    (first, a), (second, b) = numbered(one), numbered(other)
    pair, where = np.unique(a * max(len(second), 1) + b, return_inverse=True)
    # The same place may be read in several widths.
    total = np.zeros(len(pair))
    np.maximum.at(total, where.reshape(-1), score)
    a, b = np.divmod(pair, max(len(second), 1))
    chosen = greedy(a, b, total, least=0)
    return first[a[chosen]], second[b[chosen]]


def compare(
    compared: Compared,
    alone: tuple[Array, Array],
    found: Matched,
    blocks: BlockMatches,
    rows: Array,
) -> tuple[Changes, int]:
    """Return the operands that differ in pairs of blocks with the same shape.

    Args:
        compared: the operands of both programs.
        alone: a hash of each function without the functions it leads to, (F,) u8 of each program.
        found: the matches of functions.
        blocks: those of their blocks.
        rows: i8, ascending: the pairs of blocks.

    Also returns `Compared.unverified`.
    """
    graphs = [side.graph for side in compared.sides]
    match, one, other = blocks.match[rows], blocks.a[rows], blocks.b[rows]
    pairs = compared.pair(match, rows, one, other)
    same = compared.equal(pairs)
    _accept_twins(compared, alone, pairs, same)
    slots = compare_slots(*graphs, match, rows, one, other)
    odd, moved = np.flatnonzero(~same), np.flatnonzero(~slots.same)
    old, new = (
        [
            *texts_of(side, operands[odd]),
            *(slot_text(side.graph, i) for i in places[moved].tolist()),
        ]
        for side, operands, places in zip(
            compared.sides, (pairs.a, pairs.b), (slots.a, slots.b), strict=True
        )
    )
    at = [
        addresses_of(
            side.graph,
            np.concatenate([side.row[operands[odd]], side.graph.slot_place[places[moved]]]),
        )
        for side, operands, places in zip(
            compared.sides, (pairs.a, pairs.b), (slots.a, slots.b), strict=True
        )
    ]
    of, block = (
        np.concatenate([getattr(pairs, name)[odd], getattr(slots, name)[moved]])
        for name in ("match", "block")
    )
    order = np.lexsort((at[0], of))
    places = order.tolist()
    return (
        Changes(
            of[order], block[order], at[0][order], at[1][order],
            [old[i] for i in places], [new[i] for i in places],
        ),
        compared.unverified,
    )  # fmt: skip


def _accept_twins(
    compared: Compared, alone: tuple[Array, Array], pairs: Pairs, same: Array
) -> None:
    """Let functions count as the same that are not matched, but do the same in all respects.

    Of several equal functions it is not known which one is which.
    """
    a, b = compared.sides
    rows = np.flatnonzero(~same & (a.kind[pairs.a] == FUNCTION) & (b.kind[pairs.b] == FUNCTION))
    one, other = a.number[pairs.a[rows]], b.number[pairs.b[rows]]
    equal = alone[0][one] == alone[1][other]
    names = a.graph.function_name, b.graph.function_name
    if compared.named:
        equal &= np.asarray(
            [not (names[0][i] and names[1][j]) or names[0][i] == names[1][j]
             for i, j in zip(one.tolist(), other.tolist(), strict=True)], bool,
        )  # fmt: skip
    rows, one, other = rows[equal], one[equal], other[equal]
    width = len(names[1]) + 1
    key = one * width + other
    twins = distinct(key)
    one, other = np.divmod(twins, width)
    sizes = np.diff(a.graph.function_blocks)[one]
    fits = sizes == np.diff(b.graph.function_blocks)[other]
    twins, one, other, sizes = twins[fits], one[fits], other[fits], sizes[fits]
    number = np.repeat(np.arange(len(twins)), sizes)
    blocks = (
        expand(a.graph.function_blocks[one], sizes),
        expand(b.graph.function_blocks[other], sizes),
    )
    fits = np.diff(a.begin)[blocks[0]] == np.diff(b.begin)[blocks[1]]
    good = np.ones(len(twins), bool)
    good[number[~fits]] = False
    inside = compared.pair(number[fits], number[fits], blocks[0][fits], blocks[1][fits])
    right = compared.equal(inside)
    slots = compare_slots(
        a.graph, b.graph, number[fits], number[fits], blocks[0][fits], blocks[1][fits]
    )
    good[slots.match[~slots.same]] = False
    # A twin may lead to another one, as long as that is one.
    calls = (a.kind[inside.a] == FUNCTION) & (b.kind[inside.b] == FUNCTION) & ~right
    good[inside.match[~right & ~calls]] = False
    led = a.number[inside.a[calls]] * width + b.number[inside.b[calls]]
    caller = inside.match[calls]
    while True:
        wrong = distinct(caller[~member(led, twins[good])])
        if not good[wrong].any():
            break
        good[wrong] = False
    same[rows] = member(key, twins[good])


def addresses_of(graph: Graph, rows: Array) -> Array:
    """Return the addresses (u8) of some instructions."""
    block = np.searchsorted(graph.block_instructions, rows, side="right") - 1
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(graph.lengths, dtype=np.int64)])
    inside = begins[rows] - graph.block_bytes[block]
    found: Array = graph.block_address[block] + inside.astype(np.uint64)
    return found


def texts_of(side: References, operands: Array) -> list[str]:
    """Return what operands refer to, in words."""
    graph = side.graph
    slots = dict(zip(graph.import_slot.tolist(), graph.import_slot_name, strict=True))
    slots |= dict(zip(graph.import_address.tolist(), import_names(graph), strict=True))
    symbol, inside = side.memory.names(side.address[operands])
    found = []
    rows = zip(
        side.kind[operands].tolist(), side.number[operands].tolist(), side.text[operands].tolist(),
        side.address[operands].tolist(), side.width[operands].tolist(), symbol.tolist(),
        inside.tolist(), strict=True,
    )  # fmt: skip
    for kind, number, text, address, width, name, offset in rows:
        if kind == FUNCTION:
            found.append(graph.function_name[number] or f"sub_{address:x}")
        elif kind == IMPORT:
            found.append(slots[address].partition("@")[0])
        elif kind == STRING:
            found.append(f'"{graph.strings[text]}"')
        elif name >= 0:
            found.append(graph.symbol_name[name] + (f"+{offset:#x}" if offset else ""))
        else:
            found.append(_data_text(side.memory, kind, address, width))
    return found


def _data_text(memory: Memory, kind: int, address: int, width: int) -> str:
    """Return data without a name in words: its address and first bytes, or a short string."""
    what = {TABLE: "jump table", CODE: "code"}.get(kind, "data")
    size = width if width > 0 else int(memory.room(np.asarray([address], np.uint64))[0])
    content = memory.read(address, min(size, SHOWN)).tobytes() if kind == DATA else b""
    if not content.strip(b"\0"):
        return f"{what} at {address:x}"
    head, zero, _ = content.partition(b"\0")
    if zero and width <= 0 and head.isascii() and head.decode().isprintable():
        return f'"{head.decode()}"'
    return f"{what} at {address:x} ({content.hex(' ')})"
