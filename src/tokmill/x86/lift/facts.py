"""What the blocks of a graph refer to: imports, strings, constants, data, worked out in columns."""

from __future__ import annotations

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import Program
from tokmill.x86.image.ranges import distinct, expand, member, offsets
from tokmill.x86.image.strings import (
    FEWEST,
    LONGEST_COUNTED,
    counted_strings,
    has_counted_strings,
    strings_at,
)
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.decode import LONGEST as LONGEST_INSTRUCTION
from tokmill.x86.lift.operands import FRAME, NO_REGISTER, STACK, Operands, operands

AT_ONCE = 1 << 18
"""Instructions of the functions that are looked at together, unless one function is larger."""
NEAR = 16
"""Bytes from the place that 32-bit code adds a distance to, to reach its global offset table."""
LINKED = (".got", ".plt")
"""Beginnings of the names of sections that a linker fills in an order of its own."""


def add_facts(graph: Graph, program: Program) -> None:
    """Set the columns of imports, strings, constants, references and pointers of a graph."""
    _set_imports(graph, program)
    finder = _Finder(graph, program)
    parts = [finder.look(first, last) for first, last in _portions(graph)]
    constant, constants, address, addresses, length = (
        np.concatenate([part[i] for part in parts]) for i in range(5)
    )
    graph.constant, graph.block_constants = constant, offsets(constants)
    numbers: dict[str, int] = {}
    texts = _texts(program, address, length)
    number = [-1 if text is None else numbers.setdefault(text, len(numbers)) for text in texts]
    found = np.asarray(number, np.int64)
    owner = np.repeat(np.arange(len(addresses)), addresses)[found >= 0]
    graph.string, graph.strings = found[found >= 0].astype(np.uint32), list(numbers)
    graph.block_strings = offsets(np.bincount(owner, minlength=len(addresses)))
    refers = (found < 0) & (in_data(program, address) | member(address, graph.function_address))
    owner = np.repeat(np.arange(len(addresses)), addresses)[refers]
    graph.reference = address[refers]
    graph.block_references = offsets(np.bincount(owner, minlength=len(addresses)))
    graph.facts = True
    add_pointers(graph, program)


def _texts(program: Program, address: Array, length: Array) -> list[str | None]:
    """Return the string at each address (u8), if there is one, where `length` (i8) may be its."""
    if not len(address):
        return []
    if has_counted_strings(program):
        # What looks like a string of C is many of them, side by side.
        counted = counted_strings(program, address, length)
        return [counted.get(key) for key in zip(address.tolist(), length.tolist(), strict=True)]
    known = strings_at(program, distinct(address))
    return [known.get(at) for at in address.tolist()]


def _set_imports(graph: Graph, program: Program) -> None:
    """Name where calls and jumps of imports lead: stubs, slots, and functions that are stubs."""
    names = dict(zip(program.import_address.tolist(), program.import_name, strict=True))
    slots = program.slot_full_name or program.slot_name
    slot_name = dict(zip(program.slot_address.tolist(), slots, strict=True))
    leads = np.isin(graph.edge_kind, (Edge.CALL, Edge.JUMP))
    leads &= member(graph.edge_target, program.slot_address)
    for slot in distinct(graph.edge_target[leads]).tolist():
        names.setdefault(slot, slot_name[slot])
    # A function that does nothing but jump through a slot: so PE files import.
    first = graph.function_blocks[:-1]
    single = np.flatnonzero(np.diff(graph.function_blocks) == 1)
    block = first[single]
    short = np.diff(graph.block_instructions)[block] <= 2
    edge = graph.block_edges[block]
    short &= graph.block_edges[block + 1] == edge + 1
    single, edge = single[short], edge[short]
    thunk = leads[edge] & (graph.edge_kind[edge] == Edge.JUMP)
    address, target = graph.function_address[single[thunk]], graph.edge_target[edge[thunk]]
    for stub, slot in zip(address.tolist(), target.tolist(), strict=True):
        names.setdefault(stub, slot_name[slot])
    ordered = sorted(address for address, name in names.items() if name)
    graph.import_address = np.asarray(ordered, np.uint64)
    graph.import_name = [names[address] for address in ordered]


def _portions(graph: Graph) -> list[tuple[int, int]]:
    """Return ranges of functions with some hundred thousand instructions; one function at least."""
    ends = graph.block_instructions[graph.function_blocks[1:]]
    found, first = [(0, 0)], 0
    while first < len(ends):
        done = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, done + AT_ONCE, side="right")), first + 1)
        found.append((first, last))
        first = last
    return found


def _lengths(found: Operands, block: Array) -> Array:
    """Return for each instruction the number that one beside it moves somewhere: (n,) i8.

    One of the two after it, else one of the two before it, of the same block; 0 if none does, or
    if no string is so long.
    """
    moves = (found.map == 0) & (found.immediate_size == 4)
    moves &= ((found.opcode & 0xF8) == 0xB8) | (found.opcode == 0xC7)
    moves &= (found.immediate >= FEWEST) & (found.immediate <= LONGEST_COUNTED)
    value = np.where(moves, found.immediate, 0)
    length = np.zeros(len(value), np.int64)
    for step in (1, 2):
        beside = np.zeros(len(value), np.int64)
        same = block[:-step] == block[step:]
        beside[:-step] = np.where(same, value[step:], 0)
        length = np.where(length == 0, beside, length)
    for step in (1, 2):
        beside = np.zeros(len(value), np.int64)
        same = block[:-step] == block[step:]
        beside[step:] = np.where(same, value[:-step], 0)
        length = np.where(length == 0, beside, length)
    return length


class _Finder:
    """Reads the numbers in the instructions of one program, some functions at a time."""

    def __init__(self, graph: Graph, program: Program) -> None:
        self.graph, self.program = graph, program
        linked = any(s.execute and s.linked is not s.data for s in program.sections)
        self.code = Code(program) if linked else None
        """Where the bytes of blocks are not what the program runs."""
        self.low = np.uint64(min(section.address for section in program.sections))
        top = max(program.top, *(section.stop for section in program.sections))
        self.top = np.uint64(min(top, (1 << 64) - 1))
        # A program that may lie anywhere has no addresses in its instructions.
        self.fixed = program.fixed or program.kind == "relocatable"

    def look(self, first: int, last: int) -> tuple[Array, Array, Array, Array, Array]:
        """Return constants (i8), how many each block has, addresses (u8), and how many.

        The last column (i8) is for each address the number that may be the length of what lies
        there, 0 if there is none. All are those of the blocks of the functions from `first` to
        before `last`, in order of instructions.
        """
        graph = self.graph
        blocks = slice(*graph.function_blocks[[first, last]].tolist())
        count = np.diff(graph.block_instructions[blocks.start : blocks.stop + 1])
        low, high = graph.block_instructions[[blocks.start, blocks.stop]].tolist()
        length = graph.lengths[low:high]
        data = self._bytes(blocks)
        start = offsets(length.astype(np.int64))[:-1]
        found = operands(data, start, length, graph.bits)
        block = np.repeat(np.arange(len(count)), count)
        begin = np.repeat(graph.block_address[blocks], count)
        within = start - np.repeat(start[np.cumsum(count) - count], count) if len(count) else start
        end = begin + (within + length).astype(np.uint64)
        function = np.repeat(
            np.arange(last - first), np.diff(graph.function_blocks[first : last + 1])
        )[block]
        displaced, disp_constant, disp_address = self._displacements(found, end, function)
        used, number_constant, number_address = self._immediates(found, end)
        # Of an instruction the displacement comes first, as in its bytes.
        value = np.stack([found.displacement, found.immediate], axis=1)
        constant = np.stack([disp_constant, number_constant], axis=1)
        address = np.stack([displaced, used], axis=1)
        is_address = np.stack([disp_address, number_address], axis=1)
        blocks_of = np.stack([block, block], axis=1)
        return (
            value[constant],
            np.bincount(blocks_of[constant], minlength=len(count)),
            address[is_address],
            np.bincount(blocks_of[is_address], minlength=len(count)),
            np.repeat(_lengths(found, block), is_address.sum(axis=1)),
        )

    def _bytes(self, blocks: slice) -> Array:
        """Return the bytes of blocks as they are run, and some after them."""
        graph = self.graph
        low, high = graph.block_bytes[[blocks.start, blocks.stop]].tolist()
        data = graph.code[low:high]
        if self.code is not None:
            sizes = np.diff(graph.block_bytes[blocks.start : blocks.stop + 1])
            data = self.code.linked[expand(self.code.offset(graph.block_address[blocks]), sizes)]
        return np.concatenate([data, np.zeros(LONGEST_INSTRUCTION + 1, np.uint8)])

    def _in_program(self, address: Array) -> Array:
        found: Array = (address >= self.low) & (address < self.top)
        return found

    def _displacements(
        self, found: Operands, end: Array, function: Array
    ) -> tuple[Array, Array, Array]:
        """Return the addresses (u8) that displacements give, which are constants, which addresses.

        An address of the program may also be a displacement with registers, the place of a table,
        or in 32-bit code the distance from the global offset table.
        """
        mask = np.uint64((1 << 64) - 1 if self.program.word == 8 else 0xFFFFFFFF)
        value = found.displacement.astype(np.uint64)
        address = np.where(found.relative, end + value, value) & mask
        wide = found.size >= 4
        known = wide & (found.relative | (self._in_program(address) & self.fixed))
        if self.graph.bits == 32 and self.program.global_offset_table:
            based = (value + np.uint64(self.program.global_offset_table)) & mask
            far = wide & ~known & (found.base != NO_REGISTER) & (found.base != STACK)
            far &= self._in_program(based) & (based > self.low)
            address[far] = based[far]
            known |= far
        stack = (found.base == STACK) | ((found.base == FRAME) & self._framed(found, function))
        # A displacement of 0 is one that the operand's form demands.
        constant = (found.size > 0) & (found.displacement != 0) & ~known & ~stack
        return address, constant, known

    def _framed(self, found: Operands, function: Array) -> Array:
        """Return for each instruction whether its function has a frame pointer: bool.

        It has one where RBP is set from RSP: `mov rbp, rsp`, `lea rbp, [rsp + …]`.
        """
        one = found.map == 0
        sets = one & (found.opcode == 0x89) & (found.first == STACK) & (found.second == FRAME)
        sets |= one & (found.opcode == 0x8B) & (found.first == FRAME) & (found.second == STACK)
        sets |= one & (found.opcode == 0x8D) & (found.first == FRAME) & (found.base == STACK)
        sets |= one & (found.opcode == 0xC8)
        framed = np.zeros(int(function[-1]) + 1 if len(function) else 0, bool)
        framed[function[sets]] = True
        return framed[function]

    def _immediates(self, found: Operands, end: Array) -> tuple[Array, Array, Array]:
        """Return what `_displacements` does, of immediates."""
        mask = np.uint64((1 << 64) - 1 if self.program.word == 8 else 0xFFFFFFFF)
        address = found.immediate.astype(np.uint64)
        group = (found.map == 0) & ((found.opcode & 0xFC) == 0x80)
        middle = found.form >> 3 & 7
        # Sums and pointers may be addresses, products and masks are none.
        logic = group & np.isin(middle, (1, 4, 6))
        logic |= (found.map == 0) & np.isin(found.opcode, (0x0D, 0x25, 0x35, 0x69, 0xA9))
        logic |= (found.map == 0) & (found.opcode == 0xF7)
        known = (found.immediate_size >= 4) & ~logic & self.fixed
        # Of 32-bit numbers in 64-bit code both signs are looked at: `mov` keeps the bits.
        address = np.where(found.immediate_size == 4, address & np.uint64(0xFFFFFFFF), address)
        known &= self._in_program(address & mask)
        constant = (found.immediate_size > 0) & ~known
        constant &= ~(group & (found.second == STACK))
        if self.graph.bits == 32 and self.program.global_offset_table:
            constant &= ~self._reaches_table(found, end, group & (middle == 0))
        return address, constant, known

    def _reaches_table(self, found: Operands, end: Array, adds: Array) -> Array:
        """Return which instructions add the distance from themselves to the global offset table."""
        adds = (adds | ((found.map == 0) & (found.opcode == 0x05))) & (found.immediate_size == 4)
        place = (end + found.immediate.astype(np.uint64)) & np.uint64(0xFFFFFFFF)
        away = place - np.uint64(self.program.global_offset_table) + np.uint64(NEAR)
        near: Array = adds & (away < np.uint64(2 * NEAR))
        return near


def add_pointers(graph: Graph, program: Program) -> None:
    """Set the columns of the pointers of a program's graph."""
    address, target = _words(program)
    kept = in_data(program, address)
    kept &= member(target, graph.function_address) | in_data(program, target)
    # The table of a damaged file may name a place twice.
    address, first = np.unique(address[kept], return_index=True)
    target = target[kept][first]
    if not len(graph.function_address):
        return
    texts: dict[int, str] = {}
    if not has_counted_strings(program):
        texts = strings_at(program, distinct(target))
    graph.pointer_address, graph.pointer_target = address, target
    graph.pointer_text = [texts.get(at, "") for at in target.tolist()]


def in_data(program: Program, addresses: Array) -> Array:
    """Return which addresses (u8) are data of the program, also data that is not in the file.

    What a linker fills in an order of its own does not count.
    """
    found = np.zeros(len(addresses), bool)
    last = max((section.stop for section in program.sections), default=0)
    if program.top > last:
        found = (addresses >= np.uint64(last)) & (addresses < np.uint64(program.top))
    for section in program.sections:
        if not (section.execute or section.name.startswith(LINKED)):
            found |= addresses - np.uint64(section.address) < np.uint64(len(section.data))
    return found


def _words(program: Program) -> tuple[Array, Array]:
    """Return addresses and values (u8) of the words that may be pointers.

    A program that may lie anywhere has relocations for its pointers. In one with a fixed address
    every aligned word may be one.
    """
    if not (program.fixed or program.kind == "relocatable"):
        return program.pointer_address, program.load(program.pointer_address)
    word = program.word
    places, values = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    for section in program.sections:
        if section.execute:
            continue
        skip = -section.address % word
        count = max(0, (len(section.data) - skip) // word)
        words = section.linked[skip : skip + count * word].view(f"<u{word}")
        first = np.uint64(section.address + skip)
        places.append(first + np.arange(count, dtype=np.uint64) * np.uint64(word))
        values.append(words.astype(np.uint64))
    return np.concatenate(places), np.concatenate(values)
