"""Ranks of matches: what they are worth in pools of each size, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from tokmill.similarity.bootstrap import RESAMPLES, bootstrap, interval
from tokmill.similarity.expectation import METRICS, expected, table
from tokmill.similarity.functions import Functions, numbers_of
from tokmill.similarity.pairing import Task
from tokmill.similarity.vector_rows import Rows, ranks
from tokmill.store.schema import Array

POOLS = (2, 10, 32, 100, 128, 512, 1000, 8192, 10_000)
SHOWN = 1000
"""Pool at which methods are compared, or the largest one below that there is."""
CHANCE = "random"


class Method(NamedTuple):
    """Something that compares functions."""

    name: str
    rows: Rows | None
    """A vector a function; None: an order by chance, whose expectation is known."""
    baseline: bool


class Value(msgspec.Struct, frozen=True):
    """A mean over queries, and its 95 % intervals: functions and projects drawn again."""

    mean: float
    functions: tuple[float, float] | None
    projects: tuple[float, float] | None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both intervals together: of few projects, one alone says too much."""
        both = [one for one in (self.functions, self.projects) if one]
        if not both:
            return None
        return min(low for low, _ in both), max(high for _, high in both)


class Result(msgspec.Struct, frozen=True):
    """What a method reaches in pools of one size."""

    method: str
    baseline: bool
    pool: int
    queries: int
    values: dict[str, Value]


class Compared(msgspec.Struct, frozen=True):
    """The method that was given beside the best baseline, by recall@1."""

    method: str
    baseline: str
    pool: int
    difference: Value
    """Difference of recall@1: above 0 the method is better."""


class Setting(msgspec.Struct, frozen=True):
    """One task of a row, and what was left out of it."""

    setting: str
    pairs: int
    """Functions that a query is compared with."""
    queries: int
    same_code: int
    left_out: dict[str, int]


class Row(msgspec.Struct, frozen=True):
    """All that is said of one pair of levels, or of compilers."""

    row: str
    queries: int
    functions: int
    """Different functions of sources; one may be compiled by several compilers."""
    projects: int
    settings: list[Setting]
    results: list[Result]
    too_large: list[int]
    """Pools for which no setting has enough pairs."""
    compared: list[Compared]


@dataclass(slots=True)
class Measured:
    """The queries of a row, and what each method reaches for each, in pools of each size."""

    row: str
    query: Array
    """(n,) i8, numbers of functions; one may stand several times."""
    pools: list[int]
    counted: Array
    """(n, pools) bool, whether the pool could be made for the query."""
    values: dict[str, Array]
    """Method → (n, pools, metrics) f8, 0 where not counted."""
    settings: list[Setting] = field(default_factory=list)
    too_large: list[int] = field(default_factory=list)


Advance = Callable[[float], None]


def measure(
    row: str,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    pools: Sequence[int],
    advance: Advance = lambda pairs: None,
) -> Measured:
    """Return the expectation over all pools that can be drawn, for each query of some tasks.

    `advance` is called with the pairs of queries and targets that were compared.
    """
    total = sum(len(task.queries()) for task in tasks)
    largest = max((len(task.query) for task in tasks if len(task.queries())), default=0)
    taken = [pool for pool in pools if pool <= largest]
    found = Measured(
        row,
        np.concatenate([np.zeros(0, np.int64), *(task.queries() for task in tasks)]),
        taken,
        np.zeros((total, len(taken)), bool),
        {method.name: np.zeros((total, len(taken), len(METRICS))) for method in methods},
        [
            Setting(t.setting, len(t.query), len(t.queries()), t.same_code, t.left_out)
            for t in tasks
        ],
        [pool for pool in pools if pool > largest],
    )
    start = 0
    for task in tasks:
        here = slice(start, start + len(task.queries()))
        start = here.stop
        if not len(task.queries()):
            continue
        order = {}
        for method in methods:
            order[method.name] = ranks_of(method, task.query, task.target, task.asked)
            advance(float(len(task.queries())) * len(task.query))
        for place, pool in enumerate(taken):
            if pool <= len(task.query):
                values = table(len(task.query) - 1, pool)
                found.counted[here, place] = True
                for name, (above, ties) in order.items():
                    found.values[name][here, place] = expected(values, above, ties)
    return found


def ranks_of(
    method: Method, query: Array, target: Array, asked: Array | None = None
) -> tuple[Array, Array]:
    """Return how many negatives rank above the match of each query, and how many tie with it."""
    if method.rows is None:
        zero = np.zeros(len(query if asked is None else asked), np.int64)
        return zero, zero + len(query) - 1
    return ranks(method.rows, query, target, asked)


def report(
    functions: Functions,
    found: Measured,
    methods: Sequence[Method],
    *,
    resamples: int = RESAMPLES,
) -> Row:
    """Return the means of a row with their intervals, and the comparison with baselines."""
    of_project = functions.names["project"].codes[found.query]
    source = [functions.names[name].codes[found.query] for name in ("project", "function")]
    of_function = numbers_of(source)
    names = [method.name for method in methods]
    width = len(METRICS)
    shape = len(found.query), len(found.pools) * width
    flat = np.concatenate([found.values[name].reshape(shape) for name in names], axis=1)
    of = np.tile(np.repeat(np.arange(len(found.pools)), width), len(names))
    counts = found.counted.sum(0)
    means = flat.sum(0) / np.maximum(counts, 1)[of]
    drawn = [
        bootstrap(flat, found.counted, of, unit, resamples=resamples)
        if resamples and len(flat)
        else None
        for unit in (of_function, of_project)
    ]

    def value(column: int, less: int | None = None) -> Value:
        """Return the value of a column, or of its difference from another."""

        def of_draws(means: Array | None) -> tuple[float, float] | None:
            if means is None:
                return None
            return interval(means[:, column] - (0 if less is None else means[:, less]))

        mean = means[column] - (0 if less is None else means[less])
        return Value(float(mean), of_draws(drawn[0]), of_draws(drawn[1]))

    def column(method: int, pool: int, metric: int = 0) -> int:
        return (method * len(found.pools) + pool) * width + metric

    results = [
        Result(
            method.name,
            method.baseline,
            pool,
            int(counts[p]),
            {name: value(column(m, p, k)) for k, name in enumerate(METRICS)},
        )
        for m, method in enumerate(methods)
        for p, pool in enumerate(found.pools)
    ]
    return Row(
        row=found.row,
        queries=len(found.query),
        functions=len(np.unique(of_function)),
        projects=len(np.unique(of_project)),
        settings=found.settings,
        results=results,
        too_large=found.too_large,
        compared=[
            Compared(
                method.name,
                methods[best].name,
                found.pools[p],
                value(column(m, p), column(best, p)),
            )
            for m, method in enumerate(methods)
            if not method.baseline
            for p, best in enumerate(_best_baselines(means, methods, column, len(found.pools)))
            if best is not None
        ],
    )


def _best_baselines(
    means: Array, methods: Sequence[Method], column: Callable[[int, int], int], pools: int
) -> list[int | None]:
    """Return the baseline with the best recall@1 at each pool, by number."""
    baselines = [i for i, method in enumerate(methods) if method.baseline]
    return [
        max(baselines, key=lambda i: float(means[column(i, pool)]), default=None)
        for pool in range(pools)
    ]
