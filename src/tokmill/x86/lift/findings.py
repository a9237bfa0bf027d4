"""The knowledge of a program's code during the search: columns that all searches read.

Ranges of code belong to one function; between reached code there are gaps. Hand-written code has
constants between instructions, so places that instructions use as data are kept too.
"""

from typing import Any

import iced_x86 as iced
import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, changes, distinct, member, numbers_at
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.decode import LONGEST, PREFIX, Flow, Instructions
from tokmill.x86.lift.reach import Ways
from tokmill.x86.lift.switches.jump_tables import Table, Tables

ALIGNMENT = 16
"""Optimising compilers align functions to this."""
MOST_PADDING = 64
"""Largest number of successive padding instructions."""
JUMP = 0xEB
FILLS = (0x00, 0xCC)
"""First bytes of padding with which no function begins: zeros, INT3."""


class Ranges:
    """Ranges of code, each of one function, sorted, without overlap; R ranges."""

    def __init__(self, program: Program, instructions: Instructions) -> None:
        self.code = code = instructions.code
        unwind = program.unwind
        size = program.function_size
        sized = size > 0
        start = np.concatenate([unwind.start, program.function_address[sized]])
        stop = np.concatenate([unwind.stop, (program.function_address + size)[sized]])
        begin = code.offset(start)
        end = code.offset(stop - np.uint64(1)) + 1
        # Some ranges begin with the padding before their function.
        moved = skip_padding(instructions, begin, end)
        moves = (
            (start % ALIGNMENT != 0)
            & (code.address(moved) % ALIGNMENT == 0)
            & (moved < end)
            & (begin >= 0)
            & ~member(start, program.function_address)
        )
        begin[moves] = moved[moves]
        self.unwind_start = begin[: len(unwind.start)]
        """i8, offsets of the ranges of the unwind tables, in their order; -1: not in code."""
        keep = (begin >= 0) & (end > begin)
        begin, end = begin[keep], end[keep]
        order = np.lexsort((-end, begin))
        begin, end = begin[order], end[order]
        first = changes(begin)
        self.start = begin[first]
        """(R,) i8, offsets."""
        self.stop = end[first]
        """(R,) i8."""
        if len(self.start):
            self.stop[:-1] = np.minimum(self.stop[:-1], self.start[1:])

    def number(self, offsets: Array) -> Array:
        """Return the range of each offset; -1: none."""
        at = np.searchsorted(self.start, offsets, side="right") - 1
        if not len(self.start):
            return at
        return np.where((at >= 0) & (offsets < self.stop[at]), at, -1)

    def inside(self, offsets: Array) -> Array:
        at = self.number(offsets)
        return (at >= 0) & (offsets != self.start[at]) if len(self.start) else at >= 0

    def around(self, offsets: Array, functions: Array) -> tuple[Array, Array]:
        """Return (begin, end) of the function around each offset.

        Outside of ranges, it is from the last known function before it to the next after it.
        """
        borders = distinct(functions, self.code.edge)
        at = np.searchsorted(borders, offsets, side="right") - 1
        low, high = borders[at], borders[np.minimum(at + 1, len(borders) - 1)]
        number = self.number(offsets)
        in_range = number >= 0
        low[in_range], high[in_range] = self.start[number[in_range]], self.stop[number[in_range]]
        return low, high


def gaps(ways: Ways) -> tuple[Array, Array]:
    """Return the offsets (begin, end) of unreached code without known data, by section."""
    instructions, data = ways.instructions, ways.instructions.code.data_begin
    if "gaps" in ways.known and ways.known["gaps"][0] is data:
        return ways.known["gaps"][1]
    reached = ways.first <= ways.last
    first, last = ways.first[reached], ways.last[reached]
    code = instructions.code
    begin = np.concatenate([instructions.start[first].astype(np.int64), code.edge, code.data_begin])
    stop = instructions.start[last] + instructions.length[last].astype(np.int64)
    end = np.concatenate([stop, code.edge, code.data_end])
    order = np.lexsort((end, begin))
    begin, end = begin[order], np.maximum.accumulate(end[order])
    open_ = begin[1:] > end[:-1]
    ways.known["gaps"] = data, (end[:-1][open_], begin[1:][open_])
    return ways.known["gaps"][1]


def skip_padding(instructions: Instructions, begin: Array, end: Array) -> Array:
    """Return for each gap the offset of its first instruction after padding, or its end.

    Padding ends at an aligned place. If NOPs continue after the last aligned place, they are the
    beginning of the code, because a function may begin with NOP.
    """
    begin = np.minimum(begin, end)
    # Long padding of 32-bit code begins with a jump over the rest of it.
    data, where = instructions.code.linked, begin
    over = (begin + 2 <= end) & (data[begin] == JUMP) & (data[begin + 1] < 0x80)
    behind = begin + 2 + data[begin + 1]
    over &= (data[begin + 1] > 0) & (behind <= end)
    begin = begin + 2 * over
    open_ = np.arange(len(begin))
    aligned = np.full(len(begin), -1)
    rows = instructions.row(begin)
    for _ in range(MOST_PADDING):
        skip = (rows >= 0) & (begin[open_] < end[open_])
        skip[skip] = is_padding(instructions, rows[skip])
        open_, rows = open_[skip], rows[skip]
        if not len(open_):
            break
        here = begin[open_]
        may = np.flatnonzero(instructions.code.address(here) % ALIGNMENT == 0)
        may = may[~np.isin(opcodes(instructions, rows[may])[0], FILLS)]
        aligned[open_[may]] = here[may]
        here = begin[open_] = here + instructions.length[rows]
        rows = np.minimum(rows + 1, len(instructions.start) - 1)
        # Most often the next instruction begins where this one ends.
        apart = np.flatnonzero(instructions.start[rows] != here)
        rows[apart] = instructions.row(here[apart])
    start = np.minimum(begin, end)
    late = (aligned >= 0) & (begin < end) & (instructions.code.address(begin) % ALIGNMENT != 0)
    start[late] = aligned[late]
    return np.where(over & (start < behind), where, start)


def is_padding(instructions: Instructions, rows: Array) -> Array:
    """Return which instructions are padding: all NOPs, INT3, zeros, `lea esi, [esi]`."""
    length = instructions.length[rows]
    first, second = opcodes(instructions, rows)
    start = instructions.start[rows].astype(np.int64)
    result: Array = (first == 0x90) & (instructions.code.linked[start] != 0xF3)
    result |= (first == 0xCC) | ((first == 0x0F) & (second == 0x1F))
    result |= (first == 0) & (second == 0) & (length == 2)
    if instructions.code.bits == 32:
        # Old assemblers pad with instructions that copy a register to itself.
        same = (first == 0x8D) & np.isin(second, (0x36, 0x74, 0x76, 0xB4, 0xB6, 0x3F, 0x7F, 0xBC))
        same |= (first == 0x89) & np.isin(second, (0xF6, 0xFF))
        result |= same & ((instructions.code.linked[start + length - 1] == 0) | (length <= 2))
    return result


def opcodes(instructions: Instructions, rows: Array) -> tuple[Array, Array]:
    """Return the opcode of each instruction, without prefixes, and the byte after it."""
    data = instructions.code.linked
    at = instructions.start[rows].astype(np.int64)
    open_ = np.arange(len(at))
    for _ in range(LONGEST - 1):
        open_ = open_[PREFIX[instructions.code.bits][data[at[open_]]]]
        if not len(open_):
            break
        at[open_] += 1
    return data[at], data[at + 1]


NUMBERS = (0, 1, 2, 4)
"""Possible bytes of an immediate after the displacement of an instruction."""
LEA, SIB = 0x8D, 0x25
LOOK = 64
"""Instructions after one that takes an address, which are searched for its use as a base."""


class DataUses:
    """The places in the code of a program that are read or written as data."""

    def __init__(self, code: Code) -> None:
        data = code.linked
        at = np.flatnonzero((data[5:-5] & 0xC7) == 5) + 5
        # The byte before the displacement is a ModRM byte, not a SIB byte.
        at = at[(data[at - 1] != LEA) & ((data[at] != SIB) | ((data[at - 1] & 0xC7) != 4))]
        distance = numbers_at(data, at + 1, "<i4").astype(np.uint64)
        places, ends, targets = [], [], []
        for more in NUMBERS:
            end = at + 5 + more
            target = distance & np.uint64(0xFFFFFFFF)
            if code.bits == 64:
                target = code.address(end - 1) + np.uint64(1) + distance
            offset = code.offset(target)
            here = np.flatnonzero(offset >= 0)
            places.append(at[here])
            ends.append(end[here])
            targets.append(offset[here])
        self._at, self._end = np.concatenate(places), np.concatenate(ends)
        self._target = np.concatenate(targets)
        self._rows: tuple[Array, Array, Array] = (np.zeros(0, np.int32),) * 3
        """Offsets of all instructions, and of them the rows that end as such an operand does, with
        its target."""
        self._reads: dict[int, bool] = {}
        """Offset of an instruction → whether it has this memory operand."""
        self._based: dict[tuple[int, int], bool] = {}
        """Offsets of an instruction and of the address it takes → whether that is used as a
        base."""

    def find(self, code: Code, ways: Ways, tables: Tables) -> Array:
        """Return the offsets (i8, ascending) of unreached code that reached code uses as data."""
        if "used" in ways.known:
            return ways.known["used"]
        instructions = ways.instructions
        start = instructions.start
        if self._rows[0] is not start:
            row = np.searchsorted(start, self._at) - 1
            fits = (row >= 0) & (start[row] + instructions.length[row] == self._end)
            self._rows = start, row[fits], self._target[fits]
        _, row, targets = self._rows
        fits = ways.reached(row) & ~_reached(ways, targets)
        kept = [
            target
            for one, target in zip(row[fits].tolist(), targets[fits].tolist(), strict=True)
            if self._names(code, instructions, one, target)
        ]
        ways.known["used"] = distinct(np.asarray(kept, np.int64), self._bases(code, ways, tables))
        return ways.known["used"]

    def _names(self, code: Code, instructions: Instructions, row: int, target: int) -> bool:
        at = int(instructions.start[row])
        if at not in self._reads:
            one = instructions.instruction(row)
            plain = one.is_ip_rel_memory_operand or not (one.memory_base or one.memory_index)
            address = np.asarray([one.memory_displacement], np.uint64)
            self._reads[at] = plain and code.offset(address).item() == target
        return self._reads[at]

    def _bases(self, code: Code, ways: Ways, tables: Tables) -> Array:
        """Return the offsets that an instruction takes and a later one uses as a base."""
        instructions = ways.instructions
        offset = code.offset(tables.constant)
        constants = np.flatnonzero(offset >= 0)
        constants = constants[~_reached(ways, offset[constants])]
        rows = instructions.row(tables.at[constants])
        reached = ways.reached(rows)
        bases = []
        for one, row in zip(constants[reached].tolist(), rows[reached].tolist(), strict=True):
            key = (int(tables.at[one]), int(offset[one]))
            if key not in self._based:
                self._based[key] = _is_base(instructions, row, int(tables.register[one]))
            if self._based[key]:
                bases.append(key[1])
        return np.asarray(bases, np.int64)


def _reached(ways: Ways, offsets: Array) -> Array:
    rows = ways.instructions.row(offsets)
    result: Array = rows >= 0
    result[result] = ways.reached(rows[result])
    return result


def _is_base(instructions: Instructions, row: int, register: Any) -> bool:
    """Return whether code after a row uses the register that the row sets as an address."""
    register += iced.Register.RAX
    full, access = iced.RegisterExt.full_register, iced.OpAccess
    info = iced.InstructionInfoFactory()
    no_use = (iced.Mnemonic.LEA, iced.Mnemonic.NOP)
    for behind in range(row + 1, min(row + LOOK, len(instructions.start))):
        flow = instructions.flow[behind]
        one = instructions.instruction(behind)
        used = (one.memory_base, one.memory_index)
        if register in map(full, used) and one.mnemonic not in no_use:
            return True
        written = (access.WRITE, access.READ_WRITE, access.COND_WRITE, access.READ_COND_WRITE)
        lost = any(
            full(part.register) == register and part.access in written
            for part in info.info(one).used_registers()
        )
        if lost or flow not in (Flow.NEXT, Flow.BRANCH):
            return False
    return False


class Findings:
    """The code of a program and everything found in it so far by `cfg.Lifter`."""

    ways: Ways
    """All known ways between instructions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.code = Code(program)
        self.instructions = Instructions(self.code)
        self.instructions.sweep()
        self.data_uses = DataUses(self.code)
        self.ranges = Ranges(program, self.instructions)
        self.tables = Tables(program, self.instructions)
        self.starts = self._listed_starts()
        """i8, ascending: offsets of known functions and parts of functions."""
        self.roots = distinct(self.code.offset(program.unwind.pad))
        """i8, ascending: offsets of further code within functions, such as landing pads."""
        self.discovered = np.zeros(0, np.int64)
        """i8, ascending: those of `starts` that the search has found."""
        self.quiet = np.zeros(0, np.int64)
        """i8, ascending: offsets of calls whose callee does not return, found by following it."""
        self.jumps: list[Array] = [np.zeros(0, np.int64)]
        """i8 each: offsets of resolved indirect jumps, one a target."""
        self.targets: list[Array] = [np.zeros(0, np.int64)]
        """i8 each: the targets of these jumps."""
        self.entries: dict[int, tuple[int, Array]] = {}
        """Address of a jump table → its bytes, and the offset (i8) in each of its entries."""
        self.computed: set[int] = set()
        """Offsets of jumps that stay in their function, but with unknown targets."""
        self.pointed = (-1, np.zeros(0, np.uint64))
        """Number of instructions, and the targets (u8) of pointers in memory that were computed
        with these."""
        self.cut_short: list[str] = []
        """Searches that were ended early."""

    def _listed_starts(self) -> Array:
        program = self.program
        addresses = [program.function_address, program.fragments, program.starts]
        addresses.append(np.asarray([program.entry], np.uint64))
        offsets = self.code.offset(np.concatenate(addresses))
        offsets = np.concatenate([offsets, self.ranges.unwind_start])
        return distinct(offsets[offsets >= 0])

    def note_table(self, jump: int, table: Table) -> None:
        """Keep the table of the jump at an offset; between code it is data."""
        self.jumps.append(np.full(len(table.targets), jump))
        self.targets.append(table.targets)
        self.entries[table.address] = table.size, table.entries
        begin = self.code.offset(np.asarray([table.address], np.uint64))
        if table.size and begin[0] >= 0:
            self.code.add_data(begin, begin + table.size)

    def jump_tables(self) -> tuple[Array, Array]:
        """Return pairs of offsets: a resolved indirect jump, and one of its targets."""
        return np.concatenate(self.jumps), np.concatenate(self.targets)

    def functions(self) -> Array:
        """Return the offsets (i8, ascending) of known functions and parts of functions."""
        called = self.ways.called
        return distinct(self.starts, called[~self.ranges.inside(called)])

    def release(self) -> None:
        """Free everything that only the search needs, because a graph needs memory too."""
        del self.ways, self.tables, self.ranges, self.instructions
