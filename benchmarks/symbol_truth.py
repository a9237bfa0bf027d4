"""Where the functions of a program truly begin: what its unstripped file says, to measure against.

Functions are the symbols FUNC and IFUNC of ELF (System V ABI, chapter 4, "Symbol Table") or the
symbols of type function of COFF; aliases count once. Parts that a compiler moved out of a function
(`.cold`, `.part`) have symbols too and are neither right nor wrong. So are, in PE files, labels
without a type, as assemblers give none, and ranges of the unwind table (`.pdata`) without a symbol,
as assemblers for COFF drop every local name that begins with L.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from function_truth import Score
from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.store.schema import Array
from tokmill.x86.image import elf
from tokmill.x86.image.image import Program, distinct, member
from tokmill.x86.image.link import Placement
from tokmill.x86.image.program import open_program

PART = re.compile(r"\.(cold|part)(\.|$)")
"""Names of parts of functions, by GCC and Clang."""
FUNC, IFUNC, COFF_FUNCTION = 2, 10, 2
"""Types of symbols."""
Symbol = tuple[str, int, int, bool]
"""Name, address, size, whether it has the type of a function."""
HINT = "give the file as the linker wrote it, before `strip`"


@dataclass(slots=True)
class Truth:
    """The functions of a program by its symbols, ascending; F functions."""

    start: Array
    """(F,) u8, one an address."""
    stop: Array
    """(F,) u8, after the last byte; where the symbol has no size, the next symbol or the end of
    the section."""
    name: list[str]
    """(F), raw; of aliases the first in the alphabet."""
    part_start: Array
    """(P,) u8, ascending: what is neither right nor wrong."""
    part_stop: Array
    """(P,) u8."""


def score(starts: Array, truth: Truth) -> Score:
    """Return how many starts (u8, in any order) are right and wrong, and how many are lost."""
    found = distinct(starts.astype(np.uint64))
    right = member(found, truth.start)
    wrong = ~right & ~member(found, truth.part_start)
    lost = len(truth.start) - int(right.sum())
    return Score(int(right.sum()), int(wrong.sum()), lost)


def read_truth(path: Path | str) -> Truth:
    """Return the functions of an unstripped ELF or PE file; starts as `lift` counts addresses.

    Raises `TokmillError` for a file without a table of symbols, and as `open_program` does.
    """
    program = open_program(path)
    symbols = _elf_symbols(Path(path)) if program.form == "ELF" else _pe_symbols(program)
    if not symbols:
        raise TokmillError("it has no table of symbols", where=str(path), hint=HINT)
    sections = [one for one in program.sections if one.execute and not one.stubs]
    code = [(one.address, one.stop) for one in sections]
    names: dict[int, str] = {}
    sizes: dict[int, int] = {}
    parts: set[int] = set()
    for name, address, size, typed in symbols:
        if not any(low <= address < high for low, high in code):
            continue
        sizes[address] = max(size, sizes.get(address, 0))
        if not typed or PART.search(name):
            parts.add(address)
        else:
            names[address] = min(name, names.get(address, name))
    begins = sorted(names.keys() | parts)
    ends = dict(zip(begins, [*begins[1:], 0], strict=True))

    def stop(address: int) -> int:
        if sizes[address]:
            return address + sizes[address]
        end = next(high for low, high in code if low <= address < high)
        return min(end, ends[address] or end)

    start = sorted(names)
    part_start = sorted(parts - names.keys())
    return Truth(
        np.asarray(start, np.uint64),
        np.asarray([stop(address) for address in start], np.uint64),
        [names[address] for address in start],
        np.asarray(part_start, np.uint64),
        np.asarray([stop(address) for address in part_start], np.uint64),
    )


def _elf_symbols(path: Path) -> list[Symbol]:
    file = elf.Elf(np.fromfile(path, np.uint8), str(path))
    base = np.zeros(len(file.sections), np.uint64)
    if file.kind == "relocatable":
        base = Placement(file).address
    found: list[Symbol] = []
    for number in np.flatnonzero(file.sections["type"] == elf.SYMTAB).tolist():
        table, strings = file.symbol_table(number)
        kind, section = table["info"] & 15, table["section"]
        wanted = ((kind == FUNC) | (kind == IFUNC)) & (section > 0) & (section < len(base))
        for row in table[wanted]:
            address = int(row["value"]) + int(base[row["section"]])
            found.append((elf.text(strings, int(row["name"])), address, int(row["size"]), True))
    return found


def _pe_symbols(program: Program) -> list[Symbol]:
    file = plugins.require("lief").PE.parse(program.name)
    base = int(file.optional_header.imagebase)
    start = [base + int(one.virtual_address) for one in file.sections]
    found: list[Symbol] = [
        (
            str(symbol.name),
            start[int(symbol.section_idx) - 1] + int(symbol.value),
            0,
            int(symbol.complex_type) == COFF_FUNCTION,
        )
        for symbol in file.symbols
        if 0 < int(symbol.section_idx) <= len(start)
    ]
    if found:
        ranges = zip(program.unwind.start.tolist(), program.unwind.stop.tolist(), strict=True)
        found += [("", low, high - low, False) for low, high in ranges]
    return found
