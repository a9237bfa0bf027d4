"""A program as it lies in memory, and arithmetic on ranges of addresses and on sorted numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.store.schema import Array


def expand(begins: Array, counts: Array) -> Array:
    """Return begins[0], begins[0] + 1, … (counts[0] numbers), then those of begins[1], … (i8)."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begins - ends + counts, counts) + np.arange(total)


def offsets(counts: Array) -> Array:
    """Return the beginning of each of n successive ranges, and the end of the last: (n + 1,) i8."""
    result = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=result[1:])
    return result


def member(values: Array, ordered: Array) -> Array:
    """Return for each value whether it is among sorted values: (n,) bool."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    result: Array = ordered[at] == values
    return result


def distinct(*parts: Array) -> Array:
    """Return the values of some arrays, each once, ascending.

    They are sorted; `np.unique` uses hashes, which takes many times as long.
    """
    values = np.sort(np.concatenate(parts) if len(parts) > 1 else parts[0])
    first = np.ones(len(values), bool)
    first[1:] = values[1:] != values[:-1]
    return values[first]


def numbered(values: Array) -> tuple[Array, Array]:
    """Return the different values (u8), ascending, and the number of each value among them (i8).

    As `np.unique` with `return_inverse`, in less than half of the time: a value and its place are
    sorted as one number.
    """
    size = len(values)
    if not size:
        return values, np.zeros(0, np.int64)
    bits = np.uint64((size - 1).bit_length())
    places = np.uint64((1 << int(bits)) - 1)
    short = int(values.max()) >> (64 - int(bits)) == 0
    # The lowest bits of long values give way to the place.
    packed = (values << bits) if short else (values & ~places)
    packed |= np.arange(size, dtype=np.uint64)
    packed.sort()
    packed &= places
    order = packed.astype(np.int64)
    values = values[order]
    if not short and (values[1:] < values[:-1]).any():
        # Values that differ in their lowest bits alone are not in order.
        again = np.argsort(values, kind="stable")
        values, order = values[again], order[again]
    first = np.ones(size, bool)
    first[1:] = values[1:] != values[:-1]
    number = np.empty(size, np.int64)
    number[order] = np.cumsum(first) - 1
    return values[first], number


def without(values: Array, others: Array) -> Array:
    """Return the values that are not among others, each once, ascending."""
    result = distinct(values)
    return result[~member(result, np.sort(others))]


NONE = np.zeros(0, np.uint64)
FRAGMENT = re.compile(r"\.cold(\.\d+)?$")
"""Names of what a compiler moved out of a function because it is rarely reached."""


@dataclass(slots=True)
class Section:
    """A run of bytes at an address."""

    name: str
    """"" where the file has no section table."""
    address: int
    data: Array
    """u1, as in the file."""
    linked: Array
    """u1, with the relocations that are known applied; the same array where there are none."""
    execute: bool
    stubs: bool = False
    """Holds import stubs (`.plt`) and no functions of the program."""
    constant: bool = False
    """Cannot be written, or only while the program is loaded."""

    @property
    def stop(self) -> int:
        """The address after the last byte."""
        return self.address + len(self.data)

    def cut(self, start: int, stop: int) -> Section:
        """Return the part between two places, counted from the section's beginning."""
        data = self.data[start:stop]
        linked = data if self.linked is self.data else self.linked[start:stop]
        at = self.address + start
        return replace(self, address=at, data=data, linked=linked)


@dataclass(slots=True)
class Unwind:
    """The ranges of code that unwind tables describe, sorted by address; R ranges."""

    start: Array = field(default_factory=lambda: NONE)
    """(R,) u8."""
    stop: Array = field(default_factory=lambda: NONE)
    """(R,) u8."""
    fragment: Array = field(default_factory=lambda: np.zeros(0, bool))
    """(R,) bool: it begins with a frame that other code set up, so it is part of a function."""
    pad: Array = field(default_factory=lambda: NONE)
    """u8, addresses where control goes on after an exception (landing pads)."""
    pad_range: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """i8, the range that each landing pad serves."""


@dataclass(slots=True)
class Program:
    """Sections, functions, imports and pointers of an ELF or PE file.

    A relocatable file is laid out from 0x400000 on, its relocations applied. All addresses are u8.
    """

    name: str
    """The path that was opened."""
    form: Literal["ELF", "PE"]
    kind: Literal["executable", "shared", "relocatable"]
    bits: int
    """64 or 32."""
    word: int
    """Bytes of a pointer: 8 or 4."""
    sections: list[Section]
    """Those that are loaded, sorted by address, without overlap."""
    entry: int = 0
    """0 where there is none."""
    function_address: Array = field(default_factory=lambda: NONE)
    """Function symbols, ascending, one an address."""
    function_size: Array = field(default_factory=lambda: NONE)
    """0 where it is not known."""
    function_name: list[str] = field(default_factory=list)
    """Raw (mangled) names."""
    fragments: Array = field(default_factory=lambda: NONE)
    """Symbols of parts that a compiler moved out of their function (`.cold`)."""
    import_address: Array = field(default_factory=lambda: NONE)
    """Import stubs, ascending, and made-up places of the undefined symbols of a relocatable."""
    import_name: list[str] = field(default_factory=list)
    import_target: Array = field(default_factory=lambda: NONE)
    """Where the program itself defines the import; 0 where another one does."""
    slot_address: Array = field(default_factory=lambda: NONE)
    """Places in memory that hold the address of an import, ascending."""
    slot_name: list[str] = field(default_factory=list)
    slot_target: Array = field(default_factory=lambda: NONE)
    """As `import_target`."""
    slot_full_name: list[str] = field(default_factory=list)
    """`library!name` in PE files, `library!#7` for an ordinal; empty where `slot_name` is all."""
    symbol_address: Array = field(default_factory=lambda: NONE)
    """All names of functions and of data, in the order of the file."""
    symbol_size: Array = field(default_factory=lambda: NONE)
    """0 where it is not known."""
    symbol_name: list[str] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)
    """Names that other programs can use, sorted."""
    starts: Array = field(default_factory=lambda: NONE)
    """Functions that tables name without a symbol (initialisers, exports)."""
    pointers: Array = field(default_factory=lambda: NONE)
    """Values of relocated pointers."""
    pointer_address: Array = field(default_factory=lambda: NONE)
    """Where these pointers lie; empty for a relocatable file."""
    unwind: Unwind = field(default_factory=Unwind)
    global_offset_table: int = 0
    """What EBX holds in 32-bit position-independent code; 0 where it is not known."""
    fixed: bool = False
    """It is loaded where the file says, so an address may stand in an instruction."""
    thread: range = range(0)
    """Invented addresses of thread-local data; they end at the thread pointer."""
    thread_data: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    """u1, what lies first in them."""
    thread_modules: Array = field(default_factory=lambda: NONE)
    """Words from which code finds all of them, by distances from the first."""
    top: int = 0
    """Behind all that is loaded, what is not in the file (`.bss`) too; 0 where it is not known."""

    def section_at(self, address: int) -> Section | None:
        for section in self.sections:
            if section.address <= address < section.stop:
                return section
        return None

    def read(self, address: int, size: int) -> Array:
        """Return up to `size` bytes at an address, linked; fewer where the section ends."""
        section = self.section_at(address)
        if section is None:
            return np.zeros(0, np.uint8)
        place = address - section.address
        return section.linked[place : place + size]

    def load(self, addresses: Array) -> Array:
        """Return the pointers (u8) that lie at addresses; 0 where nothing is loaded."""
        result = np.zeros(len(addresses), np.uint64)
        for section in self.sections:
            place, here = self._inside(section, addresses)
            cells = section.linked[place[:, None] + np.arange(self.word)]
            result[here] = cells.view(f"<u{self.word}")[:, 0]
        return result

    def store(self, addresses: Array, values: Array) -> None:
        """Write pointers into the linked bytes, which are copied first."""
        for section in self.sections:
            place, here = self._inside(section, addresses)
            if not len(place):
                continue
            if section.linked is section.data:
                section.linked = section.data.copy()
            cells = values[here].astype(f"<u{self.word}").view(np.uint8).reshape(-1, self.word)
            section.linked[place[:, None] + np.arange(self.word)] = cells

    def _inside(self, section: Section, addresses: Array) -> tuple[Array, Array]:
        last = len(section.data) - self.word
        if last < 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        place = addresses - np.uint64(section.address)
        here = np.flatnonzero(place <= np.uint64(last))
        return place[here].astype(np.int64), here


def tidy(sections: list[Section], size: int) -> list[Section]:
    """Return sections in order of address, without overlap and no larger than the file together.

    In a sound file nothing overlaps; a damaged one must not cost more memory than a sound one.
    """
    result: list[Section] = []
    stop = total = 0
    for section in sorted(sections, key=lambda one: one.address):
        cut = max(0, stop - section.address)
        length = len(section.data) - cut
        length = min(length, size - total, (1 << 64) - 1 - section.address - cut)
        if length > 0:
            result.append(section.cut(cut, cut + length))
            stop = result[-1].stop
            total += length
    return result


def refuse_cut(path: str, size: int, needed: int) -> None:
    """Raise `TokmillError` for a file of `size` bytes whose headers speak of more."""
    if needed > size:
        raise TokmillError(
            "the file is cut off",
            where=path,
            hint=f"it ends at {size:,} bytes, its headers speak of {needed:,}: "
            "copy or download it again",
        )


def name_functions(
    program: Program, address: Array, size: Array, rank: Array, names: list[str]
) -> None:
    """Set the function symbols and fragments of a program, those that lie in its code.

    One an address, the best (lowest) ranked; among equal ranks the shortest name wins, then the
    first in the alphabet.
    """
    inside = np.zeros(len(address), bool)
    for section in program.sections:
        if section.execute and not section.stubs:
            inside |= address - np.uint64(section.address) < np.uint64(len(section.data))
    cold = np.asarray([FRAGMENT.search(name) is not None for name in names], bool)
    program.fragments = distinct(address[inside & cold])
    inside &= ~cold & np.asarray([name != "" for name in names], bool)
    addresses, ranks = address.tolist(), rank.tolist()
    order = sorted(
        np.flatnonzero(inside).tolist(),
        key=lambda i: (addresses[i], ranks[i], len(names[i]), names[i]),
    )
    ordered = address[order].astype(np.uint64)
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    begins = np.flatnonzero(first)
    program.function_address = ordered[begins]
    program.function_name = [names[order[i]] for i in begins.tolist()]
    sizes = size[order].astype(np.uint64)
    program.function_size = np.maximum.reduceat(sizes, begins) if len(begins) else NONE
