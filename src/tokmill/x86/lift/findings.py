"""The knowledge of a program's code during the search: columns that all searches read.

Hand-written code has constants between instructions, so places that instructions use as data are
kept too.
"""

from __future__ import annotations

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, distinct
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.decode import Flow, Instructions
from tokmill.x86.lift.gaps import Ranges
from tokmill.x86.lift.reach import Ways
from tokmill.x86.lift.switches.jump_tables import Tables

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
        distance = data[at[:, None] + np.arange(1, 5)].view("<i4")[:, 0].astype(np.uint64)
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
        self._reads: dict[int, bool] = {}
        """Offset of an instruction → whether it has this memory operand."""
        self._based: dict[tuple[int, int], bool] = {}
        """Offsets of an instruction and of the address it takes → whether that is used as a
        base."""

    def find(self, code: Code, ways: Ways, tables: Tables) -> Array:
        """Return the offsets (i8, ascending) of unreached code that reached code uses as data."""
        instructions = ways.instructions
        row = np.searchsorted(instructions.start, self._at) - 1
        fits = (row >= 0) & (instructions.start[row] + instructions.length[row] == self._end)
        fits[fits] = ways.reached(row[fits]) & ~_reached(ways, self._target[fits])
        kept = [
            target
            for one, target in zip(row[fits].tolist(), self._target[fits].tolist(), strict=True)
            if self._names(code, instructions, one, target)
        ]
        return distinct(np.asarray(kept, np.int64), self._bases(code, ways, tables))

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
        mine = np.flatnonzero(offset >= 0)
        mine = mine[~_reached(ways, offset[mine])]
        rows = instructions.row(tables.at[mine])
        reached = ways.reached(rows)
        found = []
        for one, row in zip(mine[reached].tolist(), rows[reached].tolist(), strict=True):
            key = (int(tables.at[one]), int(offset[one]))
            if key not in self._based:
                self._based[key] = _is_base(instructions, row, int(tables.register[one]))
            if self._based[key]:
                found.append(key[1])
        return np.asarray(found, np.int64)


def _reached(ways: Ways, offsets: Array) -> Array:
    """Return at which offsets a reached instruction begins: bool."""
    rows = ways.instructions.row(offsets)
    result: Array = rows >= 0
    result[result] = ways.reached(rows[result])
    return result


def _is_base(instructions: Instructions, row: int, register: int) -> bool:
    """Return whether code after a row uses the register that the row sets as an address."""
    iced = plugins.require("iced_x86")
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
        self.starts = self._known_starts()
        """i8, ascending: offsets of known functions and parts of functions."""
        self.roots = distinct(self.code.offset(program.unwind.pad))
        """i8, ascending: offsets of further code within functions, such as landing pads."""
        self.found = np.zeros(0, np.int64)
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

    def _known_starts(self) -> Array:
        program = self.program
        found = [program.function_address, program.fragments, program.starts]
        found.append(np.asarray([program.entry], np.uint64))
        offsets = self.code.offset(np.concatenate(found))
        offsets = np.concatenate([offsets, self.ranges.unwind_start])
        return distinct(offsets[offsets >= 0])

    def jump_tables(self) -> tuple[Array, Array]:
        """Return pairs of offsets: a resolved indirect jump, and one of its targets."""
        return np.concatenate(self.jumps), np.concatenate(self.targets)

    def functions(self) -> Array:
        """Return the offsets (i8, ascending) of known functions and parts of functions."""
        called = self.ways.called
        return distinct(self.starts, called[~self.ranges.inside(called)])

    def used_as_data(self) -> Array:
        """Return the offsets (i8, ascending) of unreached code that reached code uses as data."""
        return self.data_uses.find(self.code, self.ways, self.tables)

    def release(self) -> None:
        """Free everything that only the search needs, because a graph needs memory too."""
        del self.ways, self.tables, self.ranges, self.instructions
