"""Unwind tables of ELF files: ranges of functions and of their parts, and landing pads.

Linux Standard Base, "Exception Frames"; DWARF 5, section 6.4 and 7.6 (LEB128). The records of
`.eh_frame` form a chain and are walked one by one; their fields are read in columns.
"""

import struct
from dataclasses import dataclass

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import NONE, Program, Section, Unwind, changes, expand, numbers_at

OMIT, PC_RELATIVE = 0xFF, 0x10
SIZES = {0x02: 2, 0x03: 4, 0x04: 8, 0x0A: 2, 0x0B: 4, 0x0C: 8}
"""Low half of a pointer's encoding → its bytes; of another than 0, the size of an address, they
are not known."""
# If such a rule comes before the first advance, other code has set up the frame.
FRAME_RULES = (0x05, 0x0C, 0x0D, 0x0E)
SAVED_REGISTER = (0x80, 0xBF)
NO_RANGES = NONE, NONE, NONE, np.zeros(0, bool)


@dataclass(slots=True)
class _Common:
    """A common information entry (CIE): how its frame descriptions (FDE) are encoded."""

    pointer: int = 0
    table: int = OMIT
    augmented: bool = False
    signal: bool = False


def read_unwind(program: Program, frames: list[Section]) -> Unwind:
    """Return the ranges of frame tables; damaged or unusually encoded entries are left out."""
    tables = [NO_RANGES, *(_frame_table(program, frame) for frame in frames)]
    start, stop, table, fragment = map(np.concatenate, zip(*tables, strict=True))
    order = np.argsort(start, kind="stable")
    start, stop, table, fragment = start[order], stop[order], table[order], fragment[order]
    # If two descriptions have the same start, the first one counts.
    keep = (stop > start) & changes(start)
    unwind = Unwind(start[keep], stop[keep], fragment[keep])
    table = table[keep]
    with_table = np.flatnonzero(table)
    for section in program.sections:
        inside = table[with_table] - np.uint64(section.address)
        ranges = with_table[inside < np.uint64(len(section.data))]
        if len(ranges):
            _landing_pads(unwind, section, ranges, table[ranges])
    return unwind


def _frame_table(program: Program, frame: Section) -> tuple[Array, Array, Array, Array]:
    """Return start, stop, address of the exception table (or 0) and fragment of a frame table."""
    data = frame.linked.tobytes()
    word = program.word
    commons: dict[int, _Common | None] = {}
    groups: dict[int, list[int]] = {}
    bodies: dict[int, int] = {}
    place, end = 0, len(data) - 8
    while place <= end:
        length, number = struct.unpack_from("<II", data, place)
        if length == 0:
            # A terminator; linkers keep that of each input file.
            place += 4
            continue
        body = place + 4
        if length == 0xFFFFFFFF:
            if place + 20 > len(data):
                break
            length, number = struct.unpack_from("<QI", data, place + 4)
            body = place + 12
        if length < 4 or body + length > len(data):
            break
        if number:
            groups.setdefault(body - number, []).append(body + 4)
        else:
            bodies[place] = body
            commons[place] = _common(data, body + 4, body + length, word)
        place = body + length
    padded = np.frombuffer(data + bytes(32), np.uint8)
    columns = [NO_RANGES]
    for at, places in groups.items():
        common = commons.get(at)
        if common is not None:
            columns.append(_descriptions(padded, frame.address, word, common, np.asarray(places)))
    start, stop, table, fragment = map(np.concatenate, zip(*columns, strict=True))
    return start, stop, table, fragment


def _size(encoding: int, word: int) -> int:
    return SIZES.get(encoding & 0x0F, 0 if encoding & 0x0F else word)


def _common(data: bytes, place: int, end: int, word: int) -> _Common | None:
    """Read a common information entry; None if it is of an unknown kind."""
    result = _Common()
    version = data[place]
    stop = data.find(b"\0", place + 1, end)
    if version not in (1, 3) or stop < 0:
        return None
    letters = data[place + 1 : stop].decode("latin-1")
    if not letters.startswith("z"):
        return result if not letters else None
    result.augmented = True
    place = stop + 1
    # Code and data alignment, the return address (a byte in version 1), the length of the rest.
    for field in range(4):
        while not (version == 1 and field == 2) and place < end and data[place] & 0x80:
            place += 1
        place += 1
    for letter in letters[1:]:
        if place >= end:
            return None
        if letter == "R":
            result.pointer = data[place]
        elif letter == "L":
            result.table = data[place]
        elif letter == "P":
            size = _size(data[place], word)
            if not size:
                return None
            place += size
        elif letter == "S":
            result.signal = True
            continue
        elif letter != "B":
            return None
        else:
            continue
        place += 1
    return result


def _descriptions(
    data: Array, address: int, word: int, common: _Common, place: Array
) -> tuple[Array, Array, Array, Array]:
    size = _size(common.pointer, word)
    if not size or common.pointer & 0xF0 not in (0, PC_RELATIVE):
        return NO_RANGES
    place = place[place + 2 * size < len(data) - 16]
    start = _pointers(data, place, common.pointer, size, address, word)
    length = _numbers(data, place + size, size, signed=False).astype(np.uint64)
    table = np.zeros(len(place), np.uint64)
    rules = place + 2 * size
    if common.augmented:
        length_of, rules = _leb128(data, rules)
        size = _size(common.table, word)
        if size and common.table & 0xF0 in (0, PC_RELATIVE):
            has = length_of >= size
            raw = _numbers(data, rules[has], size, signed=False)
            value = _pointers(data, rules[has], common.table, size, address, word)
            table[has] = np.where(raw == 0, 0, value)
        rules = np.minimum(rules + length_of, len(data) - 1)
    first = data[rules]
    fragment = np.isin(first, FRAME_RULES)
    fragment |= (first >= SAVED_REGISTER[0]) & (first <= SAVED_REGISTER[1])
    stop = _wrap(start + length, word)
    if common.signal:
        # glibc's range for the return from a signal begins a byte early, because unwinders look up
        # the address before the return address.
        fragment[:] = False
        start = start + (start % np.uint64(16) == 15)
    return start, stop, table, fragment


def _wrap(value: Array, word: int) -> Array:
    return value & np.uint64((1 << (8 * word)) - 1)


def _pointers(
    data: Array, place: Array, encoding: int, size: int, address: int, word: int
) -> Array:
    value = _numbers(data, place, size, signed=bool(encoding & 0x08)).astype(np.uint64)
    if encoding & 0xF0 == PC_RELATIVE:
        value = value + place.astype(np.uint64) + np.uint64(address)
    return _wrap(value, word)


def _numbers(data: Array, place: Array, size: int, *, signed: bool) -> Array:
    kind = f"<{'i' if signed else 'u'}{size}"
    return numbers_at(data, place, kind).astype(np.int64 if signed else np.uint64)


def _leb128(data: Array, place: Array) -> tuple[Array, Array]:
    """Return the unsigned LEB128 numbers at some places, and the places after them (i8)."""
    value = np.zeros(len(place), np.int64)
    at = place.copy()
    more = np.ones(len(place), bool)
    for shift in range(0, 63, 7):
        byte = data[np.minimum(at, len(data) - 1)].astype(np.int64)
        value |= np.where(more, (byte & 0x7F) << shift, 0)
        at += more
        more &= byte >= 0x80
        if not more.any():
            break
    return value, at


def _landing_pads(unwind: Unwind, section: Section, ranges: Array, address: Array) -> None:
    """Add the landing pads of the exception tables of some ranges, all in one section.

    A table has the encoding of the base (none: the range's start), the encoding of types (and their
    end), the encoding of call sites and their bytes. Then follow, for each site, start, length,
    landing pad (0: none) and action.
    """
    data = np.concatenate([section.linked, np.zeros(16, np.uint8)])
    place = (address - np.uint64(section.address)).astype(np.int64)
    plain = data[place] == OMIT
    ranges, place = ranges[plain], place[plain] + 1
    typed = data[place] != OMIT
    place = place + 1
    place[typed] = _leb128(data, place[typed])[1]
    inside = place < len(section.linked)
    ranges, place = ranges[inside], place[inside]
    encoding = data[place]
    length, place = _leb128(data, place + 1)
    length = np.clip(length, 0, len(section.linked) - np.minimum(place, len(section.linked)))
    # Two ranges may share a table. In a damaged file all ranges may, which would cost much memory.
    keep = (encoding == 1) & (np.cumsum(length) <= 2 * len(section.linked))
    ranges, place, length = ranges[keep], place[keep], length[keep]
    raw = data[expand(place, length)]
    last = np.flatnonzero(raw < 0x80)
    if not len(last):
        return
    begin = np.concatenate([[0], last[:-1] + 1])
    value = np.zeros(len(last), np.int64)
    for k in range(min(9, int((last - begin).max()) + 1)):
        has = begin + k <= last
        value[has] |= (raw[begin[has] + k].astype(np.int64) & 0x7F) << (7 * k)
    # A number belongs to the table in which its last byte lies.
    table = np.searchsorted(np.cumsum(length), last, side="right")
    first = np.searchsorted(table, np.arange(len(ranges)))
    column = (np.arange(len(last)) - first[table]) % 4
    pads = (column == 2) & (value != 0)
    owner = ranges[table[pads]]
    target = unwind.start[owner] + value[pads].astype(np.uint64)
    unwind.pad = np.concatenate([unwind.pad, target])
    unwind.pad_range = np.concatenate([unwind.pad_range, owner])
