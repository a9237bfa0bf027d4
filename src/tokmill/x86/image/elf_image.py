"""ELF file → `Program`: what is loaded where, which functions, imports and pointers it names.

Import stubs are jumps through the global offset table; they get the names of imports.
"""

import re
from typing import Any

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.store.schema import Array
from tokmill.x86.image.eh_frame import read_unwind
from tokmill.x86.image.elf import (
    ALLOC,
    EH_FRAME_HEADER,
    EXECUTE,
    FINAL,
    LOAD,
    NOBITS,
    THREAD,
    WRITE,
    Elf,
    Relocations,
    Tag,
    text,
)
from tokmill.x86.image.image import (
    NONE,
    Program,
    Section,
    clipped,
    distinct,
    member,
    name_functions,
    numbers_at,
    refuse_cut,
)

PAGE, LARGEST = 1 << 12, 1 << 40
# Types of symbols.
UNTYPED, OBJECT, FUNC, COMMON, LOCAL, IFUNC = 0, 1, 2, 5, 6, 10
GLOBAL = 1

PADDING = re.compile(rb"\xcc|(\x66*\x2e?\x0f\x1f|\x66*\x90)")
"""Instructions of several bytes or one that do nothing."""

# Relocation types that are the same on both machines, and those that are not.
ABSOLUTE, SLOTS = 1, (6, 7)
RELATIVE = {64: (8, 38, 37), 32: (8, 42)}
RESOLVER = {64: 37, 32: 42}
# Words from which code finds thread-local data; the one of a module is followed by the distance.
MODULE, DISTANCE = {64: 16, 32: 35}, {64: (18, 36), 32: (14,)}


def read_elf(data: Array, path: str) -> Program:
    """Return the program in an ELF file (u1).

    Raises `TokmillError` for a damaged header, another machine, a file that is cut off or without
    code.
    """
    elf = Elf(data, path)
    refuse_cut(path, len(data), elf.needed())
    tables = elf.relocations()
    if elf.kind == "relocatable":
        from tokmill.x86.image.link import placed

        layout, sections = placed(elf, tables)
    else:
        layout, sections = None, _mapped(elf) or _segments(elf)
    sections = clipped(sections, len(data))
    program = Program(path, "ELF", elf.kind, elf.bits, elf.width // 8, sections)
    program.fixed = elf.kind == "executable"
    if layout:
        layout.describe(program, elf)
    else:
        program.entry = elf.entry
        loaded = elf.segments[elf.segments["type"] == LOAD]
        program.top = max((loaded["address"] + loaded["size"]).tolist(), default=0)
        if elf.dynamic.get(Tag.FLAGS_1, 0) & Tag.IS_EXECUTABLE:
            program.kind = "executable"
        # Static programs, and those without stubs, have no entry for it.
        named = {section.name: section.address for section in sections}
        known = [elf.dynamic.get(Tag.PLTGOT, 0), named.get(".got.plt", 0), named.get(".got", 0)]
        program.global_offset_table = next(filter(None, known), 0)
        for segment in elf.segments[elf.segments["type"] == THREAD][:1]:
            program.thread = _invented(program, segment)
        for table in tables:
            _link(program, table)
            _link_thread(program, table)
        for segment in elf.segments[elf.segments["type"] == THREAD][:1]:
            size = int(segment["filesize"])
            program.thread_data = program.read(int(segment["address"]), size)
    _name_functions(elf, program, layout.address if layout else None)
    if not layout:
        _name_slots(program, tables)
        find_stubs(program)
    if not any(section.execute and not section.stubs for section in program.sections):
        raise TokmillError(
            "it holds no code",
            where=path,
            hint="does it hold only debug information, or what -flto leaves to the linker?",
        )
    program.starts = np.concatenate([program.starts, _starts(elf, program)])
    program.unwind = read_unwind(program, _frames(elf, program))
    return program


def _mapped(elf: Elf) -> list[Section]:
    result = []
    for number, section in enumerate(elf.sections):
        if section["flags"] & ALLOC and section["type"] != NOBITS:
            data, name = elf.content(number), elf.section_names[number]
            execute = bool(section["flags"] & EXECUTE)
            stubs = execute and name.startswith((".plt", ".iplt"))
            constant = not section["flags"] & WRITE or name.startswith(FINAL)
            address = int(section["address"])
            result.append(Section(name, address, data, data, execute, stubs, constant))
    return result if any(section.execute for section in result) else []


def _segments(elf: Elf) -> list[Section]:
    result = []
    for segment in elf.segments[elf.segments["type"] == LOAD]:
        start = int(segment["offset"])
        data = elf.data[start : start + int(segment["filesize"])]
        part = Section("", int(segment["address"]), data, data, bool(segment["flags"] & 1))
        part.constant = not segment["flags"] & 2
        headers = min(max(0, elf.headers_end - start), len(data))
        result += [part.cut(0, headers), part.cut(headers, len(data))]
        result[-2].execute = False
    return [part for part in result if len(part.data)]


def _link(program: Program, table: Relocations) -> None:
    """Write the pointers that a loader would write, as if the program were loaded at 0."""
    relative = np.isin(table.kind, RELATIVE[program.bits])
    direct = (table.symbol > 0) & np.isin(table.kind, (ABSOLUTE, *SLOTS))
    value = np.zeros(len(table.place), np.uint64)
    if len(table.symbols):
        symbols = table.symbols[table.symbol]
        direct &= symbols["section"] != 0
        value[direct] = symbols["value"][direct]
    written = relative | direct
    added = relative | (direct & (table.kind == ABSOLUTE))
    stored = program.load(table.place) if table.addend is None else table.addend.astype(np.uint64)
    value[added] = (value + stored)[added] & np.uint64((1 << 8 * program.word) - 1)
    program.store(table.place[written], value[written])
    program.pointers = np.concatenate([program.pointers, value[written]])
    places = table.place[written].astype(np.uint64)
    program.pointer_address = np.concatenate([program.pointer_address, places])
    resolvers = table.kind == RESOLVER[program.bits]
    program.starts = np.concatenate([program.starts, value[resolvers]])


def _invented(program: Program, segment: Any) -> range:
    """Return invented addresses for the thread-local data of a program; none if it is too large."""
    top = max(program.top, *(section.stop for section in program.sections))
    begin = -(-top // PAGE) * PAGE
    size, align = int(segment["size"]), max(1, int(segment["align"]))
    end = begin - (-size // align) * align
    return range(begin, end) if end < 1 << 64 and end - begin < LARGEST else range(0)


def _link_thread(program: Program, table: Relocations) -> None:
    """Write the invented addresses of thread-local data where code finds its distance."""
    module, word = table.kind == MODULE[program.bits], np.uint64(program.word)
    rows = np.flatnonzero(module | np.isin(table.kind, DISTANCE[program.bits]))
    symbol, place = table.symbol[rows], table.place[rows].astype(np.uint64)
    value = np.full(len(rows), program.thread.start, np.uint64)
    if len(table.symbols):
        value += np.where(symbol > 0, table.symbols["value"][symbol].astype(np.uint64), 0)
        is_defined = (symbol == 0) | (table.symbols["section"][symbol] != 0)
    else:
        is_defined = symbol == 0
    added = program.load(place) if table.addend is None else table.addend[rows].astype(np.uint64)
    distance = np.where(symbol == 0, program.load(place + word), 0)
    whole = (symbol == 0) & (distance == 0)
    distance[whole] = len(program.thread)
    program.thread_modules = distinct(program.thread_modules, place[module[rows] & whole])
    added = np.where(module[rows], distance, added)
    program.store(place[is_defined], (value + added)[is_defined])


def _name_slots(program: Program, tables: list[Relocations]) -> None:
    slots: dict[int, tuple[str, int]] = {}
    names = dict(zip(program.function_address.tolist(), program.function_name, strict=True))
    for table in tables:
        # What a resolver chooses when the program is loaded has the resolver's name.
        places = table.place[table.kind == RESOLVER[program.bits]]
        for place, resolver in zip(places.tolist(), program.load(places).tolist(), strict=True):
            slots[place] = (names.get(resolver, ""), 0)
        if not len(table.symbols):
            continue
        symbols = table.symbols[table.symbol]
        defined = symbols["section"] != 0
        own = (ABSOLUTE, MODULE[program.bits], *DISTANCE[program.bits])
        named = np.isin(table.kind, SLOTS) | (np.isin(table.kind, own) & ~defined)
        rows = np.flatnonzero(named & (table.symbol > 0))
        for place, name, target in zip(
            table.place[rows].tolist(),
            symbols["name"][rows].tolist(),
            np.where(defined, symbols["value"], 0)[rows].tolist(),
            strict=True,
        ):
            slots[place] = (text(table.strings, name), target)
    ordered = sorted(slots)
    program.slot_address = np.asarray(ordered, np.uint64)
    program.slot_name = [slots[place][0] for place in ordered]
    program.slot_target = np.asarray([slots[place][1] for place in ordered], np.uint64)


def _name_functions(elf: Elf, program: Program, places: Array | None) -> None:
    """Set functions and fragments from all tables of symbols.

    A global label in code counts as a function where no typed one covers it: assemblers give
    types only when told to. `places`: addresses of the sections of a relocatable file.
    """
    columns: list[list[Array]] = [[NONE], [NONE], [NONE]]
    names: list[str] = []
    data: tuple[list[int], list[int], list[str]] = [], [], []
    exports: set[str] = set()
    for symbols, strings, dynamic in elf.symbol_tables():
        kind, binding = symbols["info"] & 15, symbols["info"] >> 4
        section = symbols["section"].astype(np.int64)
        typed = (kind == FUNC) | (kind == IFUNC)
        wanted = typed | ((kind == UNTYPED) & (binding == GLOBAL))
        address = symbols["value"].astype(np.uint64)
        wanted &= section != 0
        objects = np.isin(kind, (OBJECT, COMMON, LOCAL)) & (section > 0)
        if places is None:
            address[kind == LOCAL] += np.uint64(program.thread.start)
        else:
            inside = (section > 0) & (section < len(places))
            address[inside] += places[section[inside]]
            wanted, objects = wanted & inside, objects & inside
        if dynamic:
            named = np.flatnonzero((wanted | objects) & (binding > 0))
            exports.update(text(strings, at) for at in symbols["name"][named].tolist())
        rows = np.flatnonzero(objects)
        data[0].extend(address[rows].tolist())
        data[1].extend(symbols["size"][rows].tolist())
        data[2].extend(text(strings, at).partition("@")[0] for at in symbols["name"][rows].tolist())
        rows = np.flatnonzero(wanted)
        # Global before weak before local; labels last.
        rank = np.where(typed, np.where(binding == 0, 3, binding), 8)
        columns[0].append(address[rows])
        columns[1].append(symbols["size"][rows].astype(np.uint64))
        columns[2].append(rank[rows].astype(np.int64))
        names += [text(strings, at) for at in symbols["name"][rows].tolist()]
    address, size, rank = (np.concatenate(column) for column in columns)
    keep = (rank < 8) | ~_covered(address, address[rank < 8], size[rank < 8])
    # The label of an end (OCaml's `code_end`) is not a function: alignment lies there.
    for row in np.flatnonzero(keep & (rank == 8)).tolist():
        keep[row] = PADDING.match(program.read(int(address[row]), 8).tobytes()) is None
    kept = [name for name, wanted in zip(names, keep.tolist(), strict=True) if wanted]
    name_functions(program, address[keep], size[keep], rank[keep], kept)
    program.symbol_address = np.append(address[keep], np.asarray(data[0], np.uint64))
    program.symbol_size = np.append(size[keep], np.asarray(data[1], np.uint64))
    program.symbol_name = [*kept, *data[2]]
    program.exports = sorted(exports - {""})


def _covered(address: Array, start: Array, size: Array) -> Array:
    """Return which addresses lie after the beginning and before the end of some range."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate((start + size)[order])
    at = np.searchsorted(start, address) - 1
    return (at >= 0) & (address < stop[at]) if len(start) else np.zeros(len(address), bool)


def _starts(elf: Elf, program: Program) -> Array:
    addresses = [elf.dynamic.get(tag, 0) for tag in (Tag.INIT, Tag.FINI)]
    tables = [(elf.dynamic.get(at, 0), elf.dynamic.get(size, 0)) for at, size in Tag.ARRAYS]
    for section in program.sections:
        if section.name in (".init", ".fini") and elf.kind != "relocatable":
            addresses.append(section.address)
        elif section.name.startswith((".init_array", ".fini_array", ".preinit_array", ".ctors")):
            tables.append((section.address, len(section.data)))
    starts = np.asarray(addresses, np.uint64)
    for address, size in tables:
        count = len(program.read(address, size)) // program.word
        places = np.arange(count, dtype=np.uint64) * np.uint64(program.word) + np.uint64(address)
        starts = np.concatenate([starts, program.load(places)])
    return distinct(starts[starts > 0])


def _frames(elf: Elf, program: Program) -> list[Section]:
    """Return the frame tables: sections, or what the header of the frame table points to."""
    result = [section for section in program.sections if section.name == ".eh_frame"]
    if result or any(section.name for section in program.sections):
        return result
    for segment in elf.segments[elf.segments["type"] == EH_FRAME_HEADER]:
        # Version, encoding of the pointer, of the count, of the table; 0x1B: relative, 4 bytes.
        header = program.read(int(segment["address"]), 8)
        if len(header) == 8 and header[1] == 0x1B:
            place = int(segment["address"]) + 4 + int(header[4:].view("<i4")[0])
            section = program.section_at(place)
            if section is not None:
                result.append(section.cut(place - section.address, len(section.data)))
    return result


LANDING = np.frombuffer(b"\xf3\x0f\x1e\xfa\xf3\x0f\x1e\xfb", np.uint8).reshape(2, 4)
"""ENDBR64 and ENDBR32."""
GAP = 32
"""Largest distance of successive stubs in a section of stubs."""
LONG_ENTRY, SHORT = 16, 8
"""Bytes of an entry of a linkage table, and of one that is never resolved lazily."""
LAZY_ENTRY = re.compile(
    rb"\xff[\x25\xa3].{4}\x68.{4}\xe9"  # jmp [slot]; push number; jmp first
    rb"|\xf3\x0f\x1e[\xfa\xfb]\x68.{4}\xf2?\xe9"  # endbr; push number; jmp first
    rb"|(\xf3\x0f\x1e\xfa)?\x41\xbb.{4}\xff\x25"  # mold's, see `NUMBERED`
    rb"|\xf3\x0f\x1e\xfb\xb9.{4}\xff[\x25\xa3]",
    re.DOTALL,
)
NUMBERED = {64: (b"\x41\xbb", 6), 32: (b"\xb9", 5)}
"""What mold puts before the jump, `mov r11d, number` or `mov ecx, number`, and its bytes."""
ENTRY = re.compile(
    rb"\xf3\x0f\x1e[\xfa\xfb]\xf2?\xff[\x25\xa3].{4}(\x66?\x0f\x1f\x44\0\0|\xcc+|\x90+)",
    re.DOTALL,
)
SHORT_ENTRY = re.compile(rb"\xff[\x25\xa3].{4}\x66\x90", re.DOTALL)
RET = b"\xc3"
FIRST_ENTRY = (b"\xff\x35", b"\xff\xb3")
"""What jumps to the loader: push [table + word]; jmp [table + 2 * word]."""


def find_stubs(program: Program) -> None:
    """Name the import stubs of a linked program.

    A stub is `jmp [slot]` (FF 25; in 32-bit position-independent code FF A3, relative to EBX),
    with or without ENDBR, a BND prefix, and mold's number. lld's retpolines load the slot into R11.
    If the file has no section table, the stubs are cut out of the code as separate sections.
    """
    addresses, names, targets = [], [], []
    sections = []
    named = any(section.stubs for section in program.sections)
    for section in program.sections:
        if not section.execute or (named and not section.stubs):
            sections.append(section)
            continue
        place, slot = _jumps(program, section)
        if section.stubs and program.bits == 64:
            loads, loaded = _retpolines(section)
            place, slot = np.append(place, loads), np.append(slot, loaded)
        is_slot = member(slot, program.slot_address)
        if not section.name:
            is_slot[is_slot] = _are_entries(section, place[is_slot])
        place = place[is_slot]
        row = np.searchsorted(program.slot_address, slot[is_slot])
        addresses.append(place.astype(np.uint64) + np.uint64(section.address))
        targets.append(program.slot_target[row])
        names += [program.slot_name[i] for i in row.tolist()]
        sections += [section] if section.name else _cut_out(section, place)
    program.sections = sections
    if addresses:
        address = np.concatenate(addresses)
        order = np.argsort(address, kind="stable")
        program.import_address = address[order]
        program.import_target = np.concatenate(targets)[order]
        program.import_name = [names[i] for i in order.tolist()]


def _jumps(program: Program, section: Section) -> tuple[Array, Array]:
    """Return the places of possible stubs in a section (i8) and the slots they jump through."""
    data = section.linked
    if len(data) < 6:
        return np.zeros(0, np.int64), np.zeros(0, np.uint64)
    forms = (0x25,) if program.bits == 64 else (0x25, 0xA3)
    place = np.flatnonzero((data[:-5] == 0xFF) & np.isin(data[1:-4], forms))
    slot = numbers_at(data, place + 2, "<i4").astype(np.uint64)
    if program.bits == 64:
        slot += place.astype(np.uint64) + np.uint64(section.address + 6)
    else:
        slot[data[place + 1] == 0xA3] += np.uint64(program.global_offset_table)
    if program.word == 4:
        slot &= np.uint64(0xFFFFFFFF)
    bound = (place > 0) & (data[place - 1] == 0xF2)
    place = place - bound
    number, size = NUMBERED[program.bits]
    ahead = np.maximum(place - size, 0)[:, None] + np.arange(len(number))
    numbered = (data[ahead] == np.frombuffer(number, np.uint8)).all(axis=1) & (place >= size)
    if program.bits == 32:
        # One byte may also be the end of an entry before; mold's form always begins with ENDBR.
        numbered &= _after_landing(data, place - size)
    # In other code it may be an argument in ECX, of a function that ends by calling an import.
    place = place - size * (numbered & (section.stubs or not section.name))
    return place - 4 * _after_landing(data, place), slot


def _after_landing(data: Array, place: Array) -> Array:
    """Return whether ENDBR stands directly before each place: bool."""
    before = np.maximum(place - 4, 0)[:, None] + np.arange(4)
    return (data[before][:, None, :] == LANDING).all(axis=2).any(axis=1) & (place >= 4)


def _retpolines(section: Section) -> tuple[Array, Array]:
    """Return the places (i8) and slots of `mov r11, [slot]` and a call or jump, as lld writes."""
    data = section.linked
    place = np.arange(0, len(data) - LONG_ENTRY + 1, LONG_ENTRY)
    head = data[place[:, None] + np.arange(3)]
    loads = (head == np.frombuffer(b"\x4c\x8b\x1d", np.uint8)).all(axis=1)
    place = place[loads & np.isin(data[place + 7], (0xE8, 0xE9))]
    slot = (numbers_at(data, place + 3, "<i4") + place + 7).astype(np.uint64)
    return place, slot + np.uint64(section.address)


def _are_entries(section: Section, place: Array) -> Array:
    """Return which jumps through slots are entries of a linkage table, not ends of functions: bool.

    Entries are aligned and go on as GNU ld, gold and lld write them. A function may look like one
    that is not resolved lazily: these follow another entry, or a section of other code.
    """
    result = np.zeros(len(place), bool)
    stop = 0
    for i, at in enumerate(place.tolist()):
        head = section.linked[at : at + LONG_ENTRY].tobytes()
        before = section.linked[max(0, at - LONG_ENTRY) : at].tobytes()
        aligned = (section.address + at) % LONG_ENTRY == 0
        follows = at == stop or before.startswith(FIRST_ENTRY) or LAZY_ENTRY.match(before)
        follows = follows or (
            aligned and before.endswith(b"\0") and before.rstrip(b"\0")[-1:] == RET
        )
        if aligned and (LAZY_ENTRY.match(head) or (follows and ENTRY.fullmatch(head))):
            result[i], stop = True, at + LONG_ENTRY
        elif follows and SHORT_ENTRY.match(head) and (section.address + at) % SHORT == 0:
            result[i], stop = True, at + SHORT
    return result


def _cut_out(section: Section, place: Array) -> list[Section]:
    parts, done = [], 0
    for run in np.split(place, np.flatnonzero(np.diff(place) > GAP) + 1) if len(place) else []:
        start, stop = int(run[0]), min(int(run[-1]) + LONG_ENTRY, len(section.data))
        before = section.linked[max(0, start - LONG_ENTRY) : start].tobytes()
        start -= LONG_ENTRY * before.startswith(FIRST_ENTRY)
        parts.append(section.cut(done, start))
        parts.append(section.cut(start, stop))
        parts[-1].stubs = True
        done = stop
    parts.append(section.cut(done, len(section.data)))
    return [part for part in parts if len(part.data)]
