"""Calls and jumps of imports through a register that was loaded from their slot right before.

MinGW has `mov rax, [slot]; call rax` for every function of a library.
"""

from __future__ import annotations

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.image.ranges import member
from tokmill.x86.lift.decode import Instructions

BACK = 8
"""Instructions before the call in which its register is looked for."""


def slot_calls(
    instructions: Instructions, rows: Array, before: Array, slots: Array
) -> tuple[Array, Array]:
    """Return which calls go through a slot, and which one: (n,) i8 into `rows`, (n,) u8.

    Args:
        instructions: All of the program.
        rows: (m,) i8, rows of calls and jumps through registers or memory.
        before: (m,) i8, how many instructions of the same block lie before each.
        slots: u8, ascending, where pointers to imports lie.
    """
    code, data = instructions.code, instructions.code.linked
    found, address = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    at = instructions.start[rows].astype(np.int64)
    extended = (data[at] == 0x41) & (code.bits == 64)
    at += extended
    form = data[at + 1]
    # FF /2 and FF /4 of a register.
    call = np.flatnonzero(
        (data[at] == 0xFF) & np.isin(form & 0xF8, (0xD0, 0xE0)) & (len(slots) > 0)
    )
    register = (form[call] & 7) | extended[call].astype(np.uint8) << 3
    for step in range(1, BACK + 1):
        inside = before[call] >= step
        call, register = call[inside], register[inside]
        load = rows[call] - step
        place = instructions.start[load].astype(np.int64)
        number, slot = _loads(instructions, load, place)
        hit = (number == register) & member(slot, slots)
        sure = [
            row
            for row in np.flatnonzero(hit).tolist()
            if not _written(instructions, int(load[row]), step, int(register[row]))
        ]
        found.append(call[sure])
        address.append(slot[sure])
        call, register = call[~hit], register[~hit]
    return np.concatenate(found), np.concatenate(address)


def _loads(instructions: Instructions, rows: Array, at: Array) -> tuple[Array, Array]:
    """Return the register (i8) that instructions load from a known place, and the place (u8).

    -1 where an instruction is no such load.
    """
    code, data = instructions.code, instructions.code.linked
    length = instructions.length[rows].astype(np.int64)
    wide = code.bits == 64
    prefix = wide & ((data[at] & 0xFB) == 0x48)
    form = data[at + 1 + prefix]
    plain = (data[at + prefix] == 0x8B) & (length == 6 + prefix) & (prefix | (not wide))
    here = plain & ((form & 0xC7) == 0x05)
    based = plain & ((form & 0xC0) == 0x80) & (not wide) & code.based(form & 7, at)
    short = (data[at] == 0xA1) & (length == 5) & (not wide)
    end = at + length
    cells = data[np.maximum(end - 4, 0)[:, None] + np.arange(4)]
    slot = cells.view("<i4")[:, 0].astype(np.int64).astype(np.uint64)
    if wide:
        slot = slot + code.address(end - 1) + np.uint64(1)
    else:
        slot = (slot + based * np.uint64(code.table)) & np.uint64(0xFFFFFFFF)
    number = (form >> 3 & 7) | (prefix & (data[at] == 0x4C)) << 3
    number = np.where(short, 0, number.astype(np.int64))
    return np.where(here | based | short, number, -1), slot


def _written(instructions: Instructions, load: int, step: int, register: int) -> bool:
    """Say whether what lies between a load and the call after it may write the register."""
    iced = plugins.require("iced_x86")
    access, full = iced.OpAccess, iced.RegisterExt.full_register
    info = iced.InstructionInfoFactory()
    reads = (access.READ, access.COND_READ, access.NONE, access.NO_MEM_ACCESS)
    return any(
        full(used.register) == iced.Register.RAX + register and used.access not in reads
        for row in range(load + 1, load + step)
        for used in info.info(instructions.instruction(row)).used_registers()
    )
