"""Which functions are looked for among which others, and how many are left out, and why."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations

import numpy as np

from tokmill.base.errors import UsageError, nearest
from tokmill.similarity.functions import SOURCE, Functions, numbers_of
from tokmill.store.checks.hashes import first_of_equals
from tokmill.store.schema import Array

LEVEL_PAIRS = (("O0", "O3"), ("O1", "O3"), ("O2", "O3"), ("O0", "Os"), ("O1", "Os"), ("O2", "Os"))
"""The pairs of levels of published tables."""
FAMILIES = {"gcc": "gcc", "g++": "gcc", "clang": "clang", "clang++": "clang"}
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
    only(functions.has_value("compiler") & functions.has_value("level"), NO_KEY)
    only((functions.blocks < 0) | (functions.blocks >= min_blocks), SMALL)
    source = numbers_of([functions.names[name].codes for name in SOURCE])
    whole = numbers_of([source, *(functions.names[n].codes for n in ("compiler", "level"))])
    times = np.bincount(whole[rows], minlength=int(whole.max(initial=-1)) + 1)
    only(times[whole] == 1, AMBIGUOUS)
    return Kept(rows[np.argsort(source[rows], kind="stable")], source, left_out)


def family(compiler: str) -> str:
    """Return the name of a compiler without target and version: gcc of x86_64-linux-gnu-gcc-12."""
    words = re.split(r"[^a-z+]+", compiler.lower())
    named = [FAMILIES[word] for word in words if word in FAMILIES]
    return named[0] if named else next(filter(None, words), compiler)


def tasks_of(functions: Functions, kept: Kept, rows: Sequence[str] = ()) -> list[Task]:
    """Return the tasks of a set of functions: pairs of levels, then pairs of compilers.

    A pair of levels is compared for each compiler apart, the first level being the query. Compilers
    of two families are compared at each level, in both directions.

    Args:
        rows: what is compared, such as O0-O2 or gcc-clang O2. None: the pairs of levels of
            published tables (all pairs, if the functions have none of these), and all compilers.

    Raises:
        UsageError: the functions have no such levels or compilers.
    """
    compilers, levels = functions.names["compiler"], functions.names["level"]
    here: dict[tuple[int, int], Array] = {}
    for compiler in np.unique(compilers.codes[kept.rows]).tolist():
        of_compiler = kept.rows[compilers.codes[kept.rows] == compiler]
        for level in np.unique(levels.codes[of_compiler]).tolist():
            here[compiler, level] = of_compiler[levels.codes[of_compiler] == level]
    present = sorted({level for _, level in here}, key=levels.names.__getitem__)
    number = {levels.names[level]: level for level in present}
    used = sorted({compiler for compiler, _ in here})
    sides: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    for first, second in permutations(number, 2):
        both = [((c, number[first]), (c, number[second])) for c in used]
        if common := [(one, other) for one, other in both if one in here and other in here]:
            sides[f"{first}-{second}"] = common
    levelled = set(sides)
    pairs = [f"{one}-{other}" for one, other in LEVEL_PAIRS if f"{one}-{other}" in sides]
    usual = pairs or [f"{one}-{other}" for one, other in combinations(number, 2)]
    for name, level in number.items():
        for a, b in combinations(used, 2):
            kinds = sorted((family(compilers.names[c]), c) for c in (a, b))
            if kinds[0][0] == kinds[1][0] or not all((c, level) in here for c in (a, b)):
                continue
            # gcc stands first, as in published tables.
            kinds.sort(key=lambda kind: kind[0] != "gcc")
            row = f"{kinds[0][0]}-{kinds[1][0]} {name}"
            usual.append(row)
            sides.setdefault(row, []).extend([((a, level), (b, level)), ((b, level), (a, level))])
    if unknown := [row for row in rows if row not in sides]:
        each = [f"{one}-{other}" for one, other in combinations(number, 2)]
        there = [row for row in sides if row in each or row not in levelled]
        raise UsageError(
            f"nothing can be compared as {unknown[0]!r}",
            hint=f"there is: {', '.join(there) or 'nothing'}",
        )
    return [
        _paired(functions, kept.source, row,
                " → ".join(f"{compilers.names[c]} {levels.names[level]}" for c, level in pair),
                here[pair[0]], here[pair[1]])
        for row in dict.fromkeys(rows or usual) for pair in sides.get(row, ())
    ]  # fmt: skip


def _paired(
    functions: Functions, source: Array, row: str, setting: str, one: Array, other: Array
) -> Task:
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
    kept = first_of_equals(key) == np.arange(len(key))
    if lost := int(np.count_nonzero(~kept)):
        left_out[why] = left_out.get(why, 0) + lost
    return query[kept], target[kept]


def of_projects(functions: Functions, tasks: list[Task], projects: Sequence[str]) -> list[Task]:
    """Return tasks whose queries are of some projects; all others stay as negatives."""
    projects_of = functions.names["project"].names
    for name in projects:
        if name not in projects_of:
            raise UsageError(f"there is no project {name!r}", hint=nearest(name, projects_of))
    if not projects:
        return tasks
    asked = np.asarray([projects_of.index(name) for name in projects])
    return [
        replace(
            task,
            asked=np.flatnonzero(np.isin(functions.names["project"].codes[task.query], asked)),
        )
        for task in tasks
    ]
