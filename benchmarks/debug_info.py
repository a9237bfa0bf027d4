"""The functions of an unstripped program by its debug information, read by pyelftools.

DWARF 2 to 5: functions are the entries `DW_TAG_subprogram` (section 3.3 of the standard). Files are
trusted: they are what the benchmarks built.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from elftools.dwarf.descriptions import describe_form_class
from elftools.dwarf.die import DIE
from elftools.dwarf.ranges import BaseAddressEntry
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from tokmill.store.schema import Array

CLONE = re.compile(r"(\.(constprop|isra|part|cold|lto_priv|llvm|clone|specialized)\b[.\d]*)+$")
"""What GCC and Clang put after the name of a function when they make another one of it."""
STRUCTOR = re.compile(r"(?<=[CD])[1245](?=E)")
"""In names of C++ the kinds of a constructor and a destructor, which are mostly one function."""
EXECUTE = 4
REFERENCES = ("DW_AT_abstract_origin", "DW_AT_specification")
IN_UNIT = ("DW_FORM_ref1", "DW_FORM_ref2", "DW_FORM_ref4", "DW_FORM_ref8", "DW_FORM_ref_udata")
MOST_STEPS = 8
"""References that are followed from a function to what describes it."""


@dataclass(slots=True)
class DebugInfo:
    """Functions of one program, by its debug information.

    F functions, P ranges of code, S source files. Addresses are those of the file, as `lift` counts
    them.
    """

    files: list[str]
    """(S), of compilations, as the compiler was told, joined with the folder in which it ran."""
    name: list[str]
    """(F): the linkage name where there is one, without what compilers put after the names of
    clones, else the name."""
    unit: Array
    """(F,) i4: the source file whose compilation made it; -1 where the name is known everywhere."""
    entry: Array
    """(F,) u8: where it begins."""
    clone: Array
    """(F,) bool: made by the compiler of a function of this name (`.constprop`, `.part`, …)."""
    range_start: Array
    """(P,) u8, ascending: the code of functions, with what was moved out of them (`.cold`)."""
    range_stop: Array
    """(P,) u8, after the last byte."""
    range_function: Array
    """(P,) i8."""
    described: set[tuple[str, int]]
    """Name and unit of functions that have no code of their own: inlined, or not made."""

    def function_at(self, addresses: Array) -> Array:
        """Return the function whose code lies at each address (u8): i8, -1 for none."""
        at = np.searchsorted(self.range_start, addresses, side="right") - 1
        if not len(self.range_start):
            return np.full(len(addresses), -1, np.int64)
        inside = (at >= 0) & (addresses < self.range_stop[at])
        found: Array = np.where(inside, self.range_function[at], -1)
        return found


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


def read_debug_info(path: Path) -> DebugInfo:
    """Read the DWARF of a linked ELF file; raises `ValueError` for a file without any."""
    with open(path, "rb") as file:
        elf = ELFFile(file)
        info = elf.get_dwarf_info(follow_links=False)
        if info.debug_info_sec is None:
            raise ValueError(f"{path} has no debug information")
        code = [
            (one["sh_addr"], one["sh_addr"] + one["sh_size"])
            for one in elf.iter_sections()
            if one["sh_flags"] & EXECUTE
        ]
        return _functions(*_entries(info, code), _symbols(elf))


def names_of(info: DebugInfo) -> dict[int, str]:
    """Return the name of the function that begins at each address.

    A name that several compilations have (static functions) is followed by `@` and the name of its
    source file. What the compiler cloned has the name of the whole function where that is not there
    itself, else `.clone` behind it. Of several functions at one address the first by name is taken.
    """
    units: dict[str, set[int]] = {}
    for name, unit in (*zip(info.name, info.unit.tolist(), strict=True), *info.described):
        units.setdefault(name, set()).add(unit)
    keys = list(zip(info.name, info.unit.tolist(), strict=True))
    clone = info.clone.tolist()
    whole = {key for key, cloned in zip(keys, clone, strict=True) if not cloned}
    clones = Counter(key for key, cloned in zip(keys, clone, strict=True) if cloned)
    found: dict[int, str] = {}
    for place, address in enumerate(info.entry.tolist()):
        name, unit = keys[place]
        shown = name
        if len(units[name]) > 1 and unit >= 0:
            shown = f"{name}@{PurePosixPath(info.files[unit]).name}"
        if clone[place] and (keys[place] in whole or clones[keys[place]] > 1):
            shown += ".clone"
        found[address] = min(shown, found.get(address, shown))
    return found


def _symbols(elf: Any) -> dict[int, list[str]]:
    table = elf.get_section_by_name(".symtab")
    found: dict[int, list[str]] = {}
    for one in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
        if one["st_info"]["type"] == "STT_FUNC":
            found.setdefault(one["st_value"], []).append(one.name)
    return found


def _entries(info: Any, code: list[tuple[int, int]]) -> tuple[list[str], dict[int, _Entry]]:
    """Return source files, and the entries of functions by their place."""
    files: dict[str, int] = {}
    found: dict[int, _Entry] = {}

    def is_code(low: int, high: int) -> bool:
        # Of functions that the linker dropped the addresses are 0, 1 or the largest number.
        return low < high and any(start <= low and high <= stop for start, stop in code)

    for unit in info.iter_CUs():
        top = unit.get_top_DIE()
        path = posixpath.join(_text(top, "DW_AT_comp_dir"), _text(top, "DW_AT_name"))
        own = files.setdefault(posixpath.normpath(path), len(files))
        low = top.attributes.get("DW_AT_low_pc")
        base = low.value if low else 0
        # By hand, as pyelftools keeps every entry of a unit that it walks through itself.
        place, end = unit.cu_die_offset, unit.cu_offset + unit.size
        while place < end:
            entry = DIE(unit, top.stream, place)
            place += entry.size
            if entry.tag == "DW_TAG_subprogram":
                found[entry.offset] = _Entry(
                    _text(entry, "DW_AT_name"),
                    _text(entry, "DW_AT_linkage_name"),
                    "DW_AT_external" in entry.attributes,
                    _refers(entry),
                    own,
                    [one for one in _ranges(info, entry, base) if is_code(*one)],
                )
    return list(files), found


def _refers(entry: Any) -> int:
    for name in REFERENCES:
        if name in entry.attributes:
            said = entry.attributes[name]
            base = int(entry.cu.cu_offset) if said.form in IN_UNIT else 0
            return base + int(said.value)
    return -1


def _ranges(info: Any, entry: Any, base: int) -> Iterator[tuple[int, int]]:
    said = entry.attributes
    if "DW_AT_low_pc" in said and "DW_AT_high_pc" in said:
        low, high = said["DW_AT_low_pc"].value, said["DW_AT_high_pc"]
        is_address = describe_form_class(high.form) == "address"
        yield low, high.value if is_address else low + high.value
    elif "DW_AT_ranges" in said:
        lists = info.range_lists()
        for one in lists.get_range_list_at_offset(said["DW_AT_ranges"].value, entry.cu):
            if isinstance(one, BaseAddressEntry):
                base = one.base_address
            else:
                start = 0 if one.is_absolute else base
                yield start + one.begin_offset, start + one.end_offset


def _functions(
    files: list[str], all_entries: dict[int, _Entry], symbols: dict[int, list[str]]
) -> DebugInfo:
    names: list[str] = []
    units, entries = [], []
    clones: list[bool] = []
    ranges: list[tuple[int, int, int]] = []
    described: set[tuple[str, int]] = set()
    seen: set[tuple[str, int]] = set()
    for one in all_entries.values():
        chain = [one]
        while chain[-1].refers in all_entries and len(chain) < MOST_STEPS:
            chain.append(all_entries[chain[-1].refers])
        linkage = next((link.linkage for link in chain if link.linkage), "")
        name = STRUCTOR.sub("2", CLONE.sub("", linkage))
        name = name or next((link.name for link in chain if link.name), "")
        if not name:
            continue
        unit = -1 if any(link.external for link in chain) else chain[-1].unit
        if not one.ranges:
            described.add((name, unit))
            continue
        entry = _begin(one, symbols)
        if (name, entry) in seen:
            continue
        seen.add((name, entry))
        ranges += [(low, high, len(names)) for low, high in one.ranges]
        names.append(name)
        units.append(unit)
        entries.append(entry)
        named = symbols.get(entry) or [one.linkage]
        clones.append(all(CLONE.search(symbol) for symbol in named))
    places = np.asarray(sorted(ranges), np.uint64).reshape(-1, 3)
    return DebugInfo(
        files,
        names,
        np.asarray(units, np.int32),
        np.asarray(entries, np.uint64),
        np.asarray(clones, bool),
        places[:, 0],
        places[:, 1],
        places[:, 2].astype(np.int64),
        described,
    )


def _begin(one: _Entry, symbols: dict[int, list[str]]) -> int:
    """Return where a function begins; what was moved out of it may lie before it."""
    for low, _ in one.ranges:
        if any(".cold" not in name for name in symbols.get(low, [])):
            return low
    return one.ranges[0][0]


def _text(entry: Any, name: str) -> str:
    said = entry.attributes.get(name)
    value = said.value if said else b""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
