"""The code of a program as one array of bytes; offsets in it stand for addresses."""

from __future__ import annotations

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, Section, distinct, member

INT3 = 0xCC
EBX = 3
MASK = np.uint64(0xFFFFFFFF)
NEAR = 1 << 14
"""Bytes in which a register keeps the address of the global offset table."""

BUG_ENTRIES = ((8, 4), (12, 10), (16, 14))
"""Bytes of an entry of `__bug_table`, and where its flags are."""
WARNING = 1


class Code:
    """The code sections of a program one after the other, without stubs; an offset counts bytes."""

    def __init__(self, program: Program) -> None:
        sections = [s for s in program.sections if s.execute and not s.stubs]
        self.bits = program.bits
        ranges = sorted((s.address, s.address + len(s.data)) for s in program.sections if s.execute)
        self._low, self._high = np.asarray(ranges, np.uint64).reshape(-1, 2).T
        self._high = np.maximum.accumulate(self._high)
        self.base = np.asarray([section.address for section in sections], np.uint64)
        self.edge = np.zeros(len(sections) + 1, np.int64)
        np.cumsum([len(section.data) for section in sections], out=self.edge[1:])
        self.size = int(self.edge[-1])
        if self.size >= 1 << 31:
            raise TokmillError(
                "more than 2 GiB of code", where=program.name, hint="split the program"
            )
        # Some bytes after the end can be read.
        self.linked = np.concatenate([*(s.linked for s in sections), np.zeros(32, np.uint8)])
        same = all(section.linked is section.data for section in sections)
        self.raw = self.linked if same else np.concatenate([section.data for section in sections])
        self.table = program.global_offset_table
        self.thunk, self.thunk_register = self._thunks()
        """u8 and i8, by address: 32-bit functions `mov register, [esp]; ret`, with which code reads
        its own address."""
        self._table_loads = self._loads_of_the_table()
        self.slot, self.slot_target = self._known_slots(program)
        """u8, ascending: pointers that do not change after loading, and their targets."""
        self.data_begin = self.data_end = np.zeros(0, np.int64)
        """(D,) i8, ascending: begin and end of known data between code."""
        tables = [s for s in program.sections if s.name == "__bug_table"]
        self.warnings = distinct(np.zeros(0, np.int64), *map(self._warnings, tables))
        """i8, ascending: traps of Linux after which control goes on."""
        own = program.import_target > 0
        self._stub, self._stub_target = program.import_address[own], program.import_target[own]

    def executable(self, address: Array) -> Array:
        """Return which addresses (u8) are in code or in import stubs: bool."""
        at = np.searchsorted(self._low, address, side="right")
        result: Array = address < np.append(np.uint64(0), self._high)[at]
        return result

    def address(self, offset: Array) -> Array:
        """Return the addresses (u8) of offsets (i8)."""
        part = np.searchsorted(self.edge, offset, side="right") - 1
        part = np.clip(part, 0, len(self.base) - 1)
        return self.base[part] + (offset - self.edge[part]).astype(np.uint64)

    def offset(self, address: Array) -> Array:
        """Return the offsets (i8) of addresses (u8); -1: not in code."""
        part = np.searchsorted(self.base, address, side="right") - 1
        inside = (address - self.base[part]).astype(np.int64)
        sizes = np.diff(self.edge)
        ok = (part >= 0) & (inside >= 0) & (inside < sizes[part])
        return np.where(ok, self.edge[part] + inside, -1)

    def behind_stubs(self, address: Array) -> Array:
        """Return addresses (u8), in which stubs of the program's own functions are replaced by
        these functions.
        """
        result = address.copy()
        mine = np.flatnonzero(member(address, self._stub))
        result[mine] = self._stub_target[np.searchsorted(self._stub, address[mine])]
        return result

    def add_data(self, begin: Array, end: Array) -> None:
        """Mark the bytes between some offsets as data."""
        begin, end = np.append(self.data_begin, begin), np.append(self.data_end, end)
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], np.maximum.accumulate(end[order])
        apart = begin[1:] > end[:-1]
        self.data_begin = begin[np.append(True, apart)]
        self.data_end = end[np.append(apart, True)]

    def _thunks(self) -> tuple[Array, Array]:
        data = self.linked
        at = np.flatnonzero(
            (data[:-3] == 0x8B)
            & (data[1:-2] & 0xC7 == 4)
            & (data[2:-1] == 0x24)
            & (data[3:] == 0xC3)
        )
        at = at[: len(at) if self.bits == 32 else 0]
        return self.address(at), data[at + 1].astype(np.int64) >> 3

    def _loads_of_the_table(self) -> tuple[Array, Array]:
        """Return offset and register of each `call thunk; add register, distance` of the table."""
        data, size = self.linked, self.size
        short = data[5 : size + 5] == 0x05
        adds = short | (data[5 : size + 5] == 0x81) & (data[6 : size + 6] & 0xF8 == 0xC0)
        at = np.flatnonzero((data[:size] == 0xE8) & adds)
        at = at[: len(at) if self.table and len(self.thunk) else 0]
        short = short[at]
        register = np.where(short, 0, data[at + 6] & 7)
        begin = self.address(at) + np.uint64(5)
        number = at + np.where(short, 6, 7)
        called, added = (
            data[place[:, None] + np.arange(4)].view("<i4")[:, 0].astype(np.int64).astype(np.uint64)
            for place in (at + 1, number)
        )
        called, added = (begin + called) & MASK, (begin + added) & MASK
        known = member(called, self.thunk) & (added == self.table)
        known[known] = (
            self.thunk_register[np.searchsorted(self.thunk, called[known])] == register[known]
        )
        return at[known], register[known]

    def based(self, register: Array, offset: Array) -> Array:
        """Return whether registers hold the address of the global offset table at offsets: bool.

        By convention EBX does, in 32-bit position-independent code; others do after a load of it.
        """
        result: Array = (register == EBX) & (self.table > 0)
        at, loaded = self._table_loads
        for number in range(8) if len(at) else ():
            mine, asked = at[loaded == number], np.flatnonzero(register == number)
            before = np.searchsorted(mine, offset[asked]) - 1
            near = before >= 0
            near[near] = offset[asked[near]] - mine[before[near]] < NEAR
            result[asked] |= near
        return result

    def _warnings(self, table: Section) -> Array:
        """Return the offsets (i8) of the traps in a `__bug_table` that only warn.

        An entry begins with the distance to its trap (32-bit kernels: its address); its size and
        the place of its flags depend on the kernel's configuration: the form fits that leads to
        most traps. Source: Linux, include/asm-generic/bug.h.
        """
        best, result = 0.5, np.zeros(0, np.int64)
        for size, flags in BUG_ENTRIES:
            entries = table.linked[: len(table.data) // size * size].reshape(-1, size)
            place = np.uint64(table.address) + size * np.arange(len(entries), dtype=np.uint64)
            value = entries[:, :4].copy().view("<i4")[:, 0].astype(np.uint64)
            for address in (place + value, value & MASK):
                at = self.offset(address if self.bits == 64 else address & MASK)
                cells = self.linked[at[:, None] + np.arange(4)]
                trap = (cells[:, :3] == 0x0F) & np.isin(cells[:, 1:], (0x0B, 0xB9))
                known = (at >= 0) & trap.any(axis=1)
                if len(known) and known.mean() > best and not len(table.data) % size:
                    best, result = known.mean(), at[known & (entries[:, flags] & WARNING > 0)]
        return result

    def _known_slots(self, program: Program) -> tuple[Array, Array]:
        slots, targets = [program.slot_address], [program.slot_target]
        for section in program.sections:
            if section.name.startswith(".got"):
                count = len(section.data) // program.word
                places = np.arange(count, dtype=np.uint64) * np.uint64(program.word)
                slots.append(places + np.uint64(section.address))
                targets.append(program.load(slots[-1]))
        slot, target = np.concatenate(slots), np.concatenate(targets)
        known = self.offset(target) >= 0
        slot, first = np.unique(slot[known], return_index=True)
        return slot, target[known][first]
