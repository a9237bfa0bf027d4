"""Info tables: data that GHC puts directly before the code of functions, thunks and return points.

GHC compiles with "tables next to code": a pointer to an object's code is a pointer to its table,
which ends where the code begins (GHC's rts/include/rts/storage/InfoTables.h and ClosureTypes.h,
8.6 and later, 64-bit, without profiling). The words of 8 bytes before the code, the nearest first:

1. the type of the object (4 bytes), and the distance to the table of static references or 0; for a
   constructor its number (4 bytes);
2. the layout of its fields: numbers of pointers and of other words; for a return point a bitmap,
   whose lowest 6 bits are its size;
3. for a function the kind and the number of its arguments (4 bytes each); for a constructor the
   distance to its name;
4. for a function with unusual arguments (kind 0) a bitmap of them;
5. for such a function the distance to code that takes its arguments from the stack.

Most of this code is only reached through data, and bytes between it may be tables. A return point
is where a function continues after another one has returned, like code after a call: it has a table
and is part of its function. Return points of the runtime are functions, because other code uses
them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program
from tokmill.x86.image.ranges import distinct, member, without
from tokmill.x86.lift.code import Code

WORD = 8
TYPES = 66
"""Types of objects are smaller than this."""
FIELDS = {1: (1, 0), 2: (0, 1), 3: (2, 0), 4: (1, 1), 5: (0, 2)}
"""Type minus the first type of its family → number of pointers and of other words."""
CONSTRUCTOR, FUNCTION, THUNK = 1, 8, 15
"""The first types of the three families, with any fields."""
NO_CAF, STATIC_FUNCTION, STATIC_THUNK = 7, 14, 21
SMALL_RETURN, BIG_RETURN = 30, 31
FIRST_RETURN, LAST_RETURN = 29, 36
MOST_FIELDS, MOST_TAGS, MOST_ARGUMENTS, KINDS = 1 << 12, 1 << 16, 128, 32
BITMAP = 58
"""Largest number of bits of a bitmap beside its size."""
TABLE, FUNCTION_TABLE, LARGEST_TABLE = 2, 3, 5
"""Sizes of tables in words."""
REX_B, RBX, RBP = 0x41, 3, 5
FEWEST = 4
"""Smallest number of static functions and thunks with pointers to them, in a program of GHC."""


class InfoTables(NamedTuple):
    """Info tables of a program, and the code after them; T tables."""

    begin: Array
    """(T,) i8, ascending: offset of the first byte of each table."""
    end: Array
    """(T,) i8, ascending: where each table ends and code begins."""
    function: Array
    """i8, ascending: beginnings of functions and thunks, which have a table or are named by one."""
    inner: Array
    """i8, ascending: return points within functions."""


def find_info_tables(program: Program, code: Code) -> InfoTables:
    """Return the info tables in the code of a program; none if GHC has not compiled it."""
    none = np.zeros(0, np.int64)
    if code.bits != 64:
        return InfoTables(none, none, none, none)
    parts = [_tables_in(program, code, part) for part in range(len(code.base))]
    columns = zip(*parts, strict=True)
    end, kind, begin, slow = (np.concatenate([none, *column]) for column in columns)
    # A static closure begins with a pointer to its code, so data have pointers to most of these.
    static = end[(kind == STATIC_FUNCTION) | (kind == STATIC_THUNK)]
    if len(static) < FEWEST:
        return InfoTables(none, none, none, none)
    pointed = distinct(code.offset(_pointers(program)))
    if member(static, pointed).sum() < max(FEWEST, len(static) / 2):
        return InfoTables(none, none, none, none)
    returns = (kind >= FIRST_RETURN) & (kind <= LAST_RETURN)
    outer, inner = distinct(end[~returns], slow), without(end[returns], slow)
    used = member(inner, pointed) | member(inner, _used_elsewhere(program, code, outer, inner))
    return InfoTables(begin, end, distinct(outer, inner[used]), inner[~used])


def _used_elsewhere(program: Program, code: Code, outer: Array, inner: Array) -> Array:
    """Return which return points (i8) are referred to by other functions than the one before them.

    A return point within a function is only referred to by this function, which pushes it.
    References are `lea register, [rip + distance]` and, in a program with a fixed address, any four
    bytes.
    """
    data, found = code.linked, [np.zeros(0, np.int64)]
    at = np.flatnonzero((data[:-6] == 0x8D) & (data[1:-5] & 0xC7 == 5)) + 2
    distance = data[at[:, None] + np.arange(4)].view("<i4")[:, 0]
    target = code.offset(code.address(at) + (distance + 4).astype(np.uint64))
    named = [(at, target)]
    if program.fixed:
        low, high = code.address(np.asarray([0, code.size - 1])).tolist()
        for skip in range(4):
            count = (code.size - skip) // 4
            value = data[skip : skip + 4 * count].view("<u4")
            rows = np.flatnonzero((value % WORD == 0) & (value >= low) & (value <= high))
            named.append((skip + 4 * rows, code.offset(value[rows].astype(np.uint64))))
    for at, target in named:
        mine = member(target, inner)
        at, target = at[mine], target[mine]
        other = np.searchsorted(outer, at, "right") != np.searchsorted(outer, target, "right")
        found.append(target[other])
    return distinct(*found)


def in_haskell(tables: InfoTables, functions: Array, offsets: Array) -> Array:
    """Return which offsets are in functions (i8, ascending) with an info table: bool."""
    at = np.searchsorted(functions, offsets, side="right") - 1
    if not len(tables.end):
        return np.zeros(len(offsets), bool)
    return (at >= 0) & member(functions[np.maximum(at, 0)], tables.function)


def through_registers(code: Code, jumps: Array) -> Array:
    """Return which indirect jumps (i8, offsets) of GHC's code use no jump table: bool.

    They enter the object in RBX, return to the address on the stack at RBP, or call the runtime
    through R13: `jmp [register + distance]`.
    """
    data = code.linked
    prefixed = data[jumps] == REX_B
    form = data[jumps + prefixed + 1]
    base = form & 7
    found = (data[jumps + prefixed] == 0xFF) & (form >> 3 & 7 == 4) & (form < 0xC0)
    found &= ((base == RBP) & (prefixed | (form >= 0x40))) | ((base == RBX) & ~prefixed)
    return found  # type: ignore[no-any-return]


def through_tables(code: Code, jumps: Array) -> Array:
    """Return which indirect jumps (i8, offsets) are `jmp [8 * register + table]`: bool."""
    data = code.linked
    at = jumps + (data[jumps] & 0xF0 == 0x40)
    found: Array = (data[at] == 0xFF) & (data[at + 1] == 0x24) & (data[at + 2] & 0xC7 == 0xC5)
    return found


def _tables_in(program: Program, code: Code, part: int) -> tuple[Array, Array, Array, Array]:
    first, stop = code.edge[part : part + 2].tolist()
    skip = -int(code.base[part]) % WORD
    count = max(0, (stop - first - skip) // WORD)
    data = code.linked[first + skip : first + skip + count * WORD]
    words, halves = data.view("<u8"), data.view("<u4").reshape(-1, 2)
    kinds = halves[:, 0]
    at = np.flatnonzero((kinds[1:-1] - np.uint32(1)) < TYPES - 1) + 1
    at = at[_fields_fit(words, halves, at)]
    if not len(at):
        return at, at, at, at
    kind = kinds[at].astype(np.int64)
    offset = first + skip + (at + 1) * WORD
    address = code.address(offset)
    refers = halves[at, 1]
    data_at = _in_data(program, address + refers.astype(np.int32).astype(np.uint64))
    third = np.maximum(at - 2, 0)
    how, arguments = halves[third].T
    constructor = kind <= NO_CAF
    function = (kind >= FUNCTION) & (kind <= STATIC_FUNCTION)
    name = address + words[third].astype(np.int32).astype(np.uint64)
    good = np.where(constructor, refers < MOST_TAGS, (refers == 0) | data_at)
    good &= ~constructor | _in_data(program, name)
    good &= ~function | ((how < KINDS) & (arguments > 0) & (arguments < MOST_ARGUMENTS))
    size = np.where(constructor | function, FUNCTION_TABLE, TABLE)
    general = function & (how == 0)
    size[general] = LARGEST_TABLE
    begin = offset - size * WORD
    good = _apart(begin, offset, good & (begin >= first))
    slow = offset[general & good] + words[at[general & good] - 4].astype(np.int32)
    inside = (slow >= first) & (slow < stop) & (slow % WORD == (first + skip) % WORD)
    return offset[good], kind[good], begin[good], slow[inside]


def _fields_fit(words: Array, halves: Array, at: Array) -> Array:
    """Return which tables have fields that are possible for their type: bool.

    `at`: the word with the type, in words of 8 bytes and halves of 4.
    """
    kind, layout = halves[at, 0], words[at - 1]
    pointers, others = halves[at - 1].T
    good = (pointers < MOST_FIELDS) & (others < MOST_FIELDS)
    for family in (CONSTRUCTOR, FUNCTION, THUNK):
        for more, (most, rest) in FIELDS.items():
            good &= (kind != family + more) | ((pointers == most) & (others == rest))
    size = layout & np.uint64(63)
    bits = layout >> np.uint64(6)
    small = (size <= BITMAP) & (bits >> np.minimum(size, np.uint64(BITMAP)) == 0)
    good = np.where(kind == SMALL_RETURN, small, good)
    found: Array = good | (kind == BIG_RETURN)
    return found


def _apart(begin: Array, entry: Array, good: Array) -> Array:
    """Return which good tables do not end within another one, whose words may look like one."""
    rows = np.flatnonzero(good)
    behind = np.append(begin[rows[1:]], entry[-1:])[: len(rows)]
    # The largest table may contain the ends of several others.
    reach = np.minimum.accumulate(behind[::-1])[::-1]
    found = good.copy()
    found[rows] = entry[rows] <= reach
    return found


def _pointers(program: Program) -> Array:
    """Return all possible pointers in the data of a program (u8)."""
    found = [program.pointers]
    for section in program.sections:
        if program.fixed and not section.execute:
            skip = -section.address % WORD
            count = max(0, (len(section.data) - skip) // WORD)
            found.append(section.linked[skip : skip + count * WORD].view("<u8"))
    return np.concatenate(found)


def _in_data(program: Program, addresses: Array) -> Array:
    """Return which addresses (u8) are in a section that is not code: bool."""
    found = np.zeros(len(addresses), bool)
    for section in program.sections:
        if not section.execute:
            found |= addresses - np.uint64(section.address) < np.uint64(len(section.data))
    return found
