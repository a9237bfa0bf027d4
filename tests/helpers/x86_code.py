"""Real code for tests of x86: instructions of programs that are here, and the comparison."""

import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from elftools.elf.elffile import ELFFile
from iced_x86 import Decoder

from tokmill.x86.tokens.rules import COLUMNS, align, decode, make_rules
from tokmill.x86.tokens.templates import Templates

SYSTEM = ("/bin/bash", "/usr/bin/git", "/usr/bin/perl", "/lib/x86_64-linux-gnu/libc.so.6")
PACKAGES = ("numpy", "tokenizers", "gigatoken", "iced_x86", "lief", "msgspec")


def programs() -> list[Path]:
    """Return ELF programs for x86-64: of the system, and native parts of installed packages."""
    library = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDLIBRARY"))
    found = [Path(sys.executable), library, *(Path(name) for name in SYSTEM)]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec and spec.origin
        parts = sorted(Path(spec.origin).parent.rglob("*.so"), key=lambda path: path.stat().st_size)
        found += parts[-4:]
    kept = dict.fromkeys(path.resolve() for path in found if path.suffix != ".a")
    return [path for path in kept if path.is_file()]


def text_of(path: Path) -> bytes:
    """Return the section .text of an ELF file for x86-64."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        assert elf["e_machine"] == "EM_X86_64", path
        data: bytes = elf.get_section_by_name(".text").data()
        return data


def decodable(code: bytes, bits: int = 64) -> tuple[Any, Any]:
    """Return the instructions of some bytes, end to end, and their lengths; others are left out."""
    found = [(len(instruction), bool(instruction)) for instruction in Decoder(bits, code)]
    lengths = np.array([length for length, _ in found], np.uint8)
    good = np.array([is_good for _, is_good in found], bool)
    kept = np.frombuffer(code, np.uint8)[: lengths.sum()][np.repeat(good, lengths)]
    return kept, lengths[good]


def written(templates: Templates, numbers: Any) -> Iterator[dict[str, list[str]]]:
    """Yield the aligned tokens that each number stands for."""
    offsets, columns = templates.table()
    tokens = {column: list(ids) for column, ids in templates.ids.items()}
    rows: dict[int, dict[str, list[str]]] = {}
    for number in numbers.tolist():
        if number not in rows:
            part = slice(offsets[number], offsets[number + 1])
            rows[number] = {
                column: [tokens[column][i] for i in columns[column][part].tolist()]
                for column in COLUMNS
            }
        yield rows[number]


def check_equal(templates: Templates, code: Any, lengths: Any, address: int = 0x401000) -> None:
    """Compare with the rules alone, every instruction at its own address."""
    rules = make_rules(templates.name, templates.bits)
    data = code.tobytes()
    numbers = templates.numbers(code, lengths)
    instructions = decode(data, address, templates.bits)
    for instruction, found in zip(instructions, written(templates, numbers), strict=True):
        if align(rules.tokens(instruction)) != found:
            start = instruction.ip - address
            raw = data[start : start + instruction.len].hex()
            raise AssertionError(f"{raw}: {align(rules.tokens(instruction))} != {found}")
