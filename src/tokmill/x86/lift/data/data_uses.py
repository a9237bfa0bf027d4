"""Places in code that instructions use as data: hand-written code has constants there."""

from __future__ import annotations

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.image.ranges import distinct
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.decode import Flow, Instructions
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
