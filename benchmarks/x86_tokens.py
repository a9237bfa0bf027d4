"""Instructions to a column of phrases, beside bare decoding and beside the rules without a cache.

The programs are on the machine: ELF files for x86-64 of 0.3 to 12 MB, in the order of the digests
of their names. The gate: equal tokens, instruction by instruction, on a part of each program.
"""

from __future__ import annotations

import hashlib
import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from iced_x86 import Decoder

from tokmill.store.schema import Array
from tokmill.x86.tokens.rules import COLUMNS, align, tokenize_bytes
from tokmill.x86.tokens.templates import Templates
from tokmill.x86.tokens.vocabularies.vocabulary import closed

ROOTS = ("/usr/bin", "/usr/sbin", "/usr/lib/x86_64-linux-gnu")
INSTRUCTIONS = 5_000_000
PROGRAMS = 10
OTHERS = 1_000_000
CHECKED = 5_000
"""Instructions of each program that are read without a cache too."""
ROUNDS = 3


class Code(NamedTuple):
    """The decodable instructions of a program's .text, end to end."""

    name: str
    data: bytes
    count: int


def candidates() -> list[Path]:
    """Return the files to look at, each content once."""
    found = {}
    for root in ROOTS:
        for path in Path(root).glob("*"):
            if path.is_file() and not path.is_symlink() and 300_000 < path.stat().st_size < 12e6:
                found[hashlib.sha256(path.name.encode()).hexdigest()] = path
    return [path for _, path in sorted(found.items())]


def read(path: Path) -> Code | None:
    """Return the code of a program; None where it is none for x86-64."""
    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            section = elf.get_section_by_name(".text")
            if elf["e_machine"] != "EM_X86_64" or section is None:
                return None
            data: bytes = section.data()
    except ELFError:
        return None
    found = [(len(instruction), bool(instruction)) for instruction in Decoder(64, data)]
    lengths, good = (np.array(column) for column in zip(*found, strict=True))
    kept = np.frombuffer(data, np.uint8)[: lengths.sum()][np.repeat(good, lengths)]
    return Code(path.name, kept.tobytes(), int(good.sum()))


def choose() -> tuple[list[Code], list[Code]]:
    """Return the programs, and others of which none is among them."""
    programs: list[Code] = []
    others: list[Code] = []
    for path in candidates():
        code = read(path)
        if code is None:
            continue
        enough = sum(part.count for part in programs) >= INSTRUCTIONS and len(programs) >= PROGRAMS
        (others if enough else programs).append(code)
        if sum(part.count for part in others) >= OTHERS:
            return programs, others
    raise SystemExit("too few programs on this machine; no figure")


def phrases(templates: Templates, programs: list[Code]) -> float:
    """Return the CPU seconds from bytes to columns of phrases, lengths of instructions included."""
    started = time.process_time()
    for program in programs:
        lengths = np.fromiter(map(len, Decoder(64, program.data)), np.uint8)
        templates.numbers(np.frombuffer(program.data, np.uint8), lengths)
    return time.process_time() - started


def bare(programs: list[Code]) -> float:
    """Return the CPU seconds of decoding alone."""
    started = time.process_time()
    for program in programs:
        for _ in Decoder(64, program.data):
            pass
    return time.process_time() - started


def without_cache(programs: list[Code]) -> tuple[float, int]:
    """Return CPU seconds and instructions of the rules alone; tokens are checked to be equal."""
    seconds, count = 0.0, 0
    templates = Templates("tokmill", 64, closed())
    names = {column: closed()[column].tokens for column in COLUMNS}
    for program in programs:
        lengths = np.fromiter(map(len, islice(Decoder(64, program.data), CHECKED)), np.uint8)
        code = np.frombuffer(program.data, np.uint8, int(lengths.sum()))
        started = time.process_time()
        wanted = tokenize_bytes(code.tobytes(), 0)
        seconds += time.process_time() - started
        count += len(wanted)
        numbers = templates.numbers(code, lengths)
        rows = text_of(templates, numbers, names)
        if [align(tokens) for tokens in wanted] != [rows[number] for number in numbers.tolist()]:
            raise SystemExit(f"{program.name}: tokens differ with the cache; no figure")
    return seconds, count


def text_of(
    templates: Templates, numbers: Array, names: dict[str, list[str]]
) -> dict[int, dict[str, list[str]]]:
    """Return the aligned tokens of each number."""
    offsets, columns = templates.table()
    return {
        number: {
            column: [names[column][i] for i in ids[offsets[number] : offsets[number + 1]].tolist()]
            for column, ids in columns.items()
        }
        for number in np.unique(numbers).tolist()
    }


def main() -> list[str]:
    """Measure; return the section for RESULTS.md."""
    programs, others = choose()
    count, more = (sum(program.count for program in part) for part in (programs, others))
    slow_seconds, slow_count = without_cache(programs)
    decoding, cold, after, again = [], [], [], []
    for _ in range(ROUNDS):
        templates = Templates("tokmill", 64, closed())
        decoding.append(bare(programs) / count)
        cold.append(phrases(templates, programs) / count)
        again.append(phrases(templates, programs) / count)
        after.append(phrases(templates, others) / more)
    rows = [
        ("bare decoding with iced-x86", min(decoding)),
        ("bytes to phrases, empty cache", min(cold)),
        (f"the same on {len(others)} other programs after these", min(after)),
        ("the same on the same programs again", min(again)),
        ("the rules alone, without a cache", slow_seconds / slow_count),
    ]
    return [
        f"{count:,} instructions of {len(programs)} programs, CPU time, tokens verified equal on "
        f"{slow_count:,}; {len(templates.index):,} kinds of instructions in the cache.",
        "",
        "| what | million instructions a second | of bare decoding |",
        "|---|---|---|",
        *(
            f"| {what} | {1e-6 / seconds:.2f} | {min(decoding) / seconds:.1%} |"
            for what, seconds in rows
        ),
        "",
        f"With an empty cache it is {slow_seconds / slow_count / min(cold):.0f} times as fast as "
        "the rules alone.",
    ]


if __name__ == "__main__":
    print("\n".join(main()))
