"""Where the functions of a program truly begin: what its unstripped file says, to measure against.

Functions are the symbols FUNC and IFUNC of ELF (System V ABI, chapter 4, "Symbol Table") or the
symbols of type function of COFF; aliases count once. Parts that a compiler moved out of a function
(`.cold`, `.part`) have symbols too and are neither right nor wrong. So are, in PE files, labels
without a type, as assemblers give none, and ranges of the unwind table (`.pdata`) without a symbol,
as assemblers for COFF drop every local name that begins with L.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import lief
import numpy as np

from function_truth import Score
from tokmill.base.errors import TokmillError
from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, distinct, member
from tokmill.x86.image.program import open_program

PART = re.compile(r"\.(cold|part)(\.|$)")
"""Names of parts of functions, by GCC and Clang."""
COFF_FUNCTION = 2
"""Type of a symbol."""
Symbol = tuple[str, int, bool]
"""Name, address, whether it has the type of a function."""
HINT = "give the file as the linker wrote it, before `strip`"


@dataclass(slots=True)
class Truth:
    """The functions of a program by its symbols, ascending; F functions."""

    start: Array
    """(F,) u8, one an address."""
    name: list[str]
    """(F), raw; of aliases the first in the alphabet."""
    part_start: Array
    """(P,) u8, ascending: what is neither right nor wrong."""


def score(starts: Array, truth: Truth) -> Score:
    found = distinct(starts.astype(np.uint64))
    right = member(found, truth.start)
    wrong = ~right & ~member(found, truth.part_start)
    lost = len(truth.start) - int(right.sum())
    return Score(int(right.sum()), int(wrong.sum()), lost)


def read_truth(path: Path | str) -> Truth:
    """Return the functions of an unstripped, linked ELF or PE file.

    Raises `TokmillError` for a file without a table of symbols, and as `open_program` does.
    """
    program = open_program(path)
    symbols = _elf_symbols(Path(path)) if program.form == "ELF" else _pe_symbols(program)
    if not symbols:
        raise TokmillError("it has no table of symbols", where=str(path), hint=HINT)
    sections = [one for one in program.sections if one.execute and not one.stubs]
    code = [(one.address, one.stop) for one in sections]
    names: dict[int, str] = {}
    parts: set[int] = set()
    for name, address, typed in symbols:
        if not any(low <= address < high for low, high in code):
            continue
        if not typed or PART.search(name):
            parts.add(address)
        else:
            names[address] = min(name, names.get(address, name))
    start = sorted(names)
    return Truth(
        np.asarray(start, np.uint64),
        [names[address] for address in start],
        np.asarray(sorted(parts - names.keys()), np.uint64),
    )


def _elf_symbols(path: Path) -> list[Symbol]:
    file = lief.ELF.parse(str(path))
    wanted = lief.ELF.Symbol.TYPE.FUNC, lief.ELF.Symbol.TYPE.GNU_IFUNC
    return [
        (str(one.name), int(one.value), True)
        for one in file.symtab_symbols
        if one.type in wanted and 0 < one.shndx < len(file.sections)
    ]


def _pe_symbols(program: Program) -> list[Symbol]:
    file = lief.PE.parse(program.name)
    base = int(file.optional_header.imagebase)
    start = [base + int(one.virtual_address) for one in file.sections]
    found: list[Symbol] = [
        (
            str(symbol.name),
            start[int(symbol.section_idx) - 1] + int(symbol.value),
            int(symbol.complex_type) == COFF_FUNCTION,
        )
        for symbol in file.symbols
        if 0 < int(symbol.section_idx) <= len(start)
    ]
    if found:
        found += [("", low, False) for low in program.unwind.start.tolist()]
    return found
