"""Ranks of matches: what they are worth in pools of each size, with intervals.

In a pool that is drawn at random a rank is worth the mean over all pools, in closed form.
A query has one match and M negatives. A pool of size N holds the match and N - 1 of the negatives.
If r negatives rank above the match, X of them are in the pool, and X is hypergeometric:
P(X = x) = C(r, x) C(M - r, N - 1 - x) / C(M, N - 1). So

- recall at k is P(X < k), which for k = 1 is C(M - r, N - 1) / C(M, N - 1),
- the mean reciprocal rank is E[1 / (1 + X)] = (M + 1) / ((r + 1) N) · (1 - C(M - r, N) /
  C(M + 1, N)), because C(r, x) / (x + 1) = C(r + 1, x + 1) / (r + 1) (Vandermonde's identity).

Negatives that score as the match does are put in a random order with it: of t ties, 0, 1, … or t
rank above the match, each with probability 1 / (t + 1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from tokmill.similarity.functions import Functions, numbers_of
from tokmill.similarity.pairing import Task
from tokmill.similarity.vector_rows import Rows, ranks
from tokmill.store.schema import Array

AT = (1, 5, 10)
METRICS = (*(f"recall@{k}" for k in AT), "mrr")
"""What is measured, in the order of the rows of `table`."""


@lru_cache(maxsize=4)
def _log_factorials(most: int) -> Array:
    """Return ln 0!, ln 1!, … ln most! (most + 1,) with 64 bits of mantissa where there are."""
    logs = np.log(np.arange(1, most + 1, dtype=np.longdouble))
    return np.concatenate([np.zeros(1, np.longdouble), np.cumsum(logs)])


def _log_choose(n: Array, k: Array, factorials: Array) -> Array:
    """Return ln C(n, k); minus infinity where there is no such choice."""
    possible = (k >= 0) & (k <= n) & (n >= 0)
    n, k = np.where(possible, n, 0), np.where(possible, k, 0)
    log_choices = factorials[n] - factorials[k] - factorials[n - k]
    return np.where(possible, log_choices, -np.inf)


def table(negatives: int, pool: int, at: Sequence[int] = AT) -> Array:
    """Return the expected value of each metric for each rank: (len(at) + 1, negatives + 1) f8.

    Row i is recall at at[i], the last one the reciprocal rank; column r is for a match below r of
    the negatives. Raises `ValueError` for a pool below 1, or larger than the negatives and one.
    """
    if not 1 <= pool <= negatives + 1:
        raise ValueError(f"no pool of {pool} can be drawn from {negatives} negatives and a match")
    factorials = _log_factorials(negatives + 1)
    r = np.arange(negatives + 1)
    drawn = pool - 1
    whole = _log_choose(np.asarray(negatives), np.asarray(drawn), factorials)
    share = np.zeros((max(at), len(r)), np.longdouble)
    for x in range(min(max(at), pool)):
        ways = _log_choose(r, np.asarray(x), factorials)
        ways = ways + _log_choose(negatives - r, np.asarray(drawn - x), factorials)
        share[x] = np.exp(ways - whole)
    below = np.cumsum(share, axis=0)
    rows = [np.minimum(below[k - 1], 1) for k in at]
    missing = _log_choose(negatives - r, np.asarray(pool), factorials)
    missing = missing - _log_choose(np.asarray(negatives + 1), np.asarray(pool), factorials)
    rows.append((negatives + 1) / ((r + 1) * np.longdouble(pool)) * -np.expm1(missing))
    return np.asarray(rows, np.float64)


def expected(values: Array, above: Array, ties: Array) -> Array:
    """Return the metrics of queries, (queries, metrics) f8, as means over orders of their ties.

    `values`: of `table`; `above`, `ties`: (queries,) negatives that rank above the match, and that
    tie with it.
    """
    sums = np.cumsum(values.astype(np.longdouble), axis=1)
    sums = np.concatenate([np.zeros((len(sums), 1), np.longdouble), sums], axis=1)
    means = (sums[:, above + ties + 1] - sums[:, above]) / (ties + 1)
    # A query without ties is looked up, so that it has no rounding of the sums.
    means = np.where(ties == 0, values[:, above], means)
    return np.ascontiguousarray(means.T, np.float64)


POOLS = (2, 10, 32, 100, 128, 512, 1000, 8192, 10_000)
SHOWN = 1000
"""Pool at which methods are compared, or the largest one below that there is."""
RANDOM = "random"
RESAMPLES, LEAST = 1000, 6
"""Resamples, and the fewest functions that are drawn again: five agree by chance in 6 % of cases
(the sign test), and then all resamples agree too."""
CONFIDENCE = 0.95
CELLS = 1 << 22
"""Numbers that are drawn at a time."""


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
    result = Measured(
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
            if method.rows is None:
                none = np.zeros(len(task.queries()), np.int64)
                order[method.name] = none, none + len(task.query) - 1
            else:
                order[method.name] = ranks(method.rows, task.query, task.target, task.asked)
            advance(float(len(task.queries())) * len(task.query))
        for place, pool in enumerate(taken):
            if pool <= len(task.query):
                values = table(len(task.query) - 1, pool)
                result.counted[here, place] = True
                for name, (above, ties) in order.items():
                    result.values[name][here, place] = expected(values, above, ties)
    return result


def report(
    functions: Functions,
    measured: Measured,
    methods: Sequence[Method],
    *,
    resamples: int = RESAMPLES,
) -> Row:
    """Return the means of a row with their intervals, and the comparison with baselines."""
    of_project = functions.names["project"].codes[measured.query]
    source = [functions.names[name].codes[measured.query] for name in ("project", "function")]
    of_function = numbers_of(source)
    resamples = 0 if len(np.unique(of_function)) < LEAST else resamples
    means = _Means(measured, methods, (of_function, of_project), resamples)
    column = means.column
    results = [
        Result(
            method.name,
            method.baseline,
            pool,
            int(measured.counted[:, p].sum()),
            {name: means.value(column(m, p, k)) for k, name in enumerate(METRICS)},
        )
        for m, method in enumerate(methods)
        for p, pool in enumerate(measured.pools)
    ]
    baselines = [i for i, method in enumerate(methods) if method.baseline]
    best_of = [
        max(baselines, key=lambda i: float(means.means[column(i, pool)]), default=None)
        for pool in range(len(measured.pools))
    ]
    compared = [
        Compared(
            method.name,
            methods[best].name,
            measured.pools[p],
            means.value(column(m, p), column(best, p)),
        )
        for m, method in enumerate(methods)
        if not method.baseline
        for p, best in enumerate(best_of)
        if best is not None
    ]
    return Row(
        row=measured.row,
        queries=len(measured.query),
        functions=len(np.unique(of_function)),
        projects=len(np.unique(of_project)),
        settings=measured.settings,
        results=results,
        too_large=measured.too_large,
        compared=compared,
    )


class _Means:
    """The means of a row: a column for each method, pool and metric, and their resamples."""

    def __init__(
        self,
        measured: Measured,
        methods: Sequence[Method],
        units: tuple[Array, Array],
        resamples: int,
    ) -> None:
        self.pools, width = len(measured.pools), len(METRICS)
        shape = len(measured.query), self.pools * width
        parts = [measured.values[method.name].reshape(shape) for method in methods]
        flat = np.concatenate(parts, axis=1)
        of = np.tile(np.repeat(np.arange(self.pools), width), len(methods))
        self.means = flat.sum(0) / np.maximum(measured.counted.sum(0), 1)[of]
        self.drawn = [
            bootstrap(flat, measured.counted, of, unit, resamples=resamples)
            if resamples and len(flat)
            else None
            for unit in units
        ]

    def column(self, method: int, pool: int, metric: int = 0) -> int:
        return (method * self.pools + pool) * len(METRICS) + metric

    def value(self, column: int, less: int | None = None) -> Value:
        def of(means: Array) -> Array:
            return means[..., column] - (0 if less is None else means[..., less])

        functions, projects = (None if one is None else interval(of(one)) for one in self.drawn)
        return Value(float(of(self.means)), functions, projects)


def bootstrap(
    values: Array,
    counted: Array,
    of: Array,
    unit: Array,
    resamples: int = RESAMPLES,
) -> Array | None:
    """Return the means of as many resamples, (resamples, columns) f8.

    A resample draws as many units as there are, with repetition, and takes all values of each (the
    cluster bootstrap: Field and Welsh 2007). So functions at several compilers, and functions of a
    project, count as what they are: not independent. All columns share the draws, so differences of
    columns can be taken. None where there is only one unit.

    Args:
        values: (n, columns) f8, 0 where not counted.
        counted: (n, kinds), whether a value counts.
        of: (columns,) the column of `counted` that says so.
        unit: (n,) number of the unit of each value.
        resamples: how often units are drawn.
    """
    _, place = np.unique(unit, return_inverse=True)
    units = int(place.max()) + 1 if len(place) else 0
    if units < 2:
        return None
    of_unit = place.reshape(-1)
    columns = values.shape[1]
    sums = np.empty((units, columns + counted.shape[1]))
    for column in range(sums.shape[1]):
        one = values[:, column] if column < columns else counted[:, column - columns]
        sums[:, column] = np.bincount(of_unit, one, units)
    random = np.random.default_rng(0)
    result = np.empty((resamples, columns))
    height = max(1, CELLS // units)
    for start in range(0, resamples, height):
        stop = min(start + height, resamples)
        drawn = random.integers(0, units, (stop - start, units))
        drawn += np.arange(stop - start)[:, None] * units
        times = np.bincount(drawn.reshape(-1), minlength=(stop - start) * units)
        total = times.reshape(stop - start, units) @ sums
        count = total[:, columns:][:, of]
        # A resample may have drawn none of the units that have a value.
        result[start:stop] = np.divide(
            total[:, :columns], count, out=np.full(count.shape, np.nan), where=count > 0
        )
    return result


def interval(means: Array) -> tuple[float, float] | None:
    """Return the middle 95 % of the means of resamples; None where none has a value."""
    means = means[np.isfinite(means)]
    if not len(means):
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
