"""ELF file → `Program`: what is loaded where, which functions, imports and pointers it names."""

from __future__ import annotations

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
    distinct,
    name_functions,
    refuse_cut,
    tidy,
)
from tokmill.x86.image.link import Placement, find_stubs, relocate

PAGE, LARGEST = 1 << 12, 1 << 40
# Types of symbols.
UNTYPED, OBJECT, FUNC, COMMON, LOCAL, IFUNC = 0, 1, 2, 5, 6, 10
GLOBAL = 1

PADDING = re.compile(rb"\xcc|(\x66*\x2e?\x0f\x1f|\x66*\x90)")
"""Instructions of several bytes or one that do nothing."""

# Relocation types that are alike on both machines, and those that are not.
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
    layout = Placement(elf) if elf.kind == "relocatable" else None
    tables = elf.relocations()
    if layout:
        for table in tables:
            layout.values(table)
        for table in tables:
            relocate(elf, layout, table)
        sections = [*layout.sections.values(), *layout.offset_table()]
    else:
        sections = _mapped(elf) or _segments(elf)
    sections = tidy(sections, len(data))
    program = Program(path, "ELF", elf.kind, elf.bits, elf.width // 8, sections)
    program.fixed = elf.kind == "executable"
    if layout:
        program.global_offset_table = layout.table
        program.import_name = list(layout.imports)
        program.import_address = np.asarray(list(layout.imports.values()), np.uint64)
        program.import_target = np.zeros(len(layout.imports), np.uint64)
        program.slot_address, program.slot_name = layout.slots()
        program.slot_target = np.zeros(len(program.slot_name), np.uint64)
        program.top, program.thread = layout.top, layout.thread(elf)
    else:
        program.entry = elf.entry
        loaded = elf.segments[elf.segments["type"] == LOAD]
        program.top = max((loaded["address"] + loaded["size"]).tolist(), default=0)
        if elf.dynamic.get(Tag.FLAGS_1, 0) & Tag.IS_EXECUTABLE:
            program.kind = "executable"
        program.global_offset_table = elf.dynamic.get(Tag.PLTGOT, 0)
        for segment in elf.segments[elf.segments["type"] == THREAD][:1]:
            program.thread = _invented(program, segment)
        for table in tables:
            _link(program, table)
            _link_thread(program, table)
        for segment in elf.segments[elf.segments["type"] == THREAD][:1]:
            size = int(segment["filesize"])
            program.thread_data = program.read(int(segment["address"]), size)
    _name_functions(elf, program, layout)
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
    """Return the sections that are loaded; none where no section holds code."""
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
    if table.addend is not None:
        added = relative | (direct & (table.kind == ABSOLUTE))
        value[added] += table.addend[added].astype(np.uint64)
    else:
        value[relative] = program.load(table.place[relative])
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
        known = (symbol == 0) | (table.symbols["section"][symbol] != 0)
    else:
        known = symbol == 0
    added = program.load(place) if table.addend is None else table.addend[rows].astype(np.uint64)
    distance = np.where(symbol == 0, program.load(place + word), 0)
    whole = (symbol == 0) & (distance == 0)
    distance[whole] = len(program.thread)
    program.thread_modules = distinct(program.thread_modules, place[module[rows] & whole])
    added = np.where(module[rows], distance, added)
    program.store(place[known], (value + added)[known])


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


def _name_functions(elf: Elf, program: Program, layout: Placement | None) -> None:
    """Set functions and fragments from all tables of symbols.

    A global label in code counts as a function where no typed one covers it: assemblers give
    types only when told to.
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
        if layout:
            wanted &= (section > 0) & (section < len(layout.address))
            address[wanted] += layout.address[section[wanted]]
        objects = np.isin(kind, (OBJECT, COMMON, LOCAL)) & (section > 0)
        if not layout:
            address[kind == LOCAL] += np.uint64(program.thread.start)
        if layout:
            objects &= section < len(layout.address)
            address[objects] += layout.address[section[objects]]
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
    # The label of an end (OCaml's `code_end`) is no function: alignment lies there.
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
    result: Array = (at >= 0) & (address < stop[at]) if len(start) else np.zeros(len(address), bool)
    return result


def _starts(elf: Elf, program: Program) -> Array:
    """Return what the loader calls: initialisers and finalisers."""
    addresses = [elf.dynamic.get(tag, 0) for tag in (Tag.INIT, Tag.FINI)]
    tables = [(elf.dynamic.get(at, 0), elf.dynamic.get(size, 0)) for at, size in Tag.ARRAYS]
    for section in program.sections:
        if section.name in (".init", ".fini") and elf.kind != "relocatable":
            addresses.append(section.address)
        elif section.name.startswith((".init_array", ".fini_array", ".preinit_array", ".ctors")):
            tables.append((section.address, len(section.data)))
    found_array = np.asarray(addresses, np.uint64)
    for address, size in tables:
        count = len(program.read(address, size)) // program.word
        places = np.arange(count, dtype=np.uint64) * np.uint64(program.word) + np.uint64(address)
        found_array = np.concatenate([found_array, program.load(places)])
    return distinct(found_array[found_array > 0])


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
