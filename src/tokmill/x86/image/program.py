"""Opens a program file: ELF or PE for x86; other kinds are refused by their names."""

from __future__ import annotations

import functools
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import ChildDied, ChildError, shared
from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors
from tokmill.store.schema import Array
from tokmill.x86.image import elf, pe
from tokmill.x86.image.gopclntab import name_go_functions
from tokmill.x86.image.image import Program

OTHERS = {
    b"!<arch>\n": ("a static library", "unpack it with `ar x` and give its object files"),
    b"!<thin>\n": ("a thin static library", "give the object files that it names"),
    b"BC\xc0\xde": ("LLVM bitcode", "compile without -flto, or link it first"),
    b"\x64\x86": ("a COFF object file", "link it first"),
    b"\x4c\x01": ("a COFF object file", "link it first"),
}
"""First bytes of files → what they are, and what to do."""
KNOWN = "ELF and PE files for x86 are read"


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
                raise TokmillError("an empty file", where=str(path), hint=KNOWN)
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
    for magic, (what, hint) in OTHERS.items():
        if head.startswith(magic):
            raise TokmillError(what, where=path, hint=hint)
    raise TokmillError("not a program", where=path, hint=KNOWN)


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
    return plain if 0 < len(plain) <= LONGEST_NAME else name


@functools.cache
def _symbol() -> Any:
    return plugins.require("lief").ELF.Symbol()
