"""Opens a program file (ELF or PE for x86), and says what it was built from and by which compiler.

The key of a program (project, compiler, level …) is read from its path by a template. Compilers
write a text into each compilation unit (`DW_AT_producer`); GCC writes its options there, Clang only
its version. The texts are looked for in the sections that hold them, because reading the units
takes longer than lifting.
"""

import functools
import mmap
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import ChildDied, ChildError, shared
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import machine_errors
from tokmill.store.schema import Array
from tokmill.x86.image import elf, pe
from tokmill.x86.image.elf import MAGIC, Elf
from tokmill.x86.image.gopclntab import name_go_functions
from tokmill.x86.image.image import Program

UNKNOWN = "unknown"
LEVELS = ("O0", "O1", "O2", "O3", "Os", "Oz", "Og", "Ofast")
"""Optimisation levels of compilers."""
BINARYCORP = re.compile(
    r"(?=.*-(?:[0-9a-f]{32}|saved_index-\w+-[0-9]+)$)(?:.*/)?"
    rf"(?P<project>[^/]+)-(?P<program>[^/-]+)-(?P<level>{'|'.join(LEVELS)})-\w+"
)
"""Names of BinaryCorp, with an md5, and those of the programs of its `saved_index.pkl`."""


class Key(NamedTuple):
    """Distinguishes programs that were built from the same source; columns have these names."""

    project: str
    program: str
    version: str
    compiler: str
    level: str


class KeyTemplate:
    """A template such as `{project}/{compiler}-{level}/{program}`.

    A field matches within one name of the path; only `{program}` may contain slashes. If a path
    fits in several ways, fields are as long as possible; `{level}` contains no dash.
    """

    def __init__(self, template: str) -> None:
        """Read a template; raises `UsageError` if it has no field, an unknown one, or one twice.

        The empty template fits every path, and only sets the program, or in the names of
        `BINARYCORP` all that they say.
        """
        self.template = template
        parts = re.split(r"\{(.*?)\}", template)
        fields = parts[1::2]
        wrong = [field for field in fields if field not in Key._fields]
        if wrong or len(set(fields)) < len(fields) or (template and not fields):
            raise UsageError(
                f"layout: {template!r} is not a template of a path",
                hint=f"fields, each once: {' '.join(f'{{{field}}}' for field in Key._fields)}",
            )
        patterns = {"program": ".+", "level": "[^/-]+"}
        for place, field in enumerate(fields):
            parts[2 * place + 1] = f"(?P<{field}>{patterns.get(field, '[^/]+')})"
        parts[::2] = map(re.escape, parts[::2])
        self._pattern = re.compile("".join(parts)) if template else BINARYCORP

    def fields(self, name: str) -> Mapping[str, str] | None:
        """Return the fields of an input's name; None if it does not fit."""
        match = self._pattern.fullmatch(name)
        return match.groupdict() if match else None if self.template else {}

    def key(self, name: str, compiler: str = "", level: str = "") -> Key:
        """Return the key of a program; fields that are not known are `unknown`."""
        values = {"program": name, "compiler": compiler, "level": level}
        values |= dict(self.fields(name) or {})
        return Key(*(values.get(field) or UNKNOWN for field in Key._fields))


UNREADABLE = {
    b"!<arch>\n": ("a static library", "unpack it with `ar x` and give its object files"),
    b"!<thin>\n": ("a thin static library", "give the object files that it names"),
    b"BC\xc0\xde": ("LLVM bitcode", "compile without -flto, or link it first"),
    b"\x64\x86": ("a COFF object file", "link it first"),
    b"\x4c\x01": ("a COFF object file", "link it first"),
}
"""First bytes of files → what they are, and what to do."""
READABLE = "ELF and PE files for x86 are read"


def open_program(path: Path | str) -> Program:
    """Read an ELF or PE file for x86: static, PIE, shared or relocatable, stripped or not.

    Raises `TokmillError` for a file of another kind or machine, a damaged one, and one without
    code; `MachineError` for one that cannot be read.
    """
    return parse_program(mapped(Path(path)), str(path))


def mapped(path: Path) -> Array:
    """Return the bytes of a file (u1), mapped; raises as `open_program`."""
    with machine_errors("read", path):
        if not path.is_file():
            what = "not a file" if path.exists() else "there is no such file"
            what = "a folder, not a program" if path.is_dir() else what
            raise TokmillError(what, where=str(path), hint="give the path of a program")
        with open(path, "rb") as file:
            if path.stat().st_size == 0:
                raise TokmillError("an empty file", where=str(path), hint=READABLE)
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(view, np.uint8)


def parse_program(data: Array, path: str) -> Program:
    """Read a program from its bytes (u1); `path`: its name, from which a PE file is read again."""
    head = data[:8].tobytes()
    if head.startswith(elf.MAGIC):
        from tokmill.x86.image.elf_image import read_elf

        program = read_elf(data, path)
        name_go_functions(program)
        return program
    if head.startswith(pe.MAGIC):
        program = pe.read_pe(data, path)
        name_go_functions(program)
        return program
    for magic, (what, hint) in UNREADABLE.items():
        if head.startswith(magic):
            raise TokmillError(what, where=path, hint=hint)
    raise TokmillError("not a program", where=path, hint=READABLE)


def demangle(names: list[str]) -> list[str]:
    """Return demangled C++ names (Itanium ABI); other names stay as they are.

    So do names that stand for more than 64 KiB: a few hundred bytes may stand for gigabytes.
    Raises `MissingExtraError` if a name is mangled and lief is not installed.
    """
    result, deaths = list(names), 0
    for i, name in enumerate(names):
        if not name.startswith(("_Z", "__Z")):
            continue
        plain = name
        if len(REFERENCES.findall(name)) <= FEW_REFERENCES:
            plain = demangled(name)
        elif deaths < MOST_DEATHS:
            try:
                plain = shared(f"{__name__}:demangled", Limits(seconds=5, memory=128 << 20))(name)
            except (ChildDied, ChildError):
                deaths += 1
        result[i] = plain
    return result


REFERENCES = re.compile("[ST][0-9A-Z]*_")
"""What stands in a mangled name for an earlier part of it, which may hold such parts too."""
FEW_REFERENCES = 20
"""So many cannot make a name more than some thousand times as long; few names have more."""
MOST_DEATHS = 3
LONGEST_NAME = 1 << 16


def demangled(name: str) -> str:
    symbol = _symbol()
    symbol.name = name
    plain: str = symbol.demangled_name
    # lief takes `DF16b` and `DF64x`, types of C++23, for fixed-point types, which C++ has not.
    known = not re.search(r" _Accum\b", plain)
    return plain if 0 < len(plain) <= LONGEST_NAME and known else name


@functools.cache
def _symbol() -> Any:
    return plugins.require("lief").ELF.Symbol()


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


class Producer(NamedTuple):
    """Compiler and level of a program; "": not known."""

    compiler: str = ""
    """Such as gcc-12.2.0."""
    level: str = ""
    """Such as O2."""


def producer_of(path: Path) -> Producer:
    """Return compiler and level of most units of a program.

    They are not known without debug information, or if it is damaged; for object files; and for
    other formats than ELF.
    """
    try:
        data = mapped(path)
        if data[:4].tobytes() != MAGIC:
            return Producer()
        elf = Elf(data, str(path))
    except TokmillError:
        return Producer()
    if elf.kind == "relocatable" or INFO not in elf.section_names:
        return Producer()
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
    return Producer(compiler, levels.pop() if len(levels) == 1 else "")


def _of_units(info: bytes, places: Mapping[bytes, Producer]) -> Iterator[Producer]:
    """Yield the producer of each unit of `.debug_info` that begins with the place of one."""
    at = 0
    for _ in range(MOST_UNITS):
        size = int.from_bytes(info[at : at + 4], "little")
        if not size:
            break
        begin = info[at + HEADER : at + BEGIN]
        found = [place for place in places if place in begin]
        if found:
            # It is the first attribute; a later one may be the same number, most often 0.
            yield places[min(found, key=begin.find)]
        at += 4 + size


def read_producer(text: str) -> Producer:
    for pattern, name in COMPILERS:
        version = pattern.search(text)
        if version:
            levels = LEVEL.findall(text)
            # GCC writes its options, so if there is no level it is the default.
            default = "O0" if name == "gcc" else ""
            level = f"O{levels[-1] or '1'}" if levels else default
            return Producer(f"{name}-{version[1].rstrip('.')}", level)
    return Producer()


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
