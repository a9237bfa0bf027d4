"""The table of functions in programs of the Go compiler, stripped or not: `.gopclntab`.

The runtime needs it for stack traces, so `strip` keeps it. Its layout is defined by the packages
runtime (symtab.go) and debug/gosym of Go's library; that of Go 1.18 and later is read. An entry is
the start of a function and the place of its record, in 4 bytes each, from the beginning of Go's
code and of the table; an address ends the table. A record begins with the function's address and
the place of its name.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, Section, member, numbers_at

SECTION = ".gopclntab"
"""Suffix of the section's name; in position-independent programs it follows `.data.rel.ro`."""
MAGICS = (0xFFFFFFF0, 0xFFFFFFF1)
"""The first four bytes: of Go 1.18 and 1.19, and of later ones."""
HEADER, SIZE = 8, 4
"""Bytes: magic, two zeros, unit of code (1 on x86), bytes of a word; those of a number."""
LONGEST_NAME = 1 << 12
MOST_TEXT = 4
"""Largest size of all names together, as a multiple of the bytes after the header."""
MODULE_WORDS = 64
"""Words of the runtime's module data that are searched for the limits of code."""
TRAP = 0xCC
MOST_PADDING = 64
"""Largest number of INT3 bytes between functions that are treated as padding."""


class Table(NamedTuple):
    """Functions by address; F functions."""

    start: Array
    """(F,) u8, addresses, ascending."""
    stop: Array
    """(F,) u8, the address after the last byte without padding."""
    name: list[str]
    """(F), as in Go: `main.(*Stack).Push`; "" if the place of the name is damaged."""


def name_go_functions(program: Program) -> None:
    """Add the functions of Go's table to those of symbols; at equal addresses the symbol counts."""
    table = read_table(program)
    if table is None:
        return
    fresh = np.flatnonzero(~member(table.start, program.function_address))
    address = np.concatenate([program.function_address, table.start[fresh]])
    size = np.concatenate([program.function_size, (table.stop - table.start)[fresh]])
    names = program.function_name + [table.name[i] for i in fresh.tolist()]
    order = np.argsort(address, kind="stable")
    program.function_address, program.function_size = address[order], size[order]
    program.function_name = [names[i] for i in order.tolist()]


def read_table(program: Program) -> Table | None:
    """Return the functions of the first valid table of a program; None if there is none."""
    for section, place in _candidates(program):
        result = _Reader(program, section, place).table()
        if result is not None:
            return result
    return None


def _candidates(program: Program) -> Iterator[tuple[Section, int]]:
    """Yield places of a table: the section of that name, else each place with a possible header."""
    named = [section for section in program.sections if section.name.endswith(SECTION)]
    for section in named or program.sections:
        if named:
            yield section, 0
            continue
        first = -section.address % 4
        words = section.linked[first : first + max(0, len(section.linked) - first) // 4 * 4]
        numbers = words.view("<u4")
        high = np.flatnonzero((numbers == MAGICS[0]) | (numbers == MAGICS[1]))
        rest = numbers[np.minimum(high + 1, len(numbers) - 1)]
        wanted = rest == np.uint32(1 << 16 | program.word << 24)
        for place in (first + 4 * high[wanted]).tolist():
            yield section, place


class _Reader:
    """Reads one table; each number is checked against the program before it is used."""

    def __init__(self, program: Program, section: Section, place: int) -> None:
        self.program, self.word = program, program.word
        self.address = section.address + place
        self.data = section.linked[place:]
        sections = [one for one in program.sections if one.execute and not one.stubs]
        self.code = [(one.address, one.stop) for one in sections]

    def table(self) -> Table | None:
        if len(self.data) < HEADER or self.data[4:8].tolist() != [0, 0, 1, self.word]:
            return None
        if int(self.data[:4].view("<u4")[0]) not in MAGICS:
            return None
        table, names = self._number(7), self._number(3)
        rows = self._entries(self._number(0), table)
        if rows is None:
            return None
        functions = self._functions(rows, table, self._number(2), names)
        # Later linkers do not write the beginning of code.
        return functions or self._functions(rows, table, self._text(rows), names)

    def _number(self, place: int) -> int:
        """Return a word of the header after its first eight bytes; 0 if the data end before it."""
        at = HEADER + place * self.word
        return int.from_bytes(self.data[at : at + self.word].tobytes(), "little")

    def _entries(self, count: int, table: int) -> Array | None:
        end = table + (2 * count + 1) * SIZE
        if not 0 < count <= len(self.data) or not 0 < table < end <= len(self.data):
            return None
        numbers = self.data[table:end].view("<u4").astype(np.uint64)
        return np.append(numbers, np.uint64(0)).reshape(-1, 2)

    def _functions(self, rows: Array, table: int, base: int, names: int) -> Table | None:
        address = rows[:, 0] + np.uint64(base)
        start, stop = address[:-1], address[1:]
        low, high = self._section(start[0])
        sound = (start < stop).all() and low <= int(start[0]) and int(stop[-1]) <= high
        if not sound:
            return None
        records = rows[:-1, 1] + np.uint64(table)
        inside = records <= np.uint64(max(0, len(self.data) - 2 * SIZE))
        # A record repeats the function's address, which proves that the table is valid.
        place = np.where(inside, records, 0).astype(np.int64)
        if not ((numbers_at(self.data, place, "<u4") == rows[:-1, 0]) & inside).all():
            return None
        text = numbers_at(self.data, place + SIZE, "<u4") + np.int64(min(names, len(self.data)))
        return Table(start, self._trim(start, stop), self._names(text))

    def _section(self, address: np.uint64) -> tuple[int, int]:
        """Return the limits of the code section of an address; (1, 0) outside of code."""
        inside = (one for one in self.code if one[0] <= int(address) < one[1])
        return next(inside, (1, 0))

    def _trim(self, start: Array, stop: Array) -> Array:
        low, high = self._section(start[0])
        code = self.program.read(low, high - low)
        end = (stop - np.uint64(low)).astype(np.int64)
        first = (start - np.uint64(low)).astype(np.int64)
        for _ in range(MOST_PADDING):
            padded = (end - 1 > first) & (code[end - 1] == TRAP)
            if not padded.any():
                break
            end -= padded
        return end.astype(np.uint64) + np.uint64(low)

    def _names(self, places: Array) -> list[str]:
        data = self.data.tobytes()
        left = MOST_TEXT * len(data)
        result = []
        for place in places.tolist():
            end = data.find(b"\0", place, place + LONGEST_NAME) if place > 0 else -1
            left -= max(0, end - place)
            name = data[place:end] if end > 0 and left > 0 else b""
            result.append(name.decode("utf-8", "replace"))
        return result

    def _text(self, rows: Array) -> int:
        """Return where Go's code begins, from the runtime's module data.

        They begin with a pointer to the table, and contain the lowest and the highest address of
        functions, whose difference is known.
        """
        length = int(rows[-1, 0]) - int(rows[0, 0])
        for section in self.program.sections:
            first = -section.address % self.word
            size = max(0, len(section.linked) - first) // self.word * self.word
            words = section.linked[first : first + size].view(f"<u{self.word}")
            for at in np.flatnonzero(words == self.address).tolist():
                module = words[at : at + MODULE_WORDS].astype(np.uint64)
                for low in module[:-1][module[1:] - module[:-1] == np.uint64(length)].tolist():
                    if self._section(np.uint64(low)) != (1, 0):
                        return int(low) - int(rows[0, 0])
        return 0
