"""Debug information of ELF files, read by pyelftools into plain columns.

DWARF 2 to 5: functions are the entries `DW_TAG_subprogram` (section 3.3 of the standard).
pyelftools trusts what a file says of its own sizes, so `debug_info.py` calls `read` in a child
process with limits.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.dwarf.descriptions import describe_form_class
from elftools.dwarf.die import DIE
from elftools.dwarf.ranges import BaseAddressEntry
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from tokmill.base.errors import TokmillError

CLONE = re.compile(r"(\.(constprop|isra|part|cold|lto_priv|llvm|clone|specialized)\b[.\d]*)+$")
"""What GCC and Clang put after the name of a function when they make another one of it."""
STRUCTOR = re.compile(r"(?<=[CD])[1245](?=E)")
"""In names of C++ the kinds of a constructor and a destructor, which are mostly one function."""
EXECUTE = 4
HINT = "compile with -g, and give the file as it is before `strip`"
REFERENCES = ("DW_AT_abstract_origin", "DW_AT_specification")
IN_UNIT = ("DW_FORM_ref1", "DW_FORM_ref2", "DW_FORM_ref4", "DW_FORM_ref8", "DW_FORM_ref_udata")
MOST_STEPS = 8
"""References that are followed from a function to what describes it."""


class _Entry(NamedTuple):
    """What one entry says of a function."""

    name: str
    linkage: str
    external: bool
    refers: int
    """Where the entry lies that says more; -1: nowhere."""
    unit: int
    """Number of the file of its compilation unit."""
    ranges: list[tuple[int, int]]


def read(path: str) -> dict[str, Any]:
    """Return the columns of `DebugInfo`, arrays as bytes.

    Raises `TokmillError` for a file without debug information, and whatever pyelftools raises for
    a damaged one.
    """
    with open(path, "rb") as file:
        try:
            elf = ELFFile(file)
        except ELFError:
            what = "it is no ELF file, and DWARF of ELF files alone is read"
            raise TokmillError(what, where=path, hint=HINT) from None
        if elf["e_type"] == "ET_REL":
            raise TokmillError("an object file", where=path, hint="link it first")
        info = elf.get_dwarf_info(follow_links=False)
        if info.debug_info_sec is None:
            raise TokmillError("it has no debug information", where=path, hint=HINT)
        return _Reading(info, path, _code(elf), _symbols(elf)).columns()


def _code(elf: Any) -> list[tuple[int, int]]:
    """Return where the code of a program lies, also where the file has its headers alone."""
    return [
        (one["sh_addr"], one["sh_addr"] + one["sh_size"])
        for one in elf.iter_sections()
        if one["sh_flags"] & EXECUTE
    ]


def _symbols(elf: Any) -> dict[int, list[str]]:
    """Return the names of functions by address, where the file still has its symbols."""
    table = elf.get_section_by_name(".symtab")
    found: dict[int, list[str]] = {}
    for one in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
        if one["st_info"]["type"] == "STT_FUNC":
            found.setdefault(one["st_value"], []).append(one.name)
    return found


class _Reading:
    """One file while it is read."""

    def __init__(
        self, info: Any, path: str, code: list[tuple[int, int]], symbols: dict[int, list[str]]
    ) -> None:
        self.info, self.path, self.code, self.symbols = info, path, code, symbols
        self.files: dict[str, int] = {}
        self.entries: dict[int, _Entry] = {}
        self.left_out: dict[str, int] = {}

    def columns(self) -> dict[str, Any]:
        for unit in self.info.iter_CUs():
            self._unit(unit)
        files = [path.encode("utf-8", "replace").decode() for path in self.files]
        return self._functions() | {"files": files, "left_out": self.left_out}

    def _count(self, what: str) -> None:
        self.left_out[what] = self.left_out.get(what, 0) + 1

    def _file(self, path: str) -> int:
        return self.files.setdefault(posixpath.normpath(path), len(self.files))

    def _unit(self, unit: Any) -> None:
        top = unit.get_top_DIE()
        if {"DW_AT_dwo_name", "DW_AT_GNU_dwo_name"} & top.attributes.keys():
            what = "its debug information lies in .dwo files"
            raise TokmillError(what, where=self.path, hint="compile without -gsplit-dwarf")
        folder = _text(top, "DW_AT_comp_dir")
        own = self._file(posixpath.join(folder, _text(top, "DW_AT_name")))
        low = top.attributes.get("DW_AT_low_pc")
        base = low.value if low else 0
        # By hand, as pyelftools keeps every entry of a unit that it walks through itself.
        place, end = unit.cu_die_offset, unit.cu_offset + unit.size
        while place < end:
            entry = DIE(unit, top.stream, place)
            place += entry.size
            if entry.tag == "DW_TAG_subprogram":
                self.entries[entry.offset] = self._entry(entry, own, base)

    def _entry(self, entry: Any, unit: int, base: int) -> _Entry:
        said = entry.attributes
        linkage = "DW_AT_linkage_name"
        if linkage not in said:
            linkage = "DW_AT_MIPS_linkage_name"
        return _Entry(
            _text(entry, "DW_AT_name"),
            _text(entry, linkage),
            "DW_AT_external" in said,
            self._refers(entry),
            unit,
            [one for one in self._ranges(entry, base) if self._is_code(*one)],
        )

    def _refers(self, entry: Any) -> int:
        for name in REFERENCES:
            if name in entry.attributes:
                said = entry.attributes[name]
                if said.form in IN_UNIT:
                    return int(said.value) + int(entry.cu.cu_offset)
                if said.form == "DW_FORM_ref_addr":
                    return int(said.value)
                self._count("functions that a file elsewhere describes (dwz)")
        return -1

    def _ranges(self, entry: Any, base: int) -> Iterator[tuple[int, int]]:
        said = entry.attributes
        if "DW_AT_low_pc" in said and "DW_AT_high_pc" in said:
            low, high = said["DW_AT_low_pc"].value, said["DW_AT_high_pc"]
            is_address = describe_form_class(high.form) == "address"
            yield low, high.value if is_address else low + high.value
        elif "DW_AT_ranges" in said:
            lists = self.info.range_lists()
            for one in lists.get_range_list_at_offset(said["DW_AT_ranges"].value, entry.cu):
                if isinstance(one, BaseAddressEntry):
                    base = one.base_address
                else:
                    start = 0 if one.is_absolute else base
                    yield start + one.begin_offset, start + one.end_offset

    def _is_code(self, low: int, high: int) -> bool:
        # Of functions that the linker dropped the addresses are 0, 1 or the largest number.
        return low < high and any(start <= low and high <= stop for start, stop in self.code)

    def _functions(self) -> dict[str, Any]:
        names: list[str] = []
        units, entries = [], []
        clones, ranges = [], []
        described: set[tuple[str, int]] = set()
        seen: set[tuple[str, int]] = set()
        for one in self.entries.values():
            chain = [one]
            while chain[-1].refers in self.entries and len(chain) < MOST_STEPS:
                chain.append(self.entries[chain[-1].refers])
            linkage = next((link.linkage for link in chain if link.linkage), "")
            name = STRUCTOR.sub("2", CLONE.sub("", linkage))
            name = name or next((link.name for link in chain if link.name), "")
            if not name and one.ranges:
                # dwz moves names into another file; the symbols may still be there.
                name = CLONE.sub("", min(self.symbols.get(self._begin(one), [""])))
            if not name:
                if one.ranges:
                    self._count("functions without a name")
                continue
            unit = -1 if any(link.external for link in chain) else chain[-1].unit
            if not one.ranges:
                described.add((name, unit))
                continue
            entry = self._begin(one)
            if (name, entry) in seen:
                continue
            seen.add((name, entry))
            ranges += [(low, high, len(names)) for low, high in one.ranges]
            names.append(name)
            units.append(unit)
            entries.append(entry)
            named = self.symbols.get(entry) or [one.linkage]
            clones.append(all(CLONE.search(symbol) for symbol in named))
        found = sorted(described)
        return {
            "name": names,
            "unit": _bytes(units, "i4"),
            "entry": _bytes(entries, "u8"),
            "clone": _bytes(clones, "u1"),
            "ranges": _bytes(sorted(ranges), "u8"),
            "described": [name for name, _ in found],
            "described_unit": _bytes([unit for _, unit in found], "i4"),
        }

    def _begin(self, one: _Entry) -> int:
        """Return where a function begins; what was moved out of it may lie before it."""
        first = one.ranges[0][0]
        named = [low for low, _ in one.ranges if not _all_cold(self.symbols.get(low, [".cold"]))]
        return named[0] if named else first


def _all_cold(names: list[str]) -> bool:
    return all(".cold" in name for name in names)


def _text(entry: Any, name: str) -> str:
    said = entry.attributes.get(name)
    value = said.value if said else b""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _bytes(values: Any, kind: str) -> bytes:
    return np.asarray(values, kind).tobytes()
