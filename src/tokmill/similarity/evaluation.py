"""A whole evaluation: every row of the report."""

from collections.abc import Iterator, Sequence

import msgspec

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.progress import Progress
from tokmill.similarity.functions import Functions
from tokmill.similarity.pairing import MIN_BLOCKS, Kept, keep, of_projects, tasks_of
from tokmill.similarity.pool_measures import (
    POOLS,
    RESAMPLES,
    Measured,
    Method,
    Row,
    measure,
    report,
)


class Compares(msgspec.Struct, frozen=True):
    """A method of the report."""

    name: str
    baseline: bool
    zeros: int
    """Functions whose vector is 0, which has the score 0 with every other."""


class Evaluation(msgspec.Struct, frozen=True):
    """All that an evaluation found, and all that it left out."""

    format: str
    version: int
    where: str
    fingerprint: str
    """Fingerprint of the store; "" for vectors that are of none."""
    functions: int
    compared: int
    """Functions that may be in a pair."""
    left_out: dict[str, int]
    min_blocks: int
    resamples: int
    methods: list[Compares]
    rows: list[Row]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated, and how."""

    pools: tuple[int, ...] = ()
    """Sizes of pools; none: `POOLS`."""
    rows: tuple[str, ...] = ()
    """Pairs of levels or compilers; none: all that there are."""
    projects: tuple[str, ...] = ()
    """Projects of the queries; none: all. Functions of others are negatives alone."""
    min_blocks: int = MIN_BLOCKS
    resamples: int = RESAMPLES


def evaluate(
    functions: Functions,
    methods: Sequence[Method],
    choice: Choice,
    *,
    fingerprint: str = "",
    quiet: bool = True,
) -> Evaluation:
    """Return what methods reach on functions that were compiled in several ways."""
    names = [one.name for one in methods]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        hint = "give the file of vectors, or the folder of the run, another name"
        raise UsageError(f"two methods are called {twice!r}", hint=hint)
    kept = keep(functions, choice.min_blocks)
    with Progress("similarity", 0, unit="comparisons", quiet=quiet) as bar:
        rows = [
            report(functions, one, methods, resamples=choice.resamples)
            for one in _measured(functions, kept, methods, choice, bar)
        ]
    if not any(row.queries for row in rows):
        reasons = {**kept.left_out}
        for row in rows:
            for setting in row.settings:
                for why, count in setting.left_out.items():
                    reasons[why] = reasons.get(why, 0) + count
        raise TokmillError(
            "no function was compiled in two of the ways that are compared"
            + "".join(f"; {why}: {count:,}" for why, count in reasons.items()),
            where=functions.where,
            hint="build the store of programs of several levels or compilers, with names: "
            "`tokmill build x86 --layout '{project}/{compiler}-{level}/{program}'`",
        )
    return Evaluation(
        format="tokmill.similarity",
        version=2,
        where=functions.where,
        fingerprint=fingerprint,
        functions=len(functions),
        compared=len(kept.rows),
        left_out=kept.left_out,
        min_blocks=choice.min_blocks,
        resamples=choice.resamples,
        methods=[
            Compares(one.name, one.baseline, one.rows.zeros if one.rows else 0) for one in methods
        ],
        rows=rows,
    )


def _measured(
    functions: Functions, kept: Kept, methods: Sequence[Method], choice: Choice, bar: Progress
) -> Iterator[Measured]:
    tasks = tasks_of(functions, kept, choice.rows)
    tasks = of_projects(functions, tasks, choice.projects)
    pools = choice.pools or POOLS
    pairs = sum(float(len(task.queries())) * len(task.query) for task in tasks)
    bar.total = pairs * len(methods)
    for row in dict.fromkeys(task.row for task in tasks):
        of_row = [task for task in tasks if task.row == row]
        yield measure(row, of_row, methods, pools, bar.advance)
