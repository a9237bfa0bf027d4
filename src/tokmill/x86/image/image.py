"""A program as it lies in memory, its strings, and arithmetic on ranges and on sorted numbers.

Printable strings are those of C, in UTF-8 or UTF-16, and those of a length: Go and Rust put strings
side by side without a zero between them; their lengths are in the code.
"""

import re
from bisect import bisect_right
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


def owners(ends: Array) -> Array:
    """Return the number of the range of each element (i8), of ranges as of `offsets`."""
    return np.repeat(np.arange(len(ends) - 1, dtype=np.int64), np.diff(ends))


def find(sorted_values: Array, wanted: Array) -> tuple[Array, Array]:
    place = np.searchsorted(sorted_values, wanted)
    there = place < len(sorted_values)
    there[there] = sorted_values[place[there]] == wanted[there]
    return place, there


def numbers_at(data: Array, places: Array, kind: str) -> Array:
    """Return the numbers of a dtype, such as `<i4`, that begin at places of bytes: (n,)."""
    count = max(0, len(data) - np.dtype(kind).itemsize + 1)
    numbers: Array = np.ndarray((count,), kind, data.data, strides=(1,))
    return numbers[places]


def member(values: Array, ordered: Array) -> Array:
    """Return for each value whether it is among sorted values: (n,) bool."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[at] == values


def changes(values: Array) -> Array:
    """Return which values are not equal to the one before them: (n,) bool."""
    result = np.ones(len(values), bool)
    result[1:] = values[1:] != values[:-1]
    return result


def distinct(*parts: Array) -> Array:
    """Return the values of some arrays, each once, ascending.

    They are sorted; `np.unique` uses hashes, which takes many times as long.
    """
    values = np.sort(np.concatenate(parts) if len(parts) > 1 else parts[0])
    return values[changes(values)]


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
    first = changes(values)
    number = np.empty(size, np.int64)
    number[order] = np.cumsum(first) - 1
    return values[first], number


def without(values: Array, removed: Array) -> Array:
    result = distinct(values)
    return result[~member(result, np.sort(removed))]


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

    def cut(self, start: int, stop: int) -> "Section":
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
        place = bisect_right(self.sections, address, key=lambda section: section.address) - 1
        found = self.sections[place] if place >= 0 else None
        return found if found is not None and address < found.stop else None

    def read(self, address: int, size: int) -> Array:
        """Return up to `size` bytes at an address, linked; fewer where the section ends."""
        section = self.section_at(address)
        if section is None:
            return np.zeros(0, np.uint8)
        place = address - section.address
        return section.linked[place : place + size]

    def load(self, addresses: Array, size: int = 0) -> Array:
        """Return numbers (u8) of `size` bytes, 0: of a pointer's; they are 0 where nothing is."""
        result = np.zeros(len(addresses), np.uint64)
        for section in self.sections:
            place, here = self._inside(section, addresses, size or self.word)
            result[here] = numbers_at(section.linked, place, f"<u{size or self.word}")
        return result

    def store(self, addresses: Array, values: Array) -> None:
        """Write pointers into the linked bytes, which are copied first."""
        for section in self.sections:
            place, here = self._inside(section, addresses, self.word)
            if not len(place):
                continue
            if section.linked is section.data:
                section.linked = section.data.copy()
            cells = values[here].astype(f"<u{self.word}").view(np.uint8).reshape(-1, self.word)
            section.linked[place[:, None] + np.arange(self.word)] = cells

    def _inside(self, section: Section, addresses: Array, size: int) -> tuple[Array, Array]:
        last = len(section.data) - size
        if last < 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        place = addresses - np.uint64(section.address)
        here = np.flatnonzero(place <= np.uint64(last))
        return place[here].astype(np.int64), here


def clipped(sections: list[Section], size: int) -> list[Section]:
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
    begins = np.flatnonzero(changes(ordered))
    program.function_address = ordered[begins]
    program.function_name = [names[order[i]] for i in begins.tolist()]
    sizes = size[order].astype(np.uint64)
    program.function_size = np.maximum.reduceat(sizes, begins) if len(begins) else NONE


FEWEST = 3
"""Characters that a string has at least: fewer are found in tables of numbers, too."""
LONGEST = 4096
"""Bytes that a string has at most before its end."""
LONGEST_COUNTED = 512
"""Bytes of a string without an end: larger numbers beside an address are mostly no lengths."""
STEP = 64
"""Characters that are looked at together."""
AT_ONCE = 1 << 16
"""Addresses that are looked at together."""
ESCAPES = "\a\b\t\n\v\f\r\x1b"
"""What may be in a string and is not printable."""


GO = "runtime.morestack"
"""A function that every program by Go has, which its table of functions names."""
RUST = re.compile(rb"/rustc/[0-9a-f]{40}/")
"""Where the library's source lay; errors name places in it."""


def _printable() -> Array:
    result = np.zeros(256, bool)
    result[0x20:0x7F] = True
    result[[ord(letter) for letter in ESCAPES]] = True
    return result


ASCII = _printable()
MAY_BE = ASCII | (np.arange(256) >= 0x80)
"""Which bytes may be in a string of UTF-8."""


def strings_at(program: Program, addresses: Array) -> dict[int, str]:
    """Return the strings that begin at some addresses (u8, different ones): address → string.

    A string ends in a zero. It is UTF-8, or UTF-16 that begins with an ASCII character and is
    ASCII for the larger part. A string of another kind is left out.
    """
    result: dict[int, str] = {}
    for section in program.sections:
        place = addresses - np.uint64(section.address)
        inside = np.sort(place[place < np.uint64(len(section.data))].astype(np.int64))
        for begin in range(0, len(inside), AT_ONCE):
            result |= _in_section(section, inside[begin : begin + AT_ONCE])
    return result


def has_counted_strings(program: Program) -> bool:
    """Say whether a program is by Go or Rust, by what stays in stripped ones too."""
    if any(name.startswith(GO) for name in program.function_name):
        return True
    return any(
        RUST.search(section.linked.data) for section in program.sections if not section.execute
    )


def counted_strings(
    program: Program, addresses: Array, lengths: Array
) -> dict[tuple[int, int], str]:
    """Return the strings of UTF-8 that begin at some addresses (u8) and have some lengths (i8).

    The result is by address and length in bytes.
    """
    result: dict[tuple[int, int], str] = {}
    for section in program.sections:
        data, place = section.linked, addresses - np.uint64(section.address)
        rows = np.flatnonzero((place < np.uint64(len(data))) & (lengths >= FEWEST))
        begin, length = place[rows].astype(np.int64), lengths[rows]
        inside = (length <= LONGEST_COUNTED) & (begin + length <= len(data))
        for first, size in set(zip(begin[inside].tolist(), length[inside].tolist(), strict=True)):
            text = _text(data[first : first + size].tobytes(), "utf-8")
            if text:
                result[section.address + first, size] = text
    return result


def _in_section(section: Section, place: Array) -> dict[int, str]:
    data = section.linked
    end, ended = _ends(data, place, MAY_BE)
    result = _decoded(data, place[ended], end[ended], "utf-8", section.address)
    # A zero after one character is half of one of UTF-16.
    rows = place[ended & (end == place + 1) & ASCII[data[place]]]
    for odd in (0, 1):
        units = data[odd : odd + (len(data) - odd) // 2 * 2].view("<u2")
        first = (rows[rows % 2 == odd] - odd) // 2
        end, ended = _ends(units, first, None)
        begin, end = 2 * first[ended] + odd, 2 * end[ended] + odd
        result |= _decoded(data, begin, end, "utf-16-le", section.address)
    return result


def _ends(units: Array, place: Array, allowed: Array | None) -> tuple[Array, Array]:
    """Return where runs from some places end (i8), and whether a zero ends them in time (bool).

    `allowed` tells for each unit but zero whether it may be in a run; None: every one.
    """
    end, ended = place.copy(), np.zeros(len(place), bool)
    going = np.arange(len(place))
    for _ in range(0, LONGEST, STEP):
        if not len(going):
            break
        at = end[going][:, None] + np.arange(STEP)
        cells = units[np.minimum(at, len(units) - 1)]
        stops = (cells == 0) | (at >= len(units))
        if allowed is not None:
            stops |= ~allowed[cells]
        stopped = stops.any(axis=1)
        first = np.where(stopped, stops.argmax(axis=1), STEP)
        end[going] += first
        rows = going[stopped]
        here = end[rows]
        inside = here < len(units)
        ended[rows[inside]] = units[here[inside]] == 0
        going = going[~stopped]
    return end, ended


def _decoded(data: Array, begin: Array, end: Array, encoding: str, base: int) -> dict[int, str]:
    result: dict[int, str] = {}
    for first, last in zip(begin.tolist(), end.tolist(), strict=True):
        text = _text(data[first:last].tobytes(), encoding)
        if text and (encoding == "utf-8" or _is_wide(text)):
            result[base + first] = text
    return result


def _text(raw: bytes, encoding: str) -> str:
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        return ""
    printable = text.isprintable() or all(one.isprintable() or one in ESCAPES for one in text)
    return text if printable and len(text) >= FEWEST else ""


def _is_wide(text: str) -> bool:
    """Say whether most of a text is ASCII: other pairs of bytes are letters of some script too."""
    return 2 * sum(one.isascii() for one in text) > len(text)
