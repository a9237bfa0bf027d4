"""Dumps of valgrind's callgrind: what ran between two dumps, instruction by instruction.

Format: https://valgrind.org/docs/manual/cl-format.html, written with `--dump-instr=yes
--dump-line=no --compress-pos=no`. Addresses are those of the program's file.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors
from tokmill.bbv.store_blocks import LONGEST_INSTRUCTION
from tokmill.bbv.traces.addresses import Addresses, Mapped
from tokmill.bbv.traces.block_vectors import BlockVectors
from tokmill.store.schema import Array

NAMED = re.compile(r"\((\d+)\)(?: (.*))?")
UNKNOWN = "???"
FILE_BITS = 36
"""Addresses of a file have at most so many bits; each file gets a range of its own."""
MOST_FILES = 1 << (47 - FILE_BITS)
ENDS_BLOCK = ("Bc", "Bi")
"""Events of branches: conditional and indirect ones that were executed."""


class Dump(NamedTuple):
    """What ran between two dumps."""

    part: int
    keys: Array
    """Where each instruction lies: the number of its file and its address in it (int64)."""
    counts: Array
    """How often each was executed (int64)."""
    totals: dict[str, int]
    """Event → its number."""


class Code(NamedTuple):
    """What all dumps of a run say of its code."""

    files: dict[str, int]
    """Path → number."""
    ends: set[int]
    """Keys of instructions that end a block: calls and branches."""
    functions: dict[int, str]
    """Key of the first instruction of a function in a dump → its name."""


def read_dump(path: Path, code: Code) -> Dump:
    """Read a dump, and add its files, functions and branches to `code`."""
    names: dict[str, str] = {}
    function_names: dict[str, str] = {}
    keys: list[int] = []
    counts: list[int] = []
    totals: dict[str, int] = {}
    events: list[str] = []
    branches: list[int] = []
    base, part, function, called = 0, 0, "", False
    with machine_errors("read", path), open(path, encoding="utf-8", errors="replace") as file:
        try:
            for line in file:
                if line.startswith("0x"):
                    cells = line.split()
                    key = base + int(cells[0], 16)
                    if called:
                        # The cost of what was called, which stands there too.
                        called = False
                        code.ends.add(key)
                        continue
                    if function:
                        code.functions.setdefault(key, function)
                        function = ""
                    keys.append(key)
                    counts.append(int(cells[1]))
                    if any(column < len(cells) and cells[column] != "0" for column in branches):
                        code.ends.add(key)
                elif line.startswith("calls="):
                    called = True
                elif line.startswith("ob="):
                    name = _name(line[3:], names)
                    number = code.files.setdefault(name, len(code.files) + 1)
                    if number >= MOST_FILES:
                        raise ValueError("too many files")
                    base = number << FILE_BITS
                elif line.startswith("fn="):
                    symbol = _name(line[3:], function_names)
                    function = "" if symbol.startswith("0x") else symbol
                elif line.startswith(("cob=", "cfn=")):
                    _name(line[4:], names if line.startswith("cob=") else function_names)
                elif line.startswith("events: "):
                    events = line.split()[1:]
                    branches = [1 + events.index(name) for name in ENDS_BLOCK if name in events]
                elif line.startswith("totals: "):
                    values = [*map(int, line.split()[1:])]
                    values += [0] * (len(events) - len(values))
                    totals = dict(zip(events, values, strict=True))
                elif line.startswith("part: "):
                    part = int(line.split()[1])
                elif line.startswith("positions: ") and line.split()[1:] != ["instr"]:
                    raise ValueError("its positions are not addresses of instructions")
            at = np.array(keys, np.int64)
            number_of = np.array(counts, np.int64)
        except (ValueError, IndexError, OverflowError) as error:
            raise _damaged(path, str(error)) from None
    return _checked(path, Dump(part, at, number_of, totals))


def _checked(path: Path, dump: Dump) -> Dump:
    if "Ir" not in dump.totals:
        raise TokmillError(
            "the dump of callgrind cannot be read: it does not end with its totals",
            where=str(path),
            hint="a program that ends by starting another in its place (env, sh -c, many scripts) "
            "leaves none: name the other one; otherwise run the same command again",
        )
    if int(dump.counts.sum()) != dump.totals["Ir"]:
        raise _damaged(path, f"its lines have {dump.counts.sum():,} instructions, it says "
                             f"{dump.totals['Ir']:,}")  # fmt: skip
    return dump


def _name(text: str, names: dict[str, str]) -> str:
    """Return the name of `(3) name`, and remember it; of `(3)`, the one that was given before."""
    text = text.rstrip("\n")
    match = NAMED.fullmatch(text)
    if match is None:
        return text
    if match[2] is not None:
        names[match[1]] = match[2]
    return names.get(match[1], "")


def _damaged(path: Path, why: str) -> TokmillError:
    return TokmillError(
        f"the dump of callgrind cannot be read: {why}",
        where=str(path),
        hint="run the same command again",
    )


def merge_dumps(dumps: Sequence[Dump], groups: Sequence[int]) -> list[Dump]:
    """Return one dump for each run of dumps that begins at a number of `groups`."""
    result = []
    for first, stop in zip(groups, [*groups[1:], len(dumps)], strict=True):
        some = dumps[first:stop]
        totals = {name: sum(dump.totals[name] for dump in some) for name in some[0].totals}
        keys = np.concatenate([dump.keys for dump in some])
        result.append(
            Dump(some[0].part, keys, np.concatenate([dump.counts for dump in some]), totals)
        )
    return result


def vectors_of(dumps: Sequence[Dump], code: Code) -> tuple[BlockVectors, Addresses, list[Mapped]]:
    """Return the basic block vectors of dumps, in their order, with pc file and map.

    A block is a run of instructions next to each other that were executed equally often between
    any two dumps; it ends at calls and branches, and a function begins another. Each file lies in a
    range of addresses of its own.
    """
    keys = np.unique(np.concatenate([dump.keys for dump in dumps]))
    # A hash of how often an instruction was executed in each dump; 64 bits of odd multipliers.
    history = np.zeros(len(keys), np.uint64)
    draw = np.random.default_rng(0)
    rows = []
    for dump in dumps:
        row = np.searchsorted(keys, dump.keys)
        factor = np.uint64(draw.integers(1 << 62) * 2 + 1)
        with np.errstate(over="ignore"):
            np.add.at(history, row, dump.counts.astype(np.uint64) * factor)
        rows.append(row)
    begins = np.ones(len(keys), bool)
    begins[1:] = (np.diff(keys) > LONGEST_INSTRUCTION) | (history[1:] != history[:-1])
    ends = np.isin(keys, np.fromiter(code.ends, np.int64, len(code.ends)))
    begins[1:] |= ends[:-1]
    begins |= np.isin(keys, np.fromiter(code.functions, np.int64, len(code.functions)))
    block = np.cumsum(begins)
    ids: list[Array] = []
    counts: list[Array] = []
    for dump, row in zip(dumps, rows, strict=True):
        sums = np.bincount(block[row], dump.counts, minlength=len(keys) + 1)
        ran = np.flatnonzero(sums)
        ids.append(ran.astype(np.int64))
        counts.append(sums[ran].astype(np.uint64))
    indptr = np.cumsum([0, *map(len, ids)]).astype(np.int64)
    vectors = BlockVectors(indptr, np.concatenate(ids), np.concatenate(counts))
    at = keys[begins]
    functions = {
        number: code.functions[key]
        for number, key in enumerate(at.tolist(), 1)
        if key in code.functions
    }
    addresses = Addresses(np.arange(1, len(at) + 1), at.astype(np.uint64), functions, overlap=False)
    mapped = [
        Mapped(number << FILE_BITS, 0, path)
        for path, number in code.files.items()
        if path and path != UNKNOWN
    ]
    return vectors, addresses, mapped
