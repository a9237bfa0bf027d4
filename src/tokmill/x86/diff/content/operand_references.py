"""What operands refer to, by what it is and not by where it lies: compared in matched blocks."""

import re
from typing import NamedTuple

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.diff.content.program_memory import Memory
from tokmill.x86.diff.match_blocks import greedy
from tokmill.x86.features.bags import hash_texts
from tokmill.x86.features.function_features import Functions, bare_name
from tokmill.x86.graph import DIRECT, IMMEDIATE, PLACES, TEXT, Graph
from tokmill.x86.image.image import distinct, expand, find, member, numbered, owners

FUNCTION, IMPORT, STRING, TABLE, CODE, DATA, UNKNOWN = range(7)
"""What lies at an address; the `.bss` of an object file is DATA or UNKNOWN, by what lies before."""
CONTENT, SHIFT = 1 << 20, 0.5
"""What equal content, and the distance that most data moved, count beside one matched function
when data without a name is matched."""
NUMBERED = re.compile(r"\.\d+$")
"""What compilers add to the names of local variables, and count anew in each compilation."""
DEPTH = 3
"""How often pointers in data that cannot be written are followed."""
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


class Operands:
    """All that the instructions and edges of one program refer to; R operands, by block."""

    def __init__(self, graph: Graph, functions: Functions, leaving: Array) -> None:
        """`leaving`: i8, the edges that count."""
        self.graph = graph
        self.memory = Memory(graph)
        # A block that several functions share is known by the first of them.
        self._starts, self._first = np.unique(graph.block_address, return_index=True)
        order = np.argsort(graph.table_address, kind="stable")
        slots = [bare_name(name) for name in graph.import_slot_name]
        named = np.asarray([name != "" for name in slots], bool)
        self._things = (
            (CODE, self._starts, self._first),
            (TABLE, graph.table_address[order], order),
            (FUNCTION, graph.function_address, np.arange(len(graph.function_address))),
            (IMPORT, graph.import_slot[named], hash_texts(slots)[named].view(np.int64)),
            (IMPORT, graph.import_address, functions.imports.view(np.int64)),
        )
        """What lies at addresses (u8, ascending), and its numbers; the last one counts."""
        rows = graph.reference_place // PLACES
        block = np.searchsorted(graph.block_instructions, rows, side="right") - 1
        edge_block = np.searchsorted(graph.block_edges, leaving, side="right") - 1
        last = graph.block_instructions[edge_block + 1] - 1
        direct = (graph.reference_place & DIRECT > 0) & (graph.reference_place & IMMEDIATE == 0)
        width = np.where(direct, np.minimum(functions.instructions.width[rows], 255), 0)
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
        self.kind, self.number = self.kinds_at(self.address)
        """(R,) i8: what lies there; which function, block or table, or a hash of a name."""
        strings = (self.text >= 0) & np.isin(self.kind, (DATA, UNKNOWN))
        # The bytes of a pointer may be printable.
        strings &= ~member(self.address, graph.pointer_address)
        self.kind[strings] = STRING
        self.number[strings] = functions.texts[self.text[strings]].view(np.int64)
        data = np.isin(self.kind, (DATA, STRING, UNKNOWN))
        self.memory.bounds = distinct(self.memory.bounds, self.address[data])

    def _through_offset_table(self) -> None:
        memory = self.memory
        here = np.flatnonzero(memory.linked_at(self.address) & (self.width >= 0))
        here = here[~member(self.address[here], self.graph.import_slot)]
        pointer, in_file = memory.values(self.address[here], np.full(len(here), memory.word))
        in_file &= pointer > 0
        here = here[in_file]
        self.address[here], self.width[here], self.text[here] = pointer[in_file], 0, -1

    def kinds_at(self, address: Array) -> tuple[Array, Array]:
        """Return what lies at addresses, as `kind` and `number`; of strings it does not know."""
        kind, number = np.full(len(address), UNKNOWN, np.int64), np.zeros(len(address), np.int64)
        kind[self.memory.holds(address)] = DATA
        for what, keys, values in self._things:
            place, there = find(keys, address)
            kind[there], number[there] = what, values[place[there]]
        return kind, number

    def kinds_of_pointers(self) -> tuple[Array, Array]:
        """Return what lies at the targets of all pointers in data, as `kind` and `number`."""
        graph = self.graph
        kind, number = self.kinds_at(graph.pointer_target)
        has_text = np.asarray([text != "" for text in graph.pointer_text], bool)
        strings = has_text & (kind == DATA) & ~member(graph.pointer_target, graph.pointer_address)
        kind[strings] = STRING
        texts = hash_texts([text for text in graph.pointer_text if text]).view(np.int64)
        number[strings] = texts[np.cumsum(has_text)[strings] - 1]
        return kind, number

    def block_tables(self, numbers: Array) -> Array:
        """Return a hash (u8) of each jump table; `numbers`: of blocks, shared by matched ones."""
        graph = self.graph
        place, there = find(self._starts, graph.table_target)
        value = np.full(len(place), -1, np.int64)
        value[there] = numbers[self._first[place[there]]]
        step = np.arange(len(value)) - graph.table_entries[owners(graph.table_entries)]
        mixed = mix(mix(value.astype(np.uint64)) + step.astype(np.uint64) * _STEP)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        return sums[graph.table_entries[1:]] - sums[graph.table_entries[:-1]]


class Compared:
    """The operands of two programs, which are the same where they refer to the same thing."""

    def __init__(self, a: Operands, b: Operands, names: bool) -> None:
        """`names`: whether symbols of data say what it is."""
        self.sides = a, b
        self.named = names
        self._names = [{"", *side.graph.symbol_name} for side in self.sides]
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
        rows = np.flatnonzero(both & ((one[0] == IMPORT) | (one[0] == STRING)))
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
        a, b = self.sides
        result = np.zeros(len(kind), bool)
        rows = np.flatnonzero((kind >= DATA) & (other >= DATA))
        width = a.width[pairs.a[rows]]
        same_width = width == b.width[pairs.b[rows]]
        rows, width = rows[same_width], width[same_width]
        addresses = a.address[pairs.a[rows]], b.address[pairs.b[rows]]
        ranked = [numbered(one) for one in addresses]
        different = max(len(ranked[1][0]), 1)
        key = (ranked[0][1] * different + ranked[1][1]) * 256 + np.maximum(width, 0)
        keys, first, number = np.unique(key, return_index=True, return_inverse=True)
        one, two, wide = addresses[0][first], addresses[1][first], width[first]
        constant = self.constant(0, one) & self.constant(1, two)
        content = self.same_content(one, two, wide)
        # What describes a whole program changes with it.
        content |= a.memory.describes_at(one) & b.memory.describes_at(two)
        named, same_name = self._same_names(one, two, wide)
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
        place, has_partner = find(self._partner[0], one)
        best = np.zeros(len(keys), bool)
        best[has_partner] = self._partner[1][place[has_partner]] == two[has_partner]
        same = np.where(constant, content, np.where(named, same_name, best & content))
        result[rows] = same[number.reshape(-1)]
        return result

    def constant(self, side: int, address: Array) -> Array:
        """Return which addresses of a program hold data that cannot be written: bool."""
        memory = self.sides[side].memory
        at = memory.section(address)
        return (at >= 0) & memory.graph.data_constant[at] if len(memory.begin) else at >= 0

    def _same_names(self, one: Array, other: Array, width: Array) -> tuple[Array, Array]:
        """Return which pairs of addresses lie in data with names, and which in the same: bool."""
        if not self.named:
            return np.zeros(len(one), bool), np.zeros(len(one), bool)
        texts, offsets = [], []
        for side, address in zip(self.sides, (one, other), strict=True):
            symbol, inside = side.memory.names(address)
            names = side.graph.symbol_name
            texts.append([names[i] if i >= 0 else "" for i in symbol.tolist()])
            offsets.append(inside)
        has_a, has_b = self._names
        # What has no name is not what has one in both programs, if it is read or written.
        both = np.asarray(
            [bool(a and b or is_used and (a or b) and a in has_b and b in has_a)
             and not (NUMBERED.search(a) or NUMBERED.search(b))
             for a, b, is_used in zip(*texts, (width > 0).tolist(), strict=True)], bool,
        )  # fmt: skip
        same = np.asarray([a == b for a, b in zip(*texts, strict=True)], bool)
        return both, same & (offsets[0] == offsets[1])

    def same_content(self, one: Array, other: Array, width: Array, *, depth: int = DEPTH) -> Array:
        """Return which pairs of addresses have the same bytes, as far as both are in the file.

        So many as `width` (i8) says, or where it is 0 as lie before something else may begin.
        `depth`: how often words in it are followed to other data.
        """
        memories = [side.memory for side in self.sides]
        same = np.zeros(len(one), bool)
        plain = (width > 0) & (width <= 8)
        for side, address in zip(self.sides, (one, other), strict=True):
            plain &= ~member(address, side.graph.pointer_address)
        short, rest = np.flatnonzero(plain), np.flatnonzero(~plain)
        (left, in_a), (right, in_b) = (
            memory.values(address[short], width[short])
            for memory, address in zip(memories, (one, other), strict=True)
        )
        same[short] = (left == right) & (in_a == in_b)
        (extent_a, exact_a), (extent_b, exact_b) = (
            memory.extent(address[rest])
            for memory, address in zip(memories, (one, other), strict=True)
        )
        whole = (width[rest] > 0) | ~(exact_a & exact_b) | (extent_a == extent_b)
        size = np.where(width[rest] > 0, width[rest], np.minimum(extent_a, extent_b))
        # Words that hold addresses are compared by what is there.
        holds = np.zeros(len(rest), bool)
        for side, address in zip(self.sides, (one, other), strict=True):
            places = side.graph.pointer_address
            stop = address[rest] + size.astype(np.uint64)
            holds |= np.searchsorted(places, stop) > np.searchsorted(places, address[rest])
        rows = zip(
            rest.tolist(), one[rest].tolist(), other[rest].tolist(), size.tolist(),
            holds.tolist(), whole.tolist(), strict=True,
        )  # fmt: skip
        for row, a, b, length, pointed, full in rows:
            first, second = memories[0].read(a, length), memories[1].read(b, length)
            if not pointed and first.tobytes() == second.tobytes():
                same[row] = full and (width[row] > 0 or self._same_strings(a, b, first))
            elif full and (pointed or not width[row]):
                same[row] = self.first_difference(a, b, first, second, depth=depth) < 0
        return same

    def first_difference(
        self, a: int, b: int, first: Array, second: Array, *, depth: int = DEPTH
    ) -> int:
        """Return where two runs of bytes (u1) at addresses begin to differ; -1: they are the same.

        Words that hold addresses are compared by what is there: data that cannot be written by its
        bytes, unless `depth` is 0; other data by its names. Without names it counts as the same: it
        is compared where it is used.
        """
        if self._same_distances(a, b, first, second, depth):
            return -1
        differences = []
        bare, holds = [], []
        for side, address, content in zip(self.sides, (a, b), (first, second), strict=True):
            places = side.graph.pointer_address
            ends = np.asarray([address, min(address + len(content), (1 << 64) - 1)], np.uint64)
            low, high = np.searchsorted(places, ends).tolist()
            at = (places[low:high] - np.uint64(address)).astype(np.int64)
            cells = at[:, None] + np.arange(side.memory.word)
            bare.append(content.copy())
            bare[-1][cells[cells < len(content)]] = 0
            holds.append((at, np.arange(low, high)))
        size = min(len(first), len(second))
        differences += np.flatnonzero(bare[0][:size] != bare[1][:size])[:1].tolist()
        if len(first) != len(second):
            differences.append(size)
        (at_a, rows_a), (at_b, rows_b) = holds
        if not len(at_a) + len(at_b):
            return min(differences, default=-1)
        differences += np.setxor1d(at_a, at_b)[:1].tolist()
        both, in_a, in_b = np.intersect1d(at_a, at_b, return_indices=True)
        one, other = (
            (kind[rows], number[rows])
            for (kind, number), rows in zip(
                self.pointers, (rows_a[in_a], rows_b[in_b]), strict=True
            )
        )
        same = self._same(one, other)
        data = np.flatnonzero((one[0] >= DATA) & (other[0] >= DATA))
        targets = [
            side.graph.pointer_target[rows[inside][data]]
            for side, rows, inside in zip(self.sides, (rows_a, rows_b), (in_a, in_b), strict=True)
        ]
        named, same_name = self._same_names(targets[0], targets[1], np.zeros(len(data), np.int64))
        same[data] = ~named | same_name
        if depth and len(data):
            fixed = self.constant(0, targets[0]) & self.constant(1, targets[1])
            same[data[fixed]] = self._same_targets(targets[0][fixed], targets[1][fixed], depth - 1)
        differences += both[~same][:1].tolist()
        return min(differences, default=-1)

    def _same_strings(self, a: int, b: int, table: Array) -> bool:
        """Return whether equal bytes lead to equal strings, if they are distances to strings."""
        if len(table) < 8 or len(table) % 4:
            return True
        first = a + int.from_bytes(table[:4].tobytes(), "little", signed=True)
        head = self.sides[0].memory.read(first - 1, 2).tobytes()
        if len(head) < 2 or head[0] or not 0x20 <= head[1] < 0x7F:
            return True
        by_side = []
        for side, address in zip(self.sides, (a, b), strict=True):
            target = table.view("<i4").astype(np.int64).astype(np.uint64) + np.uint64(address)
            texts = side.memory.strings(target)
            if texts is None:
                return True
            by_side.append(texts)
        return by_side[0] == by_side[1]

    def _same_targets(self, one: Array, other: Array, depth: int) -> Array:
        """Return which pairs of addresses have the same bytes, each pair compared once."""
        pairs, row = np.unique(np.stack([one, other]), axis=1, return_inverse=True)
        none = np.zeros(pairs.shape[1], np.int64)
        return self.same_content(pairs[0], pairs[1], none, depth=depth)[row.reshape(-1)]

    def _same_distances(self, a: int, b: int, first: Array, second: Array, depth: int) -> bool:
        """Return whether two tables hold distances (4 bytes) from themselves to the same."""
        count = min(len(first), len(second)) // 4
        if not depth or count < 2 or len(first) != len(second) or len(first) % 4:
            return False
        kinds = []
        for side, address, content in zip(self.sides, (a, b), (first, second), strict=True):
            target = content.view("<i4").astype(np.int64).astype(np.uint64) + np.uint64(address)
            kinds.append((*side.kinds_at(target), target))
        (kind, number, one), (other, second_number, two) = kinds
        same = self._same((kind, number), (other, second_number))
        same |= (one == np.uint64(a)) & (two == np.uint64(b))
        fixed = (kind == DATA) & (other == DATA) & self.constant(0, one) & self.constant(1, two)
        fixed &= ~same
        if not (same | fixed).all():
            return False
        return bool(self._same_targets(one[fixed], two[fixed], depth - 1).all())

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
            doubtful |= empty & member(address, elsewhere) | ~side.memory.holds(address)
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
