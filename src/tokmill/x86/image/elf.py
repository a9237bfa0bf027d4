"""ELF files as tables of numbers: headers, sections, symbols, relocations.

System V ABI, chapters 4 and 5, and its x86 supplements. Each table is an array over the mapped file
and ends with it, so a damaged file costs no more memory than its size.
"""

import struct
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.store.schema import Array

MAGIC = b"\x7fELF"
MACHINES = {
    2: "SPARC", 4: "68000", 8: "MIPS", 15: "PA-RISC", 20: "PowerPC", 21: "PowerPC64", 22: "S/390",
    40: "ARM", 42: "SuperH", 43: "SPARC V9", 50: "IA-64", 83: "AVR", 94: "Xtensa", 105: "MSP430",
    164: "Hexagon", 183: "AArch64", 190: "CUDA", 220: "Z80", 224: "AMD GPU", 243: "RISC-V",
    247: "BPF", 252: "C-SKY", 258: "LoongArch", 0x9026: "Alpha",
}  # fmt: skip
KINDS: dict[int, Literal["executable", "shared", "relocatable"]] = {
    1: "relocatable", 2: "executable", 3: "shared",
}  # fmt: skip

# Kinds of sections.
SYMTAB, RELA, NOBITS, REL, DYNSYM, SYMTAB_SHNDX = 2, 4, 8, 9, 11, 18
ARRAYS = (14, 15, 16)
"""Tables of functions that are called at the start and at the exit of a program."""
WRITE, ALLOC, EXECUTE, THREAD_LOCAL = 1, 2, 4, 0x400
FINAL = ".data.rel.ro"
"""Begins the names of sections that are written only while the program is loaded."""
# Kinds of segments.
LOAD, DYNAMIC, THREAD, EH_FRAME_HEADER = 1, 2, 7, 0x6474E550
UNDEFINED, RESERVED, COMMON, LARGE_NUMBER = 0, 0xFF00, 0xFFF2, 0xFFFF
NO_SECTION = -1
"""Section number of symbols that are absolute."""
COMMON_UNIT, MOST_COMMON = 64, 1 << 32
"""Bytes of which common symbols get whole multiples, and most bytes of one."""
RELATIVE = 8
"""The type of relocations that add the place where the file is loaded, on both machines."""

SECTION = {
    64: "name u4 type u4 flags u8 address u8 offset u8 size u8 link u4 info u4 align u8 entry u8",
    32: "name u4 type u4 flags u4 address u4 offset u4 size u4 link u4 info u4 align u4 entry u4",
}
SEGMENT = {
    64: "type u4 flags u4 offset u8 address u8 physical u8 filesize u8 size u8 align u8",
    32: "type u4 offset u4 address u4 physical u4 filesize u4 size u4 flags u4 align u4",
}
SYMBOL = {
    64: "name u4 info u1 other u1 section u2 value u8 size u8",
    32: "name u4 value u4 size u4 info u1 other u1 section u2",
}
RELOCATION = {
    (64, RELA): "offset u8 info u8 addend i8",
    (32, RELA): "offset u4 info u4 addend i4",
    (64, REL): "offset u8 info u8",
    (32, REL): "offset u4 info u4",
}
TAG = {64: "tag u8 value u8", 32: "tag u4 value u4"}


class Tag:
    """Tags of the dynamic table."""

    PLTRELSZ, PLTGOT, STRTAB, SYMTAB, RELA, RELASZ, INIT, FINI = 2, 3, 5, 6, 7, 8, 12, 13
    REL, RELSZ, PLTREL, JMPREL, RELRSZ, RELR = 17, 18, 20, 23, 35, 36
    TABLES = (STRTAB, 4, 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE)
    """What linkers put behind the symbols: strings, hashes, versions."""
    FLAGS_1, IS_EXECUTABLE = 0x6FFFFFFB, 0x08000000
    """The tag of flags, and the flag of a position-independent executable."""
    ARRAYS = ((25, 27), (26, 28), (32, 33))
    """Address and size in bytes of each table of functions."""


@dataclass(slots=True)
class Relocations:
    """A table of relocations and the symbols that it names; n relocations."""

    place: Array
    """(n,) u8, the address that is changed; in a relocatable file, an offset in section
    `target`."""
    kind: Array
    """(n,) i8, the machine's relocation type."""
    symbol: Array
    """(n,) i8, row of `symbols`; 0: none."""
    addend: Array | None
    """(n,) i8; None: it is stored at the place."""
    symbols: Array
    strings: Array
    target: int


class Elf:
    """The tables of an ELF file for x86; damaged tables are empty."""

    def __init__(self, data: Array, path: str) -> None:
        self.data, self.path = data, path
        head = data[:64].tobytes()
        if len(head) < 20:
            raise self._broken("the ELF header is cut off")
        machine = struct.unpack_from(">H" if head[5] == 2 else "<H", head, 18)[0]
        if machine not in (3, 6, 62):
            name = MACHINES.get(machine, f"machine {machine}")
            raise TokmillError(
                f"an ELF file for {name}", where=path, hint="x86-64 and 32-bit x86 are read"
            )
        wide = head[4] == 2
        if head[4] not in (1, 2) or head[5] != 1 or len(head) < (64 if wide else 52):
            raise self._broken("the ELF header is damaged")
        # A 32-bit file for x86-64 is the x32 ABI: small pointers, 64-bit instructions.
        self.width = 64 if wide else 32
        self.bits = 64 if machine == 62 else 32
        kind = struct.unpack_from("<H", head, 16)[0]
        if kind not in KINDS:
            raise TokmillError(
                "a core dump" if kind == 4 else "an ELF file of an unknown type",
                where=path,
                hint="programs, shared libraries and object files are read",
            )
        self.kind = KINDS[kind]
        self.entry, segments, sections = struct.unpack_from("<3Q" if wide else "<3I", head, 24)
        segment_size, segment_count, section_size, count, names = struct.unpack_from(
            "<5H", head, 54 if wide else 42
        )
        self.segments = self._table(SEGMENT[self.width], segments, segment_size, segment_count)
        first = self._table(SECTION[self.width], sections, section_size, 1)
        if len(first):
            # Numbers above 65,279 do not fit into the header; the first section has them.
            count = count or int(first["size"][0])
            names = int(first["link"][0]) if names == 0xFFFF else names
        self.sections = self._table(SECTION[self.width], sections, section_size, count)
        if self.kind == "relocatable":
            self._add_commons()
        self.headers_end = len(head) if wide else 52
        """Bytes of the header, and of the table of segments where it follows."""
        if segments <= self.headers_end:
            self.headers_end = max(self.headers_end, segments + segment_size * segment_count)
        self._tables_end = max(
            segments + segment_size * segment_count if segment_count else 0,
            sections + section_size * count if count else 0,
        )
        strings = self.content(names) if names < len(self.sections) else data[:0]
        self.section_names = [text(strings, at) for at in self.sections["name"].tolist()]
        self.dynamic = self._dynamic()

    def needed(self) -> int:
        """Return the smallest size of a complete file, by its tables and loaded segments."""
        ends = [self._tables_end]
        # A separate file of debug information has the segments of its program without content.
        code = self.sections[(self.sections["flags"] & EXECUTE) > 0]
        if not len(code) or (code["type"] != NOBITS).any():
            for segment in self.segments[self.segments["type"] == LOAD]:
                ends.append(int(segment["offset"]) + int(segment["filesize"]))
        return max(ends)

    def _broken(self, what: str) -> TokmillError:
        return TokmillError(what, where=self.path, hint="is the file complete?")

    def _table(self, layout: str, offset: int, entry: int, count: int) -> Array:
        form = dtype(layout)
        fits = entry == form.itemsize and offset
        return self._records(form, offset, count * form.itemsize if fits else 0)

    def _records(self, form: np.dtype[Any], offset: int, size: int) -> Array:
        size = min(size, len(self.data) - offset)
        if size < form.itemsize:
            return np.zeros(0, form)
        return self.data[offset : offset + size // form.itemsize * form.itemsize].view(form)

    def _add_commons(self) -> None:
        """Add a section for common symbols (C without initialiser, Fortran), behind all others."""
        more = np.zeros(1, self.sections.dtype)
        more["type"], more["flags"], more["align"] = NOBITS, ALLOC | WRITE, COMMON_UNIT
        self.sections = np.append(self.sections, more)
        for symbols, _, _ in self.symbol_tables():
            inside = symbols[symbols["section"] == len(self.sections) - 1]
            more["size"] = np.max(inside["value"] + inside["size"], initial=more["size"][0])
        self.sections[-1:] = more

    def content(self, number: int) -> Array:
        """Return the bytes of a section in the file (u1)."""
        section = self.sections[number]
        start = int(section["offset"])
        size = 0 if section["type"] == NOBITS else int(section["size"])
        return self.data[start : start + size]

    def section_table(self, number: int, layout: str) -> Array:
        return self._records(
            dtype(layout), int(self.sections["offset"][number]), len(self.content(number))
        )

    def at_address(self, address: int, layout: str, size: int) -> Array:
        """Return the records at an address, which is found by the segments."""
        for segment in self.segments[self.segments["type"] == LOAD]:
            inside = address - int(segment["address"])
            left = int(segment["filesize"]) - inside
            if inside >= 0 and left > 0:
                return self._records(
                    dtype(layout), int(segment["offset"]) + inside, min(size, left)
                )
        return np.zeros(0, dtype(layout))

    def _dynamic(self) -> dict[int, int]:
        result: dict[int, int] = {}
        for segment in self.segments[self.segments["type"] == DYNAMIC]:
            size = int(segment["filesize"])
            rows = self._records(dtype(TAG[self.width]), int(segment["offset"]), size)
            end = np.flatnonzero(rows["tag"] == 0)
            for tag, value in rows[: int(end[0]) if len(end) else len(rows)].tolist():
                result.setdefault(tag, value)
        return result

    def symbol_tables(self) -> list[tuple[Array, Array, bool]]:
        """Return the tables of symbols (records of `SYMBOL`), static first.

        With each its strings, and whether it is the dynamic one.
        """
        kinds = self.sections["type"]
        tables = [
            (*self.symbol_table(number), kind == DYNSYM)
            for kind in (SYMTAB, DYNSYM)
            for number in np.flatnonzero(kinds == kind).tolist()
        ]
        return tables if len(self.sections) else [(*self._dynamic_symbols(), True)]

    def symbol_table(self, number: int) -> tuple[Array, Array]:
        """Return a section of symbols and its strings.

        `section` is a number of any size, or `NO_SECTION`. Those that do not fit into a symbol are
        in a table beside it.
        """
        link = int(self.sections["link"][number])
        strings = self.content(link) if link < len(self.sections) else self.data[:0]
        narrow = self.section_table(number, SYMBOL[self.width])
        symbols = narrow.astype(dtype(SYMBOL[self.width].replace("section u2", "section i4")))
        symbols["section"][narrow["section"] >= RESERVED] = NO_SECTION
        common = np.flatnonzero(narrow["section"] == COMMON)
        if len(common) and self.kind == "relocatable":
            size = np.minimum(symbols["size"][common].astype(np.int64), MOST_COMMON)
            ends = np.cumsum(-(-size // COMMON_UNIT) * COMMON_UNIT)
            symbols["section"][common] = len(self.sections) - 1
            symbols["value"][common] = np.append(0, ends[:-1])
        large = np.flatnonzero(narrow["section"] == LARGE_NUMBER)
        tables = (self.sections["type"] == SYMTAB_SHNDX) & (self.sections["link"] == number)
        if len(large) and tables.any():
            numbers = self.section_table(int(np.flatnonzero(tables)[0]), "number i4")["number"]
            large = large[large < len(numbers)]
            symbols["section"][large] = numbers[large]
        return symbols, strings

    def _dynamic_symbols(self) -> tuple[Array, Array]:
        # Without sections their number is unknown; they end where the next table begins.
        table, strings = self.dynamic.get(Tag.SYMTAB, 0), self.dynamic.get(Tag.STRTAB, 0)
        ends = [at for tag in Tag.TABLES if (at := self.dynamic.get(tag, 0)) > table]
        return (
            self.at_address(table, SYMBOL[self.width], min(ends, default=table) - table),
            self.at_address(strings, "text u1", 1 << 40).view(np.uint8),
        )

    def relocations(self) -> list[Relocations]:
        """Return the tables that a loader applies; in a relocatable file, all tables."""
        result = [self._packed_relocations()] if Tag.RELR in self.dynamic else []
        if not len(self.sections):
            return result + self._dynamic_relocations()
        relocatable = self.kind == "relocatable"
        for number, section in enumerate(self.sections):
            form, link = int(section["type"]), int(section["link"])
            if form not in (REL, RELA) or not (relocatable or section["flags"] & ALLOC):
                continue
            symbols, strings = np.zeros(0, dtype(SYMBOL[self.width])), self.data[:0]
            if link < len(self.sections) and self.sections["type"][link] in (SYMTAB, DYNSYM):
                symbols, strings = self.symbol_table(link)
            rows = self.section_table(number, RELOCATION[self.width, form])
            target = int(section["info"]) if relocatable else -1
            result.append(self._relocations(rows, symbols, strings, target))
        return result

    def _dynamic_relocations(self) -> list[Relocations]:
        symbols, strings = self._dynamic_symbols()
        form = RELA if self.dynamic.get(Tag.PLTREL) == Tag.RELA else REL
        tables = [
            (Tag.RELA, Tag.RELASZ, RELA),
            (Tag.REL, Tag.RELSZ, REL),
            (Tag.JMPREL, Tag.PLTRELSZ, form),
        ]
        return [
            self._relocations(
                self.at_address(
                    self.dynamic[at], RELOCATION[self.width, kind], self.dynamic.get(size, 0)
                ),
                symbols,
                strings,
            )
            for at, size, kind in tables
            if at in self.dynamic
        ]

    def _packed_relocations(self) -> Relocations:
        """Return the relative relocations of DT_RELR.

        An even word is the address of a place. An odd one is a bitmap of the next words of memory,
        one less than it has bits. Source: the generic ABI's proposal of SHT_RELR.
        """
        word = self.width // 8
        words = self.at_address(
            self.dynamic[Tag.RELR], f"word u{word}", self.dynamic.get(Tag.RELRSZ, 0)
        )
        words = words["word"].astype(np.uint64)
        row = np.arange(len(words))
        is_map = (words & np.uint64(1)) == 1
        last = np.maximum.accumulate(np.where(is_map, -1, row))
        maps = row[is_map & (last >= 0)]
        covered = word * (1 + (maps - last[maps] - 1) * (self.width - 1))
        base = words[last[maps]] + covered.astype(np.uint64)
        bits = np.unpackbits(words[maps].astype(f"<u{word}").view(np.uint8), bitorder="little")
        at, bit = np.nonzero(bits.reshape(-1, self.width)[:, 1:])
        place = np.concatenate([words[~is_map], base[at] + (word * bit).astype(np.uint64)])
        kind, none = np.full(len(place), RELATIVE), np.zeros(len(place), np.int64)
        symbols = np.zeros(0, dtype(SYMBOL[self.width]))
        return Relocations(place, kind, none, None, symbols, self.data[:0], -1)

    def _relocations(
        self, rows: Array, symbols: Array, strings: Array, target: int = -1
    ) -> Relocations:
        info = rows["info"].astype(np.int64)
        wide = self.width == 64
        symbol = info >> (32 if wide else 8)
        symbol[(symbol < 0) | (symbol >= len(symbols))] = 0
        has_addend = "addend" in (rows.dtype.names or ())
        return Relocations(
            rows["offset"].astype(np.uint64),
            info & (0xFFFFFFFF if wide else 0xFF),
            symbol,
            rows["addend"].astype(np.int64) if has_addend else None,
            symbols,
            strings,
            target,
        )


def dtype(layout: str) -> np.dtype[Any]:
    """Return the packed little-endian dtype of "name type name type …"."""
    words = layout.split()
    return np.dtype([(n, "<" + t) for n, t in zip(words[::2], words[1::2], strict=True)])


def text(strings: Array, at: int) -> str:
    """Return the string at a byte of a string table, which ends at the next zero."""
    # Names are short; in a damaged table each name must not cost a copy of the file.
    for most in (128, 1 << 14):
        head, zero, _ = strings[at : at + most].tobytes().partition(b"\0")
        if zero:
            break
    return head.decode("utf-8", "replace")
