"""What the blocks of a graph refer to: imports, strings, constants, data, worked out in columns."""

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import DIRECT, PLACES, TEXT, Edge, Graph
from tokmill.x86.image.image import (
    FEWEST,
    LONGEST_COUNTED,
    Program,
    Section,
    counted_strings,
    distinct,
    expand,
    has_counted_strings,
    member,
    numbered,
    offsets,
    strings_at,
)
from tokmill.x86.lift.code import EBX, Code
from tokmill.x86.lift.data.pointers import add_pointers
from tokmill.x86.lift.data.stack_slots import copies, depths, growth, sets_frame, slots
from tokmill.x86.lift.decode import LONGEST as LONGEST_INSTRUCTION
from tokmill.x86.lift.switches.operands import FRAME, NO_REGISTER, STACK, Operands, operands

AT_ONCE = 1 << 18
"""Instructions of the functions that are looked at together, unless one function is larger."""
NEAR = 16
"""Bytes from the place that 32-bit code adds a distance to, to reach its global offset table."""
COPIES = 3
"""How often the address of that table is followed from one register to another."""
AROUND = 64
"""Bytes from an instruction with that distance to the place, in 64-bit code of the large model."""


def add_facts(graph: Graph, program: Program) -> None:
    """Set the columns of imports, strings, constants, references and pointers of a graph."""
    _set_imports(graph, program)
    finder = _Finder(graph, program)
    parts = [finder.look(first, last) for first, last in graph.portions(AT_ONCE)]
    graph.constant, constants, address, place, length, graph.slot, graph.slot_place, size = (
        np.concatenate([part[i] for part in parts]) for i in range(8)
    )
    graph.block_constants, graph.slot_size = offsets(constants), size
    numbers: dict[str, int] = {}
    texts = _texts(program, address, length)
    number = [-1 if text is None else numbers.setdefault(text, len(numbers)) for text in texts]
    string = np.asarray(number, np.int64)
    graph.string, graph.strings = string[string >= 0].astype(np.uint32), list(numbers)
    rows = place[string >= 0] // PLACES
    graph.block_strings = np.searchsorted(rows, graph.block_instructions).astype(np.int64)
    graph.reference, graph.reference_place = address, place + TEXT * (string >= 0)
    graph.facts = True
    data = [section for section in program.sections if not (section.execute and section.name)]
    if len(program.thread_data):
        copy = program.thread_data
        data.append(Section(".tdata", program.thread.start, copy, copy, execute=False))
    graph.data, graph.data_name = [one.linked for one in data], [one.name for one in data]
    graph.data_address = np.asarray([one.address for one in data], np.uint64)
    graph.data_constant = np.asarray([one.constant for one in data], bool)
    imported = np.flatnonzero(program.slot_target == 0)
    graph.import_slot = program.slot_address[imported]
    graph.import_slot_name = [program.slot_name[row] for row in imported.tolist()]
    _set_symbols(graph, program)
    add_pointers(graph, program)


def _texts(program: Program, address: Array, length: Array) -> list[str | None]:
    """Return the string at each address (u8), if there is one, where `length` (i8) may be its."""
    if not len(address):
        return []
    if has_counted_strings(program):
        # What looks like a string of C is many of them, side by side.
        counted = counted_strings(program, address, length)
        return [counted.get(key) for key in zip(address.tolist(), length.tolist(), strict=True)]
    strings = strings_at(program, distinct(address))
    return [strings.get(at) for at in address.tolist()]


def _set_symbols(graph: Graph, program: Program) -> None:
    sizes: dict[tuple[int, str], int] = {}
    columns = program.symbol_address.tolist(), program.symbol_name, program.symbol_size.tolist()
    for address, name, size in zip(*columns, strict=True):
        if name:
            sizes[address, name] = max(size, sizes.get((address, name), 0))
    ordered = sorted(sizes)
    graph.symbol_address = np.asarray([address for address, _ in ordered], np.uint64)
    graph.symbol_size = np.asarray([sizes[key] for key in ordered], np.uint64)
    graph.symbol_name = [name for _, name in ordered]
    graph.exports = program.exports


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


def _lengths(ops: Operands, block: Array) -> Array:
    """Return for each instruction the number that one beside it moves somewhere: (n,) i8.

    One of the two after it, else one of the two before it, of the same block; 0 if none does, or
    if no string is so long.
    """
    moves = (ops.map == 0) & (ops.immediate_size == 4)
    moves &= ((ops.opcode & 0xF8) == 0xB8) | (ops.opcode == 0xC7)
    moves &= (ops.immediate >= FEWEST) & (ops.immediate <= LONGEST_COUNTED)
    value = np.where(moves, ops.immediate, 0)
    length = np.zeros(len(value), np.int64)
    for step in (1, 2, -1, -2):
        to, of = (
            (slice(-step), slice(step, None)) if step > 0 else (slice(-step, None), slice(step))
        )
        neighbour = np.zeros(len(value), np.int64)
        neighbour[to] = np.where(block[to] == block[of], value[of], 0)
        length = np.where(length == 0, neighbour, length)
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

    def look(self, first: int, last: int) -> tuple[Array, ...]:
        """Return constants (i8), how many each block has, addresses (u8) and their places.

        Then for each address the number (i8) that may be the length of what lies there, 0 if there
        is none; and `slot`, `slot_place` and `slot_size` as of a `Graph`. All are those of the
        blocks of the functions from `first` to before `last`, in order of instructions.
        """
        graph = self.graph
        blocks = slice(*graph.function_blocks[[first, last]].tolist())
        count = np.diff(graph.block_instructions[blocks.start : blocks.stop + 1])
        low, high = graph.block_instructions[[blocks.start, blocks.stop]].tolist()
        length = graph.lengths[low:high]
        data = self._bytes(blocks)
        start = offsets(length.astype(np.int64))[:-1]
        ops = operands(data, start, length, graph.bits)
        block = np.repeat(np.arange(len(count)), count)
        begin = np.repeat(graph.block_address[blocks], count)
        within = start - np.repeat(start[np.cumsum(count) - count], count) if len(count) else start
        end = begin + (within + length).astype(np.uint64)
        of_block = np.repeat(
            np.arange(last - first), np.diff(graph.function_blocks[first : last + 1])
        )
        function = of_block[block]
        framed = self._framed(ops, function)
        displaced, disp_constant, disp_address, direct = self._displacements(
            ops, end, framed, function
        )
        used, number_constant, number_address = self._immediates(ops, end)
        for size, number, places in (
            (ops.size, ops.displacement, (displaced, disp_constant, disp_address)),
            (ops.immediate_size, ops.immediate, (used, number_constant, number_address)),
        ):
            thread = self.program.thread
            uses = function[member(displaced, self.program.thread_modules)]
            for rows, origin in (
                (self._threaded(ops, size, number, block, function), thread.stop),
                (self._of_module(ops, size, number, np.isin(function, uses)), thread.start),
            ):
                places[0][rows] = np.uint64(origin) + number[rows].astype(np.uint64)
                places[1][rows], places[2][rows] = False, True
        # Of an instruction the displacement comes first, as in its bytes.
        value = np.stack([ops.displacement, ops.immediate], axis=1)
        constant = np.stack([disp_constant, number_constant], axis=1)
        address = np.stack([displaced, used], axis=1)
        is_address = np.stack([disp_address, number_address], axis=1)
        places = PLACES * (low + np.arange(len(block)))[:, None] + np.arange(2)
        places[:, 0] += DIRECT * direct
        begins = graph.function_address[first:last]
        grows = growth(ops, self.program.word if graph.bits == 32 else 8)
        depth = depths(graph, grows, blocks, begins, of_block, block)
        on_stack = (ops.base == STACK) | ((ops.base == FRAME) & framed) | copies(ops)
        return (
            value[constant],
            np.bincount(block, constant.sum(axis=1), len(count)).astype(np.int64),
            address[is_address],
            places[is_address],
            np.repeat(_lengths(ops, block), is_address.sum(axis=1)),
            *slots(ops, np.flatnonzero(on_stack), depth, function, low),
        )

    def _bytes(self, blocks: slice) -> Array:
        graph = self.graph
        low, high = graph.block_bytes[[blocks.start, blocks.stop]].tolist()
        data = graph.code[low:high]
        if self.code is not None:
            sizes = np.diff(graph.block_bytes[blocks.start : blocks.stop + 1])
            data = self.code.linked[expand(self.code.offset(graph.block_address[blocks]), sizes)]
        return np.concatenate([data, np.zeros(LONGEST_INSTRUCTION + 1, np.uint8)])

    def _in_program(self, address: Array) -> Array:
        return (address >= self.low) & (address < self.top)

    def _loaded(self, address: Array) -> Array:
        """Return which addresses lie in a section, or behind the last one: bool."""
        sections = self.program.sections
        if self.program.kind == "relocatable":
            return np.ones(len(address), bool)
        begins = np.asarray([section.address for section in sections], np.uint64)
        stops = np.asarray([section.stop for section in sections], np.uint64)
        at = np.searchsorted(begins, address, side="right") - 1
        return (at == len(begins) - 1) | (address < stops[at])

    def _displacements(
        self, ops: Operands, end: Array, framed: Array, function: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return the addresses (u8) that displacements give, which are constants, which addresses,
        and to which of these no other register is added.

        An address of the program may also be a displacement with registers, the place of a table,
        or in 32-bit code the distance from the global offset table.
        """
        mask = np.uint64((1 << 64) - 1 if self.program.word == 8 else 0xFFFFFFFF)
        value = ops.displacement.astype(np.uint64)
        address = np.where(ops.relative, end + value, value) & mask
        stack = (ops.base == STACK) | ((ops.base == FRAME) & framed)
        wide = ops.size >= 4
        is_address = wide & (ops.relative | (self._in_program(address) & self.fixed))
        direct = ~ops.indexed & (ops.base == NO_REGISTER)
        if self.graph.bits == 32 and self.program.global_offset_table:
            based = (value + np.uint64(self.program.global_offset_table)) & mask
            far = wide & ~is_address & ~stack & (ops.displacement != 0)
            far &= self._based(ops, end, stack, function)
            far &= self._in_program(based) & (based > self.low) & self._loaded(based)
            address[far] = based[far]
            is_address |= far
            direct |= far & ~ops.indexed
        # A displacement of 0 is one that the operand's form demands.
        constant = (ops.size > 0) & (ops.displacement != 0) & ~is_address & ~stack
        return address, constant, is_address, direct

    def _threaded(
        self, ops: Operands, size: Array, number: Array, block: Array, function: Array
    ) -> Array:
        """Return the rows (i8) of numbers that are the distance of thread-local data.

        They have four bytes. What reads or adds the thread pointer is near, in the same block; of
        what linkers write for loads of a distance, `mov r64, number`, in the same function.
        """
        thread = self.program.thread
        rows = np.flatnonzero((size == 4) & (number < 0) & (number >= -len(thread)))
        near = np.zeros(len(rows), bool)
        for step in (-2, -1, 1, 2) if len(rows) else ():
            other = np.clip(rows + step, 0, len(block) - 1)
            near |= ops.thread[other] & (block[other] == block[rows])
        near &= ~np.isin(ops.base[rows], (STACK, FRAME))
        near |= ops.thread[rows] & ~ops.relative[rows]
        loads = (ops.opcode[rows] == 0xC7) & (ops.second[rows] < NO_REGISTER)
        through = distinct(function[ops.thread & (ops.base < NO_REGISTER)])
        near |= loads & (number[rows] < -1) & member(function[rows], through)
        return rows[near]

    def _of_module(self, ops: Operands, size: Array, number: Array, uses: Array) -> Array:
        """Return the rows (i8) of distances in the thread-local data of a module.

        They are added to what a call returns, in functions that make it (`uses`).
        """
        near = uses & (size == 4) & (number >= 0) & (number < len(self.program.thread))
        adds = (ops.opcode == 0x05) | (ops.opcode == 0x81) & (ops.second < NO_REGISTER)
        near &= ~np.isin(ops.base, (STACK, FRAME)) & ~np.isin(ops.second, (STACK, FRAME))
        near &= (ops.base < NO_REGISTER) | (ops.map == 0) & adds
        return np.flatnonzero(near & ~ops.relative & ~ops.thread)

    def _framed(self, ops: Operands, function: Array) -> Array:
        """Return for each instruction whether its function has a frame pointer: bool.

        It has one where RBP is set from RSP.
        """
        sets = sets_frame(ops)
        framed = np.zeros(int(function[-1]) + 1 if len(function) else 0, bool)
        framed[function[sets]] = True
        return framed[function]

    def _immediates(self, ops: Operands, end: Array) -> tuple[Array, Array, Array]:
        """Return what `_displacements` does, of immediates."""
        mask = np.uint64((1 << 64) - 1 if self.program.word == 8 else 0xFFFFFFFF)
        address = ops.immediate.astype(np.uint64)
        group = (ops.map == 0) & ((ops.opcode & 0xFC) == 0x80)
        middle = ops.form >> 3 & 7
        # Sums and pointers may be addresses, products and masks are none.
        logic = group & np.isin(middle, (1, 4, 6))
        logic |= (ops.map == 0) & np.isin(ops.opcode, (0x0D, 0x25, 0x35, 0x69, 0xA9))
        logic |= (ops.map == 0) & (ops.opcode == 0xF7)
        is_address = (ops.immediate_size >= 4) & ~logic & self.fixed
        # Of 32-bit numbers in 64-bit code both signs are looked at: `mov` keeps the bits.
        address = np.where(ops.immediate_size == 4, address & np.uint64(0xFFFFFFFF), address)
        is_address &= self._in_program(address & mask)
        table = self.program.global_offset_table
        reaches = np.zeros(len(is_address), bool)
        if self.graph.bits == 64 and table:
            # `mov register, distance`, which code of the large model adds to the table's address.
            far = (ops.map == 0) & (ops.opcode & 0xF8 == 0xB8) & (ops.immediate_size == 8)
            away = np.uint64(table) - ops.immediate.astype(np.uint64) - end + np.uint64(AROUND)
            reaches = far & (away < np.uint64(2 * AROUND))
            based = (ops.immediate.astype(np.uint64) + np.uint64(table)) & mask
            far &= ~is_address & ~reaches & self._in_program(based) & (based > self.low)
            address = np.where(far, based, address)
            is_address |= far
        constant = (ops.immediate_size > 0) & ~is_address & ~reaches
        constant &= ~(group & (ops.second == STACK))
        if self.graph.bits == 32 and table:
            constant &= ~self._reaches_table(ops, end)
        return address, constant, is_address

    def _based(self, ops: Operands, end: Array, stack: Array, function: Array) -> Array:
        """Return for which instructions the base register may hold the global offset table: bool.

        It may where the function adds the distance to it, or copies it there from such a register,
        over the stack too; in a function that does not, EBX may by convention.
        """
        reaches = self._reaches_table(ops, end)
        count = int(function[-1]) + 1 if len(function) else 0
        holds = np.zeros((count, 8), bool)
        holds[:, EBX] = ~np.isin(np.arange(count), function[reaches])
        register = np.where(ops.opcode == 0x05, 0, ops.second)
        holds[function[reaches], register[reaches] & 7] = True
        stores = (ops.map == 0) & (ops.opcode == 0x89)
        loads = (ops.map == 0) & (ops.opcode == 0x8B)
        place = numbered(((function << 33) + ops.displacement + (1 << 32)).astype(np.uint64))[1]
        kept = np.zeros(len(place), bool)
        first, second = ops.first & 7, ops.second & 7
        moved = ops.second != NO_REGISTER
        for _ in range(COPIES):
            kept[place[stores & stack & holds[function, first]]] = True
            for rows, to, has in (
                (stores & moved, second, holds[function, first]),
                (loads & moved, first, holds[function, second]),
                (loads & stack, first, kept[place]),
            ):
                rows = np.flatnonzero(rows & has)
                holds[function[rows], to[rows]] = True
        return (ops.base != NO_REGISTER) & holds[function, ops.base & 7]

    def _reaches_table(self, ops: Operands, end: Array) -> Array:
        """Return which instructions add the distance from themselves to the global offset table."""
        group = np.isin(ops.opcode, (0x81, 0x83)) & (ops.form >> 3 & 7 == 0)
        adds = (ops.map == 0) & (group | (ops.opcode == 0x05)) & (ops.immediate_size == 4)
        place = (end + ops.immediate.astype(np.uint64)) & np.uint64(0xFFFFFFFF)
        away = place - np.uint64(self.program.global_offset_table) + np.uint64(NEAR)
        return adds & (away < np.uint64(2 * NEAR))
