"""Lays out a relocatable ELF file in memory, as a linker would."""

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
from tokmill.x86.image.image import Program, Section

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
         41: ("L+A-P", 4), 42: ("L+A-P", 4), 12: ("S+A", 2), 13: ("S+A-P", 2), 14: ("S+A", 1),
         15: ("S+A-P", 1)},
    32: {1: ("S+A", 4), 2: ("S+A-P", 4), 3: ("L+A-G", 4), 4: ("S+A-P", 4), 9: ("S+A-G", 4),
         10: ("G+A-P", 4), 15: ("L+A", 4), 16: ("L+A-G", 4), 17: ("S+A-T", 4), 18: ("L+A-G", 4),
         32: ("S+A-T", 4), 43: ("L+A-G", 4), 20: ("S+A", 2), 21: ("S+A-P", 2), 22: ("S+A", 1),
         23: ("S+A-P", 1)},
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
            place = self.table + PLACE * (1 + len(self.imports))
            value[i] = self.imports.setdefault(text(table.strings, name), place)
        return value

    def _entry(self, number: int) -> int:
        return self.table + PLACE * (1 + len(self.imports)) + number * self._word

    def entries(self, values: Array) -> Array:
        """Return the places (u8) of entries of the global offset table that hold some addresses.

        All imports must have their places.
        """
        unique, rows = np.unique(values, return_inverse=True)
        places = [
            self._entries.setdefault(value, self._entry(len(self._entries)))
            for value in unique.tolist()
        ]
        return np.asarray(places, np.uint64)[rows]

    def offset_table(self) -> list[Section]:
        data = np.asarray(list(self._entries), f"<u{self._word}").view(np.uint8)
        return [Section(".got", self._entry(0), data, data, False)] if self._entries else []

    def describe(self, program: Program, elf: Elf) -> None:
        """Set what a program of these sections imports, and where its made-up places are."""
        program.global_offset_table = self.table
        program.import_name = list(self.imports)
        program.import_address = np.asarray(list(self.imports.values()), np.uint64)
        program.import_target = np.zeros(len(self.imports), np.uint64)
        names = {address: name for name, address in self.imports.items()}
        named = {place: names[value] for value, place in self._entries.items() if value in names}
        program.slot_address = np.asarray(list(named), np.uint64)
        program.slot_name = list(named.values())
        program.slot_target = np.zeros(len(named), np.uint64)
        program.top = self._entry(len(self._entries))
        local = self.address[elf.sections["flags"] & THREAD_LOCAL > 0]
        program.thread = range(min(local.tolist(), default=self.table), self.table)


def placed(elf: Elf, tables: list[Relocations]) -> tuple[Placement, list[Section]]:
    layout = Placement(elf)
    for table in tables:
        layout.values(table)
    for table in tables:
        _relocate(elf, layout, table)
    return layout, [*layout.sections.values(), *layout.offset_table()]


def _relocate(elf: Elf, layout: Placement, table: Relocations) -> None:
    section = layout.sections.get(table.target)
    if section is None:
        return
    symbol = layout.values(table)
    if section.linked is section.data:
        section.linked = section.data.copy()
    for kind, (rule, size) in RULES[elf.bits].items():
        rows = np.flatnonzero(table.kind == kind)
        rows = rows[table.place[rows] <= max(0, len(section.data) - size)]
        if not len(rows) or len(section.data) < size:
            continue
        place = table.place[rows].astype(np.int64)
        cells = place[:, None] + np.arange(size)
        if table.addend is not None:
            value = table.addend[rows].astype(np.uint64)
        else:
            value = section.linked[cells].view(f"<i{size}")[:, 0].astype(np.int64).astype(np.uint64)
        if rule.startswith("G"):
            value = value + np.uint64(layout.table)
        else:
            value = value + (layout.entries(symbol[rows]) if rule[0] == "L" else symbol[rows])
        if rule.endswith("-P"):
            value = value - (place.astype(np.uint64) + np.uint64(section.address))
        elif rule.endswith("-T"):
            value = value - np.uint64(layout.table)
        elif rule.endswith("-G"):
            bare = (kind == GOT32X) & (section.linked[place - 1] & 0xC7 == ABSOLUTE_FORM)
            value = value - np.where(bare, np.uint64(0), np.uint64(layout.table))
        section.linked[cells] = value.astype(f"<u{size}").view(np.uint8).reshape(-1, size)
