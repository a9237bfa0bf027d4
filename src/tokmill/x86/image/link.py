"""Lay out a relocatable ELF file in memory, and find import stubs.

Stubs are jumps through the global offset table; they get the names of imports.
"""

from __future__ import annotations

import re

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.elf import (
    ALLOC,
    EXECUTE,
    FINAL,
    NOBITS,
    THREAD_LOCAL,
    UNDEFINED,
    WRITE,
    Elf,
    Relocations,
    text,
)
from tokmill.x86.image.image import Program, Section, member

BASE = 0x400000
"""Where the first section lies: not at 0, which means "nowhere" in a graph."""
PLACE = 16
"""Bytes of the made-up place of an undefined symbol."""

# Relocation types: (what is stored, bytes). S symbol, A addend, P place, G global offset table,
# L the symbol's entry in it, T the thread pointer. Source: the psABIs of x86-64 and i386.
RULES = {
    64: {1: ("S+A", 8), 2: ("S+A-P", 4), 3: ("L+A-G", 4), 4: ("S+A-P", 4), 9: ("L+A-P", 4),
         10: ("S+A", 4), 11: ("S+A", 4), 24: ("S+A-P", 8), 25: ("S+A-G", 8), 26: ("G+A-P", 4),
         27: ("L+A-G", 8), 28: ("L+A-P", 8), 29: ("G+A-P", 8), 31: ("S+A-G", 8),
         19: ("L+A-P", 4), 21: ("S+A-T", 4), 22: ("L+A-P", 4), 23: ("S+A-T", 4), 34: ("L+A-P", 4),
         41: ("L+A-P", 4), 42: ("L+A-P", 4)},
    32: {1: ("S+A", 4), 2: ("S+A-P", 4), 3: ("L+A-G", 4), 4: ("S+A-P", 4), 9: ("S+A-G", 4),
         10: ("G+A-P", 4), 15: ("L+A", 4), 16: ("L+A-G", 4), 17: ("S+A-T", 4), 18: ("L+A-G", 4),
         32: ("S+A-T", 4), 43: ("L+A-G", 4)},
}  # fmt: skip
GOT32X, ABSOLUTE_FORM = 43, 0x05
"""A relocation that holds the address of the entry itself where the instruction has no base."""


class Placement:
    """Where the sections and the undefined symbols of a relocatable file lie."""

    def __init__(self, elf: Elf) -> None:
        self.address = np.zeros(len(elf.sections), np.uint64)
        self.sections: dict[int, Section] = {}
        """Section number → section, those that are loaded."""
        end = BASE
        for number, section in enumerate(elf.sections):
            if not section["flags"] & ALLOC:
                continue
            align = min(max(1, int(section["align"])), 1 << 16)
            end = (end + align - 1) // align * align
            self.address[number] = end
            if section["type"] == NOBITS:
                end += min(int(section["size"]), 1 << 40)
                continue
            data = elf.content(number)
            one = Section(elf.section_names[number], end, data, data, execute=False)
            one.execute = bool(section["flags"] & EXECUTE)
            one.constant = not section["flags"] & WRITE or one.name.startswith(FINAL)
            self.sections[number] = one
            end += len(data)
        self.table = (end + PLACE - 1) // PLACE * PLACE
        """Made-up place of the global offset table."""
        self.imports: dict[str, int] = {}
        """Undefined symbol that is used → its made-up place."""
        self._entries: dict[int, int] = {}
        self._word = elf.width // 8

    def values(self, table: Relocations) -> Array:
        """Return the addresses (u8) of the symbols that relocations name, one a relocation."""
        if not len(table.symbols):
            return np.zeros(len(table.symbol), np.uint64)
        symbols = table.symbols[table.symbol]
        value = symbols["value"].astype(np.uint64)
        section = symbols["section"].astype(np.int64)
        defined = (section > UNDEFINED) & (section < len(self.address))
        value[defined] += self.address[section[defined]]
        missing = np.flatnonzero((section == UNDEFINED) & (table.symbol > 0))
        for i, name in zip(missing.tolist(), symbols["name"][missing].tolist(), strict=True):
            # Each table of relocations may have symbols of its own, so the name is the key.
            value[i] = self._import(text(table.strings, name))
        return value

    def thread(self, elf: Elf) -> range:
        """Return the addresses from the first thread-local data on, up to `table`."""
        local = self.address[elf.sections["flags"] & THREAD_LOCAL > 0]
        return range(min(local.tolist(), default=self.table), self.table)

    @property
    def top(self) -> int:
        """The address after all made-up places."""
        return self._entry(len(self._entries))

    def _entry(self, number: int) -> int:
        return self.table + PLACE * (1 + len(self.imports)) + number * self._word

    def entries(self, values: Array) -> Array:
        """Return the places (u8) of entries of the global offset table that hold some addresses.

        All imports must have their places.
        """
        found, rows = np.unique(values, return_inverse=True)
        places = [
            self._entries.setdefault(value, self._entry(len(self._entries)))
            for value in found.tolist()
        ]
        return np.asarray(places, np.uint64)[rows]

    def offset_table(self) -> list[Section]:
        """Return the section of these entries, if there are any."""
        data = np.asarray(list(self._entries), f"<u{self._word}").view(np.uint8)
        return [Section(".got", self._entry(0), data, data, False)] if self._entries else []

    def slots(self) -> tuple[Array, list[str]]:
        """Return the entries that hold the address of an import, ascending, and their names."""
        names = {address: name for name, address in self.imports.items()}
        named = {place: names[value] for value, place in self._entries.items() if value in names}
        return np.asarray(list(named), np.uint64), list(named.values())

    def _import(self, name: str) -> int:
        return self.imports.setdefault(name, self.table + PLACE * (1 + len(self.imports)))


def relocate(elf: Elf, layout: Placement, table: Relocations) -> None:
    """Apply one table of relocations to the linked bytes of its section."""
    section = layout.sections.get(table.target)
    if section is None:
        return
    symbol = layout.values(table)
    if section.linked is section.data:
        section.linked = section.data.copy()
    for kind, (rule, size) in RULES[elf.bits].items():
        mine = np.flatnonzero(table.kind == kind)
        mine = mine[table.place[mine] <= max(0, len(section.data) - size)]
        if not len(mine) or len(section.data) < size:
            continue
        place = table.place[mine].astype(np.int64)
        cells = place[:, None] + np.arange(size)
        if table.addend is not None:
            value = table.addend[mine].astype(np.uint64)
        else:
            value = section.linked[cells].view(f"<i{size}")[:, 0].astype(np.int64).astype(np.uint64)
        if rule.startswith("G"):
            value = value + np.uint64(layout.table)
        else:
            value = value + (layout.entries(symbol[mine]) if rule[0] == "L" else symbol[mine])
        if rule.endswith("-P"):
            value = value - (place.astype(np.uint64) + np.uint64(section.address))
        elif rule.endswith("-T"):
            value = value - np.uint64(layout.table)
        elif rule.endswith("-G"):
            bare = (kind == GOT32X) & (section.linked[place - 1] & 0xC7 == ABSOLUTE_FORM)
            value = value - np.where(bare, np.uint64(0), np.uint64(layout.table))
        section.linked[cells] = value.astype(f"<u{size}").view(np.uint8).reshape(-1, size)


LANDING = np.frombuffer(b"\xf3\x0f\x1e\xfa\xf3\x0f\x1e\xfb", np.uint8).reshape(2, 4)
"""ENDBR64 and ENDBR32."""
GAP = 32
"""Largest distance of successive stubs in a section of stubs."""
LONG_ENTRY, SHORT = 16, 8
"""Bytes of an entry of a linkage table, and of one that is never resolved lazily."""
LAZY_ENTRY = re.compile(
    rb"\xff[\x25\xa3].{4}\x68.{4}\xe9"  # jmp [slot]; push number; jmp first
    rb"|\xf3\x0f\x1e[\xfa\xfb]\x68.{4}\xf2?\xe9",  # endbr; push number; jmp first
    re.DOTALL,
)
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
    with or without ENDBR and a BND prefix. If the file has no section table, the stubs are cut out
    of the code as separate sections.
    """
    addresses, names, targets = [], [], []
    sections = []
    named = any(section.stubs for section in program.sections)
    for section in program.sections:
        if not section.execute or (named and not section.stubs):
            sections.append(section)
            continue
        place, slot = _jumps(program, section)
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
    slot = data[place[:, None] + np.arange(2, 6)].view("<i4")[:, 0].astype(np.uint64)
    if program.bits == 64:
        slot += place.astype(np.uint64) + np.uint64(section.address + 6)
    else:
        slot[data[place + 1] == 0xA3] += np.uint64(program.global_offset_table)
    if program.word == 4:
        slot &= np.uint64(0xFFFFFFFF)
    bound = (place > 0) & (data[place - 1] == 0xF2)
    place = place - bound
    before = np.maximum(place - 4, 0)[:, None] + np.arange(4)
    landing = (data[before][:, None, :] == LANDING).all(axis=2).any(axis=1) & (place >= 4)
    return place - 4 * landing, slot


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
    """Return the parts of a section; parts with stubs are marked."""
    found, done = [], 0
    for run in np.split(place, np.flatnonzero(np.diff(place) > GAP) + 1) if len(place) else []:
        start, stop = int(run[0]), min(int(run[-1]) + LONG_ENTRY, len(section.data))
        before = section.linked[max(0, start - LONG_ENTRY) : start].tobytes()
        start -= LONG_ENTRY * before.startswith(FIRST_ENTRY)
        found.append(section.cut(done, start))
        found.append(section.cut(start, stop))
        found[-1].stubs = True
        done = stop
    found.append(section.cut(done, len(section.data)))
    return [part for part in found if len(part.data)]
