"""Counts of tokens in programs, from which vocabularies are made."""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.builds.scan import FolderOptions
from tokmill.store.schema import Array
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.lifting import Seen, find_inputs, map_graphs
from tokmill.x86.tokens.rules import COLUMNS, DecodeError, make_rules
from tokmill.x86.tokens.templates import Templates

BLOCK = 1 << 20
"""Instructions that are counted at a time."""

Counts = dict[str, dict[str, int]]
"""Column → token → number of occurrences."""


class Counted(msgspec.Struct, frozen=True):
    """The result of `count_programs`."""

    programs: int
    instructions: int
    counts: Counts
    refused: dict[str, str]
    """Program → why it was not counted."""
    left_out: dict[str, int]
    """Reason → number of files in folders that were not read."""


def count_programs(
    inputs: Sequence[str],
    rules: str,
    *,
    levels: Sequence[str] | None = None,
    workers: int = 0,
    title: str = "count",
    choice: FolderOptions | None = None,
    quiet: bool = True,
) -> Counted:
    """Count the tokens of each column in programs, pickles and graph files; none is lifted twice.

    `mne` and `eflag` have one token for each instruction, the other columns one for each token of
    `asm`. A block that several functions share is counted for each, as in a store. The result does
    not depend on `workers`.
    """
    make_rules(rules)
    files, left_out = find_inputs(inputs, choice)
    sums: dict[str, Counter[str]] = {column: Counter() for column in COLUMNS}
    programs = instructions = 0
    refused: dict[str, Seen] = {}
    look = functools.partial(count_graph, rules)
    for seen in map_graphs(look, files, levels=levels, workers=workers, title=title, quiet=quiet):
        if seen.refused:
            refused[seen.program] = seen
            continue
        number, counts = seen.value
        programs += 1
        instructions += number
        for column, part in counts.items():
            sums[column].update(part)
    if not programs:
        raise nothing_read(inputs, refused)
    totals = {column: dict(sorted(counts.items())) for column, counts in sums.items()}
    why = {name: refused[name].refused for name in sorted(refused)}
    return Counted(programs, instructions, totals, why, left_out)


def nothing_read(inputs: Sequence[str], refused: Mapping[str, Seen]) -> TokmillError:
    for name, seen in sorted(refused.items()):
        return TokmillError(f"no program was read: {seen.refused}", where=name, hint=seen.hint)
    return TokmillError(
        "there is no program",
        where=", ".join(inputs),
        hint="ELF and PE files for x86 are read, pickles of BinaryCorp and graphs of `tokmill cfg`",
    )


def count_graph(rules: str, graph: Graph) -> tuple[int, Counts]:
    """Return the number of instructions of a graph, and the counts of their tokens.

    Functions with bytes that the rules cannot decode are left out, as in a build.
    """
    ends = graph.block_instructions[graph.function_blocks]
    try:
        return len(graph.lengths), _counts(graph, rules, 0, int(ends[-1]))
    except DecodeError:
        pass
    instructions = 0
    sums: dict[str, Counter[str]] = {column: Counter() for column in COLUMNS}
    for first, last in pairwise(ends.tolist()):
        with contextlib.suppress(DecodeError):
            for column, counts in _counts(graph, rules, first, last).items():
                sums[column].update(counts)
            instructions += last - first
    return instructions, {column: dict(counts) for column, counts in sums.items()}


def _counts(graph: Graph, rules: str, first: int, last: int) -> Counts:
    sums: dict[str, Counter[str]] = {column: Counter() for column in COLUMNS}
    templates = _templates(rules, graph.bits)
    for code, lengths in parts(graph, first, last):
        for column, counts in templates.counts(templates.numbers(code, lengths)).items():
            sums[column].update(counts)
    return {column: dict(counts) for column, counts in sums.items()}


def parts(graph: Graph, first: int, last: int, size: int = BLOCK) -> Iterator[tuple[Array, Array]]:
    """Yield code (u1) and lengths (u1) of instructions `first` to `last`, `size` at a time."""
    begin = int(graph.lengths[:first].sum(dtype=np.int64))
    for start in range(first, last, size):
        lengths = graph.lengths[start : min(start + size, last)]
        end = begin + int(lengths.sum(dtype=np.int64))
        yield graph.code[begin:end], lengths
        begin = end


@functools.cache
def _templates(rules: str, bits: int) -> Templates:
    return Templates(rules, bits)
