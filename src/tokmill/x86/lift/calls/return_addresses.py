"""Calls whose target does not return to them: the return address is read or dropped.

Code against speculation (retpolines: GCC's -mindirect-branch and -mfunction-return, Clang's
-mretpoline) jumps to the address in a register by

        call 1f                      thunk:  the same, and a register jumps by `jmp thunk`
    2:  pause; lfence; jmp 2b
    1:  mov [rsp], rax               -mfunction-return: lea rsp, [rsp + 8]
        ret

and calls such an address, within a function, by `jmp 3f; 4: (all of the above); 3: call 4b`.
Position-independent 32-bit code calls `mov ebx, [esp]; ret` to read its own address. Hand-written
code jumps over data by a call of `pop rsi`, which then has the address of the data. None of these
targets is a function.

Calls and jumps through a register with a constant are found too: with -mcmodel=large every call is
`movabs register, address; call register`.
"""

from __future__ import annotations

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import member
from tokmill.x86.lift.code import Code

NEAR = 64
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
    near = rows[ahead[rows] < NEAR]
    over = overwrites(code, offset[near]) >= 0
    local[near] = over | _discards(code, offset[near]) | _asks(code, offset[near])
    # A call of the next instruction is another way to read its own address.
    rows = rows[ahead[rows] > 0]
    local[rows] |= _pops(code, offset[rows])
    gone[rows] = _pops(code, offset[rows])
    rows = np.flatnonzero((offset >= 0) & (ahead < 0) & (ahead > -NEAR))
    target = retpolines(code, offset[rows])
    known = target >= 0
    behind = target[known] + _store(code) + 1
    local[rows[known]] = behind == at[rows[known]]
    return local, gone


def retpolines(code: Code, offset: Array) -> Array:
    """Return the place of `1: mov [rsp], register; ret` for offsets of `call 1f`; -1 for others."""
    result = np.full(len(offset), NOWHERE)
    data = code.linked
    rows = np.flatnonzero((offset >= 0) & (data[np.maximum(offset, 0)] == CALL))
    begin = offset[rows]
    cells = data[begin[:, None] + np.arange(1, 5)]
    target = begin + 5 + cells.view("<i4")[:, 0].astype(np.int64)
    near = (target > begin) & (target < np.minimum(begin + NEAR, code.size))
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
    result: Array = np.where(fits, (form >> 3 & 7 | high).astype(np.int64), NOWHERE)
    return result


def leaving_returns(code: Code, at: Array) -> Array:
    """Return which returns (offsets) go to a register's address that was stored directly before."""
    place = at - _store(code)
    result: Array = place >= 0
    result[result] = overwrites(code, place[result]) >= 0
    return result


def _store(code: Code) -> int:
    """Return the bytes of `mov [rsp], register`."""
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
    result: Array = (
        (before == HLT) & (move == 0x8B) & ((form & 0xC7) == 4) & (base == 0x24) & (last == RET)
    )
    return result


def _pops(code: Code, offset: Array) -> Array:
    data = code.linked
    first, second = data[offset], data[offset + 1]
    extended = (first == REX_B) & (code.bits == 64)
    result: Array = (np.where(extended, second, first) & 0xF8) == 0x58
    return result


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
    found, address = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
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
        cells = data[at[moves][:, None] + np.arange(2, MOVABS)]
        value = cells.view("<u8")[:, 0].astype(np.uint64)
        known = code.executable(value)
        found.append(rows[moves][known])
        address.append(value[known])
        rows, register, before = rows[~moves], register[~moves], before[~moves]
    return np.concatenate(found), np.concatenate(address)
