"""The compiler and the optimisation level of a program, from its debug information.

Only the first entry of each unit in `.debug_info` is read, for its `DW_AT_producer`. DWARF 2 to 5,
sections 7.5 to 7.7 of the standard; GCC writes its options there, Clang only its version.

pyelftools takes 10 to 30 times the CPU time: for ninja 174 ms instead of 8, which is more than
lifting takes (80 ms).
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokmill.base.errors import TokmillError
from tokmill.x86.image.elf import MAGIC, Elf
from tokmill.x86.image.program import mapped

MOST_UNITS = 256
"""Units that are read; the compiler of a program is that of most of them."""
MOST_ABBREVIATIONS = 1 << 12
"""Bytes of abbreviations that are searched."""
MOST_BYTES = 64 << 20
"""Largest size to which a compressed section is unpacked."""
COMPRESSED, ZLIB = 1 << 11, 1
PRODUCER, STRING_OFFSETS = 0x25, 0x72
COMPILERS = (
    (re.compile(r"^GNU (?!AS)\S+ (\d[\d.]*)"), "gcc"),
    (re.compile(r"rustc version (\d[\d.]*)"), "rustc"),
    (re.compile(r"clang version (\d[\d.]*)"), "clang"),
    (re.compile(r"^Go cmd/compile go(\d[\d.]*)"), "go"),
)
LEVEL = re.compile(r"(?<!\S)-O(\w*)")
FIXED = {
    0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1, 0x11: 1, 0x12: 2, 0x13: 4, 0x14: 8, 0x19: 0,
    0x1C: 4, 0x1E: 16, 0x20: 8, 0x21: 0, 0x24: 8, 0x25: 1, 0x26: 2, 0x27: 3, 0x28: 4, 0x29: 1,
    0x2A: 2, 0x2B: 3, 0x2C: 4,
}  # fmt: skip
"""Form → bytes of its value."""
OFFSETS = {0x0E, 0x10, 0x17, 0x1D, 0x1F, 0x1F20, 0x1F21}
"""Forms that are an offset: 4 bytes, or 8 in 64-bit DWARF."""
NUMBERS = {0x0D, 0x0F, 0x15, 0x1A, 0x1B, 0x22, 0x23}
BLOCKS = {0x03: 2, 0x04: 4, 0x0A: 1}
"""Form of a block → bytes of its length."""
STRING_NUMBERS = {0x1A, 0x25, 0x26, 0x27, 0x28}


class Made(NamedTuple):
    """Compiler and level of a program; "": not known."""

    compiler: str = ""
    """Such as gcc-12.2.0."""
    level: str = ""
    """Such as O2."""


def made_by(path: Path) -> Made:
    """Return compiler and level of most units of a program.

    They are not known without debug information, or if it is damaged; for object files, whose
    strings are not in place yet; and for other formats than ELF.
    """
    try:
        data = mapped(path)
        if data[:4].tobytes() != MAGIC:
            return Made()
        elf = Elf(data, str(path))
    except TokmillError:
        return Made()
    if elf.kind == "relocatable" or ".debug_info" not in elf.section_names:
        return Made()
    found: Counter[Made] = Counter()
    try:
        for producer in _Units(elf).producers():
            made = read_producer(producer)
            if made.compiler:
                found[made] += 1
    except (IndexError, ValueError, zlib.error):
        pass  # The rest of a damaged section is lost.
    return found.most_common(1)[0][0] if found else Made()


def read_producer(text: str) -> Made:
    for pattern, name in COMPILERS:
        version = pattern.search(text)
        if version:
            levels = LEVEL.findall(text)
            # GCC writes its options, so if there is no level it is the default.
            default = "O0" if name == "gcc" else ""
            level = f"O{levels[-1] or '1'}" if levels else default
            return Made(f"{name}-{version[1].rstrip('.')}", level)
    return Made()


class _Units:
    """The units of the debug information of a program."""

    def __init__(self, elf: Elf) -> None:
        self.info = _section(elf, ".debug_info")
        self.abbreviations = _section(elf, ".debug_abbrev")
        self.strings = _section(elf, ".debug_str")
        self.line_strings = _section(elf, ".debug_line_str")
        self.string_offsets = _section(elf, ".debug_str_offsets")

    def producers(self) -> Iterator[str]:
        """Yield the producers of the units."""
        place = 0
        for _ in range(MOST_UNITS):
            if place + 11 > len(self.info):
                return
            wide = self.info[place : place + 4] == b"\xff" * 4
            size = 8 if wide else 4
            place += 4 if wide else 0
            length = _number(self.info, place, size)
            begin = place + size
            place = begin + length
            producer = self._producer(begin, size)
            if producer:
                yield producer

    def _producer(self, at: int, size: int) -> str:
        version = _number(self.info, at, 2)
        if not 2 <= version <= 5:
            return ""
        if version == 5:
            kind, address = self.info[at + 2], self.info[at + 3]
            abbreviations, at = _number(self.info, at + 4, size), at + 4 + size
            if kind not in (1, 3, 4):
                return ""
            # A skeleton has the id of its full unit.
            at += 8 if kind == 4 else 0
        else:
            abbreviations, address = _number(self.info, at + 2, size), self.info[at + 2 + size]
            at += 3 + size
        code, at = _leb(self.info, at)
        producer: tuple[int, int] | None = None
        base = 16 if size == 8 else 8
        for attribute, form in self._attributes(abbreviations, code):
            if form == 0x16:
                form, at = _leb(self.info, at)
            if attribute == PRODUCER:
                producer = form, at
            if attribute == STRING_OFFSETS:
                base = _number(self.info, at, size)
            at = self._behind(form, at, size, address, version)
        return self._string(*producer, base, size) if producer else ""

    def _attributes(self, at: int, code: int) -> Iterator[tuple[int, int]]:
        # That of the first entry is near the beginning; damaged tables may be long.
        data, at = self.abbreviations[at : at + MOST_ABBREVIATIONS], 0
        while True:
            number, at = _leb(data, at)
            if not number:
                return
            _, at = _leb(data, at)
            at += 1
            while True:
                attribute, at = _leb(data, at)
                form, at = _leb(data, at)
                if form == 0x21:
                    _, at = _leb(data, at)
                if not attribute and not form:
                    break
                if number == code:
                    yield attribute, form
            if number == code:
                return

    def _behind(self, form: int, at: int, size: int, address: int, version: int) -> int:
        """Return where a value ends."""
        if form in FIXED:
            return at + FIXED[form]
        if form == 0x01 or (form == 0x10 and version == 2):
            return at + address
        if form in OFFSETS:
            return at + size
        if form in NUMBERS:
            return _leb(self.info, at)[1]
        if form in BLOCKS:
            return at + BLOCKS[form] + _number(self.info, at, BLOCKS[form])
        if form in (0x09, 0x18):
            length, at = _leb(self.info, at)
            return at + length
        if form == 0x08:
            return at + len(_raw(self.info, at)) + 1
        raise ValueError(f"form {form:#x}")

    def _string(self, form: int, at: int, base: int, size: int) -> str:
        if form == 0x08:
            return _text(self.info, at)
        if form in STRING_NUMBERS:
            number = _leb(self.info, at)[0] if form == 0x1A else _number(self.info, at, FIXED[form])
            return _text(self.strings, _number(self.string_offsets, base + number * size, size))
        if form == 0x0E:
            return _text(self.strings, _number(self.info, at, size))
        if form == 0x1F:
            return _text(self.line_strings, _number(self.info, at, size))
        return ""


def _section(elf: Elf, name: str) -> memoryview | bytes:
    """Return a section, unpacked if it is compressed with zlib."""
    if name not in elf.section_names:
        return b""
    number = elf.section_names.index(name)
    raw = elf.content(number).data
    if not int(elf.sections["flags"][number]) & COMPRESSED:
        return raw
    if _number(raw, 0, 4) != ZLIB:
        return b""
    return zlib.decompressobj().decompress(raw[24 if elf.width == 64 else 12 :], MOST_BYTES)


def _number(data: memoryview | bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError(at)
    return int.from_bytes(data[at : at + size], "little")


def _leb(data: memoryview | bytes, at: int) -> tuple[int, int]:
    """Return an unsigned LEB128 number (the low bits of a signed one) and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _text(data: memoryview | bytes, at: int) -> str:
    return _raw(data, at).decode("utf-8", "replace")


def _raw(data: memoryview | bytes, at: int) -> bytes:
    return bytes(data[at : at + 4096]).partition(b"\0")[0]
