"""Join the blocks of an execution with records of a store of blocks, by their addresses.

A program and each of its libraries lie somewhere in memory, moved by a whole number of pages. Where
they lie is read from a map, or found: each block that ran and each block of a program with the same
place in its page are a vote for a move, and the right one gets nearly all of them.

A block of the store ends where another one begins, even if no jump is there. A producer that
translates code as it runs (valgrind, QEMU) goes on to the next jump or call.
"""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from tokmill.bbv.store_blocks import Blocks, Program
from tokmill.bbv.traces.addresses import PAGE, Addresses, Mapped
from tokmill.store.schema import Array, ranges

LONGEST = 50
"""Instructions of a block of valgrind at most (`--vex-guest-max-insns`)."""


class Chains(NamedTuple):
    """The records of each row, and how many instructions of each it executes."""

    offsets: Array
    """int64, rows + 1."""
    records: Array
    """int64."""
    weights: Array
    """Instructions: int64, at least 1."""


def follow(program: Program, rows: Array, begun: Array, taken: Array | None) -> Chains:
    """Return the blocks through which some blocks that ran go.

    Args:
        rows: (n,) the row of `program` in which each begins.
        begun: (n,) whether it begins where that row begins; others stay in their row.
        taken: (rows of the program,) whether another block that ran begins there, where the blocks
            of a producer do not overlap; None where they do, and have at most 50 instructions.
    """
    n = len(rows)
    most = LONGEST if taken is None else 1 << 30
    first = program.instructions[rows]
    owners, at = [np.arange(n)], [rows]
    weights = [np.where(begun, first.clip(1, most), 1)]
    left = most - first
    open_rows = np.flatnonzero(begun & program.falls[rows] & (left > 0))
    current = rows[open_rows]
    while len(open_rows):
        current = current + 1
        if taken is not None:
            free = ~taken[current]
            open_rows, current = open_rows[free], current[free]
        length = np.minimum(program.instructions[current], left[open_rows])
        owners.append(open_rows)
        at.append(current)
        weights.append(length)
        left[open_rows] -= program.instructions[current]
        on = program.falls[current] & (left[open_rows] > 0) & (length > 0)
        open_rows, current = open_rows[on], current[on]
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    offsets = np.searchsorted(owner[order], np.arange(n + 1)).astype(np.int64)
    records = program.records[np.concatenate(at)[order]]
    return Chains(offsets, records, np.concatenate(weights)[order].clip(min=1))


def spread(counts: Array, offsets: Array, weights: Array) -> Array:
    """Return counts (uint64) divided among parts by their weights; what is left over goes to the
    first part.

    `offsets` (n + 1) and `weights` are the parts of each of the n counts. No count is lost.
    """
    lengths = np.diff(offsets)
    wholes = np.add.reduceat(weights, offsets[:-1]) if len(weights) else weights
    whole = np.repeat(wholes.astype(np.uint64), lengths)
    each = np.repeat(counts, lengths)
    weight = weights.astype(np.uint64)
    # count · weight / whole without 64 bits being exceeded.
    parts = each // whole * weight + each % whole * weight // whole
    if len(parts):
        parts[offsets[:-1]] += counts - np.add.reduceat(parts, offsets[:-1])
    return parts


LEAST_VOTES = 3
LEAST_SHARE = 0.6
"""Votes / blocks that ran in the range of a program; by chance it is well below a half."""
LARGEST = 1 << 47
"""User addresses of x86-64 end here."""

BEGINS, INSIDE, NO_BLOCK, NO_PROGRAM, NO_ADDRESS = range(5)
"""What became of a block that ran."""
REASONS = {
    NO_BLOCK: "no block of the program lies there",
    NO_PROGRAM: "no program of the store lies there",
    NO_ADDRESS: "the pc file has no such id",
}


class Joined(NamedTuple):
    """What the rows of a pc file are in a store of blocks."""

    records: Array
    """int64 record in which a row begins, -1 for none."""
    chains: Chains
    """All records through which a row goes; none for a row without a record."""
    how: Array
    """uint8 a row: `BEGINS` … `NO_PROGRAM`."""
    shared: Array
    """bool a row: whether several functions have the block; `records` has the first."""
    placed: list[tuple[str, int]]
    """Name of a program that lay in memory, and its address there less that in the file."""
    missing: list[str]
    """Files of the map in which blocks ran and that the store does not have."""


def join(addresses: Addresses, blocks: Blocks, mapped: Sequence[Mapped] = ()) -> Joined:
    """Return the record of each block that ran.

    A block that begins inside of a block of the store belongs to that record: its producer has cut
    a long block, or entered it in the middle. One that begins with a block of the store and goes on
    through the next blocks is divided among them (`chains`). Of a block that several functions
    share, the first record is taken.
    """
    at = addresses.at.astype(np.int64)
    at[addresses.at >= LARGEST] = -1
    records = np.full(len(at), -1, np.int64)
    how = np.full(len(at), NO_PROGRAM, np.uint8)
    shared = np.zeros(len(at), bool)
    placed: list[tuple[str, int]] = []
    chains: list[tuple[Array, Chains]] = []
    open_rows = at >= 0
    places, missing, equal = _by_map(at, blocks.programs, mapped)
    placed_names = {*equal, *(program.name for program, _ in places)}
    while True:
        if places:
            program, base = places.pop(0)
        else:
            # Those that the map does not place are looked for among what is left.
            rest = [one for one in blocks.programs if one.name not in placed_names]
            best = _best(at[open_rows], rest)
            if best is None:
                break
            program, base = best
            placed_names.add(program.name)
        here = np.flatnonzero(open_rows & _in_range(at, program, base))
        rows, begins = program.find(at[here] - base)
        there = rows >= 0
        records[here[there]] = program.records[rows[there]]
        shared[here[there]] = program.shared[rows[there]]
        taken = None
        if not addresses.overlap:
            taken = np.isin(program.starts + base, at)
        chains.append((here[there], follow(program, rows[there], begins[there], taken)))
        how[here] = np.where(begins, BEGINS, np.where(there, INSIDE, NO_BLOCK))
        open_rows[here] = False
        placed.append((program.name, base))
    return Joined(records, _all_chains(len(at), chains), how, shared, placed, missing)


def _all_chains(length: int, parts: Sequence[tuple[Array, Chains]]) -> Chains:
    if not parts:
        empty = np.zeros(0, np.int64)
        return Chains(np.zeros(length + 1, np.int64), empty, empty)
    owner = np.concatenate([np.repeat(rows, np.diff(chain.offsets)) for rows, chain in parts])
    order = np.argsort(owner, kind="stable")
    offsets = np.searchsorted(owner[order], np.arange(length + 1)).astype(np.int64)
    records = np.concatenate([chain.records for _, chain in parts])[order]
    weights = np.concatenate([chain.weights for _, chain in parts])[order]
    return Chains(offsets, records, weights)


def _in_range(at: Array, program: Program, base: int) -> Array:
    low, high = program.starts[0] + base, program.starts[-1] + base + PAGE
    return (at >= low) & (at < high)


def _votes(at: Array, program: Program) -> tuple[int, int]:
    """Return the base that most blocks vote for, the lowest of equal ones, and its votes."""
    order = np.argsort(program.starts % PAGE, kind="stable")
    starts = program.starts[order]
    low = np.searchsorted(starts % PAGE, at % PAGE, side="left")
    count = np.searchsorted(starts % PAGE, at % PAGE, side="right") - low
    bases = np.repeat(at, count) - starts[ranges(low, count)]
    if not len(bases):
        return 0, 0
    candidates, votes = np.unique(bases, return_counts=True)
    best = int(votes.argmax())
    return int(candidates[best]), int(votes[best])


def _best(at: Array, programs: Sequence[Program]) -> tuple[Program, int] | None:
    """Return the program that most blocks vote for, and where it lies; None if none is sure."""
    sure = []
    for number, program in enumerate(programs):
        base, votes = _votes(at, program)
        ran = int(_in_range(at, program, base).sum())
        if votes >= LEAST_VOTES and votes >= LEAST_SHARE * ran:
            sure.append((-votes, number, base))
    if not sure:
        return None
    _, number, base = min(sure)
    return programs[number], base


def _by_map(
    at: Array, programs: Sequence[Program], mapped: Sequence[Mapped]
) -> tuple[list[tuple[Program, int]], list[str], list[str]]:
    """Return (program, base) of the files of a map, the files that are no program's, and programs
    of which no one is the file's.

    Of several programs of a file's name the one with the longest common end of the path counts,
    and of these the one with most of the blocks that ran. If two are equal, it may be either.
    """
    named: dict[str, list[Program]] = {}
    for program in programs:
        named.setdefault(PurePosixPath(program.name).name, []).append(program)
    places, missing, equal = [], [], []
    ends = [one.low for one in mapped[1:]] + [LARGEST] * bool(mapped)
    for one, following in zip(mapped, ends, strict=True):
        ran = at[(at >= one.low) & (at < (one.high or following))]
        if not len(ran):
            continue
        # A program that is not moved is mapped where its file says.
        choices = []
        for program in named.get(PurePosixPath(one.path).name, ()):
            bases = (one.low, 0, one.low - int(program.starts[0]) // PAGE * PAGE)
            begun, base = max((int(np.isin(ran - b, program.starts).sum()), b) for b in bases)
            if begun:
                choices.append((_common_end(program.name, one.path), begun, program, base))
        choices.sort(key=lambda choice: choice[:2], reverse=True)
        best = [choice for choice in choices if choice[:2] == choices[0][:2]]
        if len(best) == 1:
            places.append(best[0][2:])
        else:
            missing.append(one.path)
            equal += [choice[2].name for choice in best]
    return places, missing, equal


def _common_end(a: str, b: str) -> int:
    """Return the number of equal last parts of two paths."""
    pairs = zip(reversed(PurePosixPath(a).parts), reversed(PurePosixPath(b).parts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
