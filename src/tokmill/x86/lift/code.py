"""The code of a program as one array of bytes; offsets in it stand for addresses.

Calls whose target does not return to them read or drop the return address. Code against speculation
(retpolines: GCC's -mindirect-branch and -mfunction-return, Clang's -mretpoline) jumps to the
address in a register by

        call 1f                      thunk:  the same, and a register jumps by `jmp thunk`
    2:  pause; lfence; jmp 2b
    1:  mov [rsp], rax               -mfunction-return: lea rsp, [rsp + 8]
        ret

and calls such an address, within a function, by `jmp 3f; 4: (all of the above); 3: call 4b`.
Position-independent 32-bit code calls `mov ebx, [esp]; ret` to read its own address. Hand-written
code jumps over data by a call of `pop rsi`, which then has the address of the data. None of these
targets is a function.

With -mcmodel=large every call is `movabs register, address; call register`: calls and jumps through
a register with a constant.
"""

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, Section, distinct, member, numbers_at

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
        self._order = np.argsort(self.base, kind="stable")
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
        self.slot, self.slot_target = self._constant_slots(program)
        """u8, ascending: pointers that do not change after loading, and their targets."""
        self.data_begin = self.data_end = np.zeros(0, np.int64)
        """(D,) i8, ascending: begin and end of known data between code."""
        tables = [s for s in program.sections if s.name == "__bug_table"]
        self.warnings = distinct(np.zeros(0, np.int64), *map(self._warnings, tables))
        """i8, ascending: traps of Linux after which control goes on."""
        self.undefined = distinct(program.import_address)
        """u8, ascending: stubs, and invented addresses of undefined symbols."""
        own = program.import_target > 0
        self._stub, self._stub_target = program.import_address[own], program.import_target[own]

    def executable(self, address: Array) -> Array:
        """Return which addresses (u8) are in code or in import stubs: bool."""
        at = np.searchsorted(self._low, address, side="right")
        return address < np.append(np.uint64(0), self._high)[at]

    def address(self, offset: Array) -> Array:
        """Return the addresses (u8) of offsets (i8)."""
        part = np.searchsorted(self.edge, offset, side="right") - 1
        part = np.clip(part, 0, len(self.base) - 1)
        return self.base[part] + (offset - self.edge[part]).astype(np.uint64)

    def offset(self, address: Array) -> Array:
        """Return the offsets (i8) of addresses (u8); -1: not in code."""
        # A search for each address takes longer than going through a few sections.
        if len(self.base) <= 4:
            result = np.full(address.shape, -1)
            for base, first, end in zip(self.base, self.edge, self.edge[1:], strict=False):
                inside = address - base
                here = inside < np.uint64(end - first)
                inside += np.uint64(first)
                np.copyto(result, inside, where=here, casting="unsafe")
            return result
        place = np.searchsorted(self.base, address, side="right", sorter=self._order) - 1
        part = self._order[place]
        inside = (address - self.base[part]).astype(np.int64)
        sizes = np.diff(self.edge)
        ok = (place >= 0) & (inside >= 0) & (inside < sizes[part])
        return np.where(ok, self.edge[part] + inside, -1)

    def behind_stubs(self, address: Array) -> Array:
        """Return addresses (u8), in which stubs of the program's own functions are replaced by
        these functions.
        """
        result = address.copy()
        stubs = np.flatnonzero(member(address, self._stub))
        result[stubs] = self._stub_target[np.searchsorted(self._stub, address[stubs])]
        return result

    def add_data(self, begin: Array, end: Array) -> None:
        begin, end = np.append(self.data_begin, begin), np.append(self.data_end, end)
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], np.maximum.accumulate(end[order])
        apart = begin[1:] > end[:-1]
        self.data_begin = begin[np.append(True, apart)]
        self.data_end = end[np.append(apart, True)]

    def _thunks(self) -> tuple[Array, Array]:
        data = self.linked if self.bits == 32 else self.linked[:0]
        at = np.flatnonzero(
            (data[:-3] == 0x8B)
            & (data[1:-2] & 0xC7 == 4)
            & (data[2:-1] == 0x24)
            & (data[3:] == 0xC3)
        )
        return self.address(at), data[at + 1].astype(np.int64) >> 3

    def _loads_of_the_table(self) -> tuple[Array, Array]:
        """Return offset and register of each `call thunk; add register, distance` of the table."""
        data, size = self.linked, self.size if self.table and len(self.thunk) else 0
        short = data[5 : size + 5] == 0x05
        adds = short | (data[5 : size + 5] == 0x81) & (data[6 : size + 6] & 0xF8 == 0xC0)
        at = np.flatnonzero((data[:size] == 0xE8) & adds)
        short = short[at]
        register = np.where(short, 0, data[at + 6] & 7)
        begin = self.address(at) + np.uint64(5)
        number = at + np.where(short, 6, 7)
        called, added = (
            numbers_at(data, place, "<i4").astype(np.uint64) for place in (at + 1, number)
        )
        called, added = (begin + called) & MASK, (begin + added) & MASK
        is_load = member(called, self.thunk) & (added == self.table)
        is_load[is_load] = (
            self.thunk_register[np.searchsorted(self.thunk, called[is_load])] == register[is_load]
        )
        return at[is_load], register[is_load]

    def based(self, register: Array, offset: Array) -> Array:
        """Return whether registers hold the address of the global offset table at offsets: bool.

        By convention EBX does, in 32-bit position-independent code; others do after a load of it.
        """
        result: Array = (register == EBX) & (self.table > 0)
        at, loaded = self._table_loads
        for number in range(8) if len(at) else ():
            loads, asked = at[loaded == number], np.flatnonzero(register == number)
            before = np.searchsorted(loads, offset[asked]) - 1
            near = before >= 0
            near[near] = offset[asked[near]] - loads[before[near]] < NEAR
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
                is_trap = (at >= 0) & trap.any(axis=1)
                if len(is_trap) and is_trap.mean() > best and not len(table.data) % size:
                    best, result = is_trap.mean(), at[is_trap & (entries[:, flags] & WARNING > 0)]
        return result

    def _constant_slots(self, program: Program) -> tuple[Array, Array]:
        slots, targets = [program.slot_address], [program.slot_target]
        for section in program.sections:
            if section.name.startswith(".got"):
                count = len(section.data) // program.word
                places = np.arange(count, dtype=np.uint64) * np.uint64(program.word)
                slots.append(places + np.uint64(section.address))
                targets.append(program.load(slots[-1]))
        slot, target = np.concatenate(slots), np.concatenate(targets)
        in_code = self.offset(target) >= 0
        slot, first = np.unique(slot[in_code], return_index=True)
        return slot, target[in_code][first]


JUMPED = 64
"""Largest distance of a call to its target, in bytes."""
DATA = 512
"""Largest number of data bytes that a call jumps over."""
CALL, RET, HLT, REX_B = 0xE8, 0xC3, 0xF4, 0x41
NOWHERE = -1


def local_calls(code: Code, at: Array, length: Array, offset: Array) -> tuple[Array, Array]:
    """Return which direct calls stay in the same function, and which never return: bool.

    `at` (n,): offsets of calls, `length`: their bytes, `offset`: their targets (-1: not in code).
    """
    local, gone = np.zeros(len(at), bool), np.zeros(len(at), bool)
    end = at + length
    ahead = offset - end
    rows = np.flatnonzero((ahead >= 0) & (ahead < DATA))
    near = rows[ahead[rows] < JUMPED]
    over = overwrites(code, offset[near]) >= 0
    local[near] = over | _discards(code, offset[near]) | _asks(code, offset[near])
    # A call of the next instruction is another way to read its own address.
    rows = rows[ahead[rows] > 0]
    local[rows] |= _pops(code, offset[rows])
    gone[rows] = _pops(code, offset[rows])
    rows = np.flatnonzero((offset >= 0) & (ahead < 0) & (ahead > -JUMPED))
    target = retpolines(code, offset[rows])
    is_retpoline = target >= 0
    behind = target[is_retpoline] + _store(code) + 1
    local[rows[is_retpoline]] = behind == at[rows[is_retpoline]]
    return local, gone


def retpolines(code: Code, offset: Array) -> Array:
    """Return the place of `1: mov [rsp], register; ret` for offsets of `call 1f`; -1 for others."""
    result = np.full(len(offset), NOWHERE)
    data = code.linked
    rows = np.flatnonzero((offset >= 0) & (data[np.maximum(offset, 0)] == CALL))
    begin = offset[rows]
    target = begin + 5 + numbers_at(data, begin + 1, "<i4")
    near = (target > begin) & (target < np.minimum(begin + JUMPED, code.size))
    rows, target = rows[near], target[near]
    result[rows] = np.where(overwrites(code, target) >= 0, target, NOWHERE)
    return result


def overwrites(code: Code, offset: Array) -> Array:
    """Return the register (0 to 15) at offsets of `mov [rsp], register; ret`; -1 elsewhere."""
    data, rex = code.linked, code.bits == 64
    cells = data[offset[:, None] + np.arange(4 + rex)]
    first = (cells[:, 0] & 0xFB) == 0x48 if rex else np.ones(len(offset), bool)
    move, form, base, last = cells[:, rex:].T
    fits = first & (move == 0x89) & ((form & 0xC7) == 4) & (base == 0x24) & (last == RET)
    high = (cells[:, 0] & 4) << 1 if rex else 0
    return np.where(fits, (form >> 3 & 7 | high).astype(np.int64), NOWHERE)


def leaving_returns(code: Code, at: Array) -> Array:
    """Return which returns (offsets) go to a register's address that was stored directly before."""
    place = at - _store(code)
    result: Array = place >= 0
    result[result] = overwrites(code, place[result]) >= 0
    return result


def _store(code: Code) -> int:
    return 4 if code.bits == 64 else 3


def _discards(code: Code, offset: Array) -> Array:
    """Return where the return address is dropped, to return to the caller's caller."""
    data, rex = code.linked, code.bits == 64
    cells = data[offset[:, None] + np.arange(6)]
    lea = b"\x48\x8d\x64\x24\x08\xc3" if rex else b"\x8d\x64\x24\x04\xc3"
    add = b"\x48\x83\xc4\x08\xc3" if rex else b"\x83\xc4\x04\xc3"
    result = np.zeros(len(offset), bool)
    for form in (lea, add):
        result |= (cells[:, : len(form)] == np.frombuffer(form, np.uint8)).all(axis=1)
    return result


def _asks(code: Code, offset: Array) -> Array:
    """Return where `mov register, [esp]; ret` follows directly after HLT, as in start-up code."""
    if code.bits == 64:
        return np.zeros(len(offset), bool)
    cells = code.linked[offset[:, None] + np.arange(-1, 4)]
    before, move, form, base, last = cells.T
    return (before == HLT) & (move == 0x8B) & ((form & 0xC7) == 4) & (base == 0x24) & (last == RET)


def _pops(code: Code, offset: Array) -> Array:
    data = code.linked
    first, second = data[offset], data[offset + 1]
    extended = (first == REX_B) & (code.bits == 64)
    return (np.where(extended, second, first) & 0xF8) == 0x58


BACK = 8
"""Instructions before the call that are searched for its register."""
MOVABS = 10
"""Bytes of `movabs register, number`."""


def register_calls(
    code: Code, start: Array, length: Array, flow: Array, rows: Array
) -> tuple[Array, Array]:
    """Return the rows that lead to a known address, and these addresses: (n,) i8, (n,) u8.

    `start`, `length`, `flow`: all instructions in order; `rows` (i8): calls and jumps through
    registers or memory. The code between the constant and the call must be straight.
    """
    data = code.linked
    at = start[rows].astype(np.int64)
    extended = data[at] == 0x41
    at += extended
    form = data[at + 1]
    # FF /2 and FF /4 of a register.
    direct = (data[at] == 0xFF) & np.isin(form & 0xF8, (0xD0, 0xE0)) & (code.bits == 64)
    rows, register = rows[direct], (form[direct] & 7) | extended[direct] << 3
    calls, address = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    before = rows.copy()
    for _ in range(BACK):
        joins = (before > 0) & (flow[before - 1] == 0)
        joins &= start[before - 1] + length[before - 1] == start[before]
        joins &= ~member(start[before], code.edge)
        rows, register, before = rows[joins], register[joins], before[joins] - 1
        at = start[before].astype(np.int64)
        number = (data[at + 1] & 7) | (data[at] & 1) << 3
        moves = ((data[at] & 0xFE) == 0x48) & ((data[at + 1] & 0xF8) == 0xB8)
        moves &= (length[before] == MOVABS) & (number == register)
        value = numbers_at(data, at[moves] + 2, "<u8")
        in_code = code.executable(value) | member(value, code.undefined)
        calls.append(rows[moves][in_code])
        address.append(value[in_code])
        rows, register, before = rows[~moves], register[~moves], before[~moves]
    return np.concatenate(calls), np.concatenate(address)
