"""The compiler and the optimisation level of a program, from its debug information.

Compilers write a text into each compilation unit (`DW_AT_producer`); GCC writes its options there,
Clang only its version. The texts are looked for in the sections that hold them, because reading
the units takes longer than lifting.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tokmill.base.errors import TokmillError
from tokmill.x86.image.elf import MAGIC, Elf
from tokmill.x86.image.program import mapped

STRINGS, INFO = ".debug_str", ".debug_info"
SECTIONS = (STRINGS, ".debug_line_str", INFO)
"""Where the texts are; Go writes them into the units themselves."""
MOST_BYTES = 64 << 20
"""Bytes of each that are searched, after unpacking."""
LONGEST = 1 << 12
MOST_UNITS, HEADER, BEGIN = 256, 11, 40
"""Units that are counted; bytes of a unit's header; bytes in which its producer stands."""
COMPRESSED, ZLIB = 1 << 11, 1
MARKS = (b"GNU ", b"rustc version ", b"clang version ", b"Go cmd/compile ")
COMPILERS = (
    (re.compile(r"^GNU (?!AS)\S+ (\d[\d.]*)"), "gcc"),
    (re.compile(r"rustc version (\d[\d.]*)"), "rustc"),
    (re.compile(r"clang version (\d[\d.]*)"), "clang"),
    (re.compile(r"^Go cmd/compile go(\d[\d.]*)"), "go"),
)
LEVEL = re.compile(r"(?<!\S)-O(\w*)")


class Made(NamedTuple):
    """Compiler and level of a program; "": not known."""

    compiler: str = ""
    """Such as gcc-12.2.0."""
    level: str = ""
    """Such as O2."""


def made_by(path: Path) -> Made:
    """Return compiler and level of most units of a program.

    They are not known without debug information, or if it is damaged; for object files; and for
    other formats than ELF.
    """
    try:
        data = mapped(path)
        if data[:4].tobytes() != MAGIC:
            return Made()
        elf = Elf(data, str(path))
    except TokmillError:
        return Made()
    if elf.kind == "relocatable" or INFO not in elf.section_names:
        return Made()
    sections = {name: _section(elf, name) for name in SECTIONS}
    producers = {
        (name, place): one
        for name, data in sections.items()
        for place, text in _producers(data)
        if (one := read_producer(text)).compiler
    }
    places = {
        at.to_bytes(4, "little"): one for (name, at), one in producers.items() if name == STRINGS
    }
    units = Counter(_of_units(sections[INFO], places))
    units.update(one for (name, _), one in producers.items() if name == INFO)
    # Without places in the units all texts count the same, and must agree.
    best = [units.most_common(1)[0][0]] if units else list(producers.values())
    compilers, levels = {one.compiler for one in best}, {one.level for one in best}
    compiler = compilers.pop() if len(compilers) == 1 else ""
    return Made(compiler, levels.pop() if len(levels) == 1 else "")


def _of_units(info: bytes, places: Mapping[bytes, Made]) -> Iterator[Made]:
    """Yield the producer of each unit of `.debug_info` that begins with the place of one."""
    at = 0
    for _ in range(MOST_UNITS):
        size = int.from_bytes(info[at : at + 4], "little")
        if not size:
            break
        begin = info[at + HEADER : at + BEGIN]
        yield from (one for place, one in places.items() if place in begin)
        at += 4 + size


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


def _producers(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield place and content of the texts between zeros that hold one of `MARKS`."""
    for mark in MARKS:
        at = data.find(mark)
        while at >= 0:
            begin = data.rfind(b"\0", max(0, at - LONGEST), at) + 1
            end = data.find(b"\0", at, at + LONGEST)
            end = end if end >= 0 else at + LONGEST
            yield begin, data[begin:end].decode("utf-8", "replace")
            at = data.find(mark, at + 1)


def _section(elf: Elf, name: str) -> bytes:
    """Return the beginning of a section, unpacked if it is compressed with zlib."""
    if name not in elf.section_names:
        return b""
    number = elf.section_names.index(name)
    raw = elf.content(number).data
    if not int(elf.sections["flags"][number]) & COMPRESSED:
        return bytes(raw[:MOST_BYTES])
    if int.from_bytes(raw[:4], "little") != ZLIB:
        return b""
    try:
        return zlib.decompressobj().decompress(raw[24 if elf.width == 64 else 12 :], MOST_BYTES)
    except zlib.error:
        return b""
