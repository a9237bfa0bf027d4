"""Which functions are looked for among which others, and how many are left out, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from tokmill.errors import UsageError, nearest
from tokmill.similarity.functions import SOURCE, Functions, numbers_of
from tokmill.store.hashes import first_of_equals
from tokmill.store.schema import Array

LEVEL_PAIRS = (("O0", "O3"), ("O1", "O3"), ("O2", "O3"), ("O0", "Os"), ("O1", "Os"), ("O2", "Os"))
MIN_BLOCKS = 5
UNNAMED = "functions without a name of their source"
NO_KEY = "functions whose compiler or level is not known"
SMALL = "functions of fewer blocks than asked for"
AMBIGUOUS = "functions whose name stands for several in their program"
NO_PARTNER = "without a partner"
ELSEWHERE = "in another program too"
DUPLICATE = "code of another pair"


@dataclass(slots=True)
class Kept:
    """The functions that may be compared, and how many are left out, and why."""

    rows: Array
    """Numbers of the functions, ascending by what was compiled."""
    source: Array
    """(n,) i8 of `Functions`, equal for what was compiled from the same function of a source."""
    left_out: dict[str, int]


@dataclass(slots=True)
class Task:
    """Queries and their matches: the same functions, compiled in two ways."""

    row: str
    """What it is reported under, such as O0-O3 or gcc-clang O2."""
    setting: str
    """What exactly is compared: gcc-12 O0 → gcc-12 O3."""
    query: Array
    """(n,) i8, numbers of functions."""
    target: Array
    """(n,) i8, the match of each query; the others are its negatives."""
    left_out: dict[str, int] = field(default_factory=dict)
    same_code: int = 0
    """Pairs whose two functions have the same code."""
    asked: Array | None = None
    """Numbers of the pairs that are queries, if not all are: the others are negatives alone."""

    def queries(self) -> Array:
        """Return the functions that are asked for."""
        return self.query if self.asked is None else self.query[self.asked]


def keep(functions: Functions, min_blocks: int = MIN_BLOCKS) -> Kept:
    """Return the functions that have a name, a compiler, a level and enough blocks.

    A name that stands more than once for one program, compiler and level (static functions of
    several files) says not which is the partner of which, so these are left out.
    """
    left_out: dict[str, int] = {}
    rows = np.arange(len(functions))

    def only(good: Array, why: str) -> None:
        nonlocal rows
        if lost := int(np.count_nonzero(~good[rows])):
            left_out[why] = lost
        rows = rows[good[rows]]

    only(functions.named, UNNAMED)
    only(functions.where_known("compiler") & functions.where_known("level"), NO_KEY)
    only((functions.blocks < 0) | (functions.blocks >= min_blocks), SMALL)
    source = numbers_of([functions.names[name].codes for name in SOURCE])
    whole = numbers_of([source, *(functions.names[n].codes for n in ("compiler", "level"))])
    times = np.bincount(whole[rows], minlength=int(whole.max(initial=-1)) + 1)
    only(times[whole] == 1, AMBIGUOUS)
    return Kept(rows[np.argsort(source[rows], kind="stable")], source, left_out)


def family(compiler: str) -> str:
    """Return the name of a compiler without its version: gcc of gcc-12.2.0."""
    found = re.match(r"[A-Za-z+]*", compiler)
    return found[0].lower() if found and found[0] else compiler


def tasks_of(functions: Functions, kept: Kept) -> Iterator[Task]:
    """Yield the tasks of a set of functions: pairs of levels, then pairs of compilers.

    A pair of levels is compared for each compiler apart, the first level being the query. Compilers
    of two families are compared at each level, in both directions.
    """
    compilers, levels = functions.names["compiler"], functions.names["level"]
    here: dict[tuple[int, int], Array] = {}
    for compiler in np.unique(compilers.codes[kept.rows]).tolist():
        of_compiler = kept.rows[compilers.codes[kept.rows] == compiler]
        for level in np.unique(levels.codes[of_compiler]).tolist():
            here[compiler, level] = of_compiler[levels.codes[of_compiler] == level]
    number = {name: i for i, name in enumerate(levels.names)}
    used = sorted({compiler for compiler, _ in here})

    def task(row: str, one: tuple[int, int], other: tuple[int, int]) -> Iterator[Task]:
        if one in here and other in here:
            said = [f"{compilers.names[c]} {levels.names[level]}" for c, level in (one, other)]
            yield _paired(functions, kept.source, row, " → ".join(said), here[one], here[other])

    for first, second in LEVEL_PAIRS:
        if first in number and second in number:
            for compiler in used:
                yield from task(
                    f"{first}-{second}", (compiler, number[first]), (compiler, number[second])
                )
    for level_name in sorted(number):
        for a, b in combinations(used, 2):
            kinds = family(compilers.names[a]), family(compilers.names[b])
            if kinds[0] != kinds[1]:
                if kinds[0] > kinds[1]:
                    a, b, kinds = b, a, kinds[::-1]
                row = f"{kinds[1]}-{kinds[0]} {level_name}" if kinds[1] == "gcc" else (
                    f"{kinds[0]}-{kinds[1]} {level_name}"
                )  # fmt: skip
                level = number[level_name]
                yield from task(row, (a, level), (b, level))
                yield from task(row, (b, level), (a, level))


def _paired(
    functions: Functions, source: Array, row: str, setting: str, one: Array, other: Array
) -> Task:
    """Return the pairs of two sets of functions, each function of a source at most once."""
    left_out: dict[str, int] = {}
    _, i, j = np.intersect1d(source[one], source[other], assume_unique=True, return_indices=True)
    query, target = one[i], other[j]
    if alone := len(one) + len(other) - 2 * len(query):
        left_out[NO_PARTNER] = alone
    name = numbers_of([functions.names[n].codes[query] for n in ("project", "function")])
    query, target = _first(name, query, target, ELSEWHERE, left_out)
    if functions.code is None:
        return Task(row, setting, query, target, left_out)
    for side in (0, 1):
        code = functions.code[(query, target)[side]]
        query, target = _first(code, query, target, DUPLICATE, left_out)
    same = int(np.count_nonzero(functions.code[query] == functions.code[target]))
    return Task(row, setting, query, target, left_out, same)


def _first(
    key: Array, query: Array, target: Array, why: str, left_out: dict[str, int]
) -> tuple[Array, Array]:
    """Return the first pair of each key, and count the others."""
    kept = first_of_equals(key) == np.arange(len(key))
    if lost := int(np.count_nonzero(~kept)):
        left_out[why] = left_out.get(why, 0) + lost
    return query[kept], target[kept]


def of_projects(functions: Functions, tasks: list[Task], projects: Sequence[str]) -> list[Task]:
    """Return tasks whose queries are of some projects; all others stay as negatives.

    Raises `UsageError` for a project that there is not.
    """
    known = functions.names["project"].names
    for name in projects:
        if name not in known:
            raise UsageError(f"there is no project {name!r}", hint=nearest(name, known))
    if not projects:
        return tasks
    asked = np.asarray([known.index(name) for name in projects])
    return [
        replace(
            task,
            asked=np.flatnonzero(np.isin(functions.names["project"].codes[task.query], asked)),
        )
        for task in tasks
    ]


def with_negatives(functions: Functions, tasks: list[Task], min_blocks: int) -> list[Task]:
    """Return tasks whose queries are as before, with more negatives.

    These are functions of at least so many blocks whose compiler or level is not known, named or
    not: of each code one, and none that has the code of a query or a match.
    """
    known = functions.where_known("compiler") & functions.where_known("level")
    more = np.flatnonzero(~known & ((functions.blocks < 0) | (functions.blocks >= min_blocks)))
    if functions.code is not None:
        code = functions.code[more]
        more = more[first_of_equals(code) == np.arange(len(more))]
    found = []
    for task in tasks:
        here = more
        if functions.code is not None:
            used = functions.code[np.concatenate([task.query, task.target])]
            here = more[~np.isin(functions.code[more], used)]
        asked = np.arange(len(task.query)) if task.asked is None else task.asked
        query, target = (np.concatenate([one, here]) for one in (task.query, task.target))
        found.append(replace(task, query=query, target=target, asked=asked))
    return found


def wanted(tasks: list[Task], rows: Sequence[str]) -> list[Task]:
    """Return the tasks of some rows of the report; of all where none is named."""
    if not rows:
        return tasks
    known = list(dict.fromkeys(task.row for task in tasks))
    for row in rows:
        if row not in known:
            raise UsageError(
                f"nothing can be compared as {row!r}",
                hint=f"there is: {', '.join(known) or 'nothing'}",
            )
    return [task for task in tasks if task.row in rows]
