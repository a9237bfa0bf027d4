"""Calls and jumps through a register with a constant, as in the large code model.

With -mcmodel=large every call is `movabs register, address; call register`.
"""

from __future__ import annotations

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.ranges import member
from tokmill.x86.lift.code import Code

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
