"""Pools drawn as jTrans and HermesSim draw them, for a comparison with their published tables.

What is drawn is luck, so these are for that comparison alone. Ties are put in a random order, and
the mean over these orders is taken (jTrans takes the order of numpy's sort, HermesSim the best).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokmill.similarity.expectation import METRICS, expected, table
from tokmill.similarity.functions import Functions, numbers_of
from tokmill.similarity.pairing import Kept, Task
from tokmill.similarity.pool_measures import Advance, Measured, Method, Setting, ranks_of
from tokmill.similarity.rows import TIE, own_products, products
from tokmill.store.schema import Array

QUERIES = 1000
HERMESSIM_POOLS = (100, 8192, 10_000)
INCOMPLETE = "pairs beyond the last whole pool of"
FEW_NEGATIVES = "queries with too few negatives for a pool of"


def jtrans(
    row: str,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    pools: Sequence[int],
    seed: int,
    advance: Advance = lambda pairs: None,
) -> Measured:
    """Return what is reached in pools as jTrans makes them, of each size.

    The pairs of a task are shuffled and cut into pools that do not overlap; the last one, where it
    is not whole, is dropped. (https://github.com/vul337/jTrans, `fasteval.py`)
    """
    sizes = [len(task.query) for task in tasks]
    largest = max(sizes, default=0)
    taken = [pool for pool in pools if pool <= largest]
    queries = [np.zeros(0, np.int64), *(task.queries() for task in tasks)]
    found = _empty(row, np.concatenate(queries), taken, methods)
    found.too_large = [pool for pool in pools if pool > largest]
    random, start = np.random.default_rng(seed), 0
    for task in tasks:
        left_out = dict(task.left_out)
        size = len(task.query)
        # Pair → its row among the queries; -1: it is a negative alone.
        row_of = np.full(size, -1, np.int64)
        row_of[slice(None) if task.asked is None else task.asked] = start + np.arange(
            len(task.queries())
        )
        for place, pool in enumerate(taken):
            order = random.permutation(size)
            if rest := size % pool if size >= pool else size:
                left_out[f"{INCOMPLETE} {pool:,}"] = rest
            values = table(pool - 1, pool)
            for first in range(0, size - pool + 1, pool):
                here = order[first : first + pool]
                asked = np.flatnonzero(row_of[here] >= 0)
                if not len(asked):
                    continue
                rows = row_of[here[asked]]
                found.counted[rows, place] = True
                for method in methods:
                    above, ties = ranks_of(method, task.query[here], task.target[here], asked)
                    found.values[method.name][rows, place] = expected(values, above, ties)
                advance(float(pool) * len(asked) * len(methods))
        found.settings.append(
            Setting(task.setting, size, len(task.queries()), task.same_code, left_out)
        )
        start += len(task.queries())
    return found


def hermessim(
    functions: Functions,
    kept: Kept,
    kind: str,
    methods: Sequence[Method],
    pools: Sequence[int],
    seed: int,
    advance: Advance = lambda pairs: None,
) -> Measured:
    """Return what is reached by 1,000 queries, each with negatives of its own, as HermesSim has it.

    `kind` XO: query, match and negatives are of one compiler, at levels by chance; XC: of compilers
    and levels by chance. A symbol (project, program, name) gives one query at most, and one
    negative. A pool of N has N - 1 negatives, the first of those that were drawn.
    (https://github.com/NSSL-SJTU/HermesSim, `testing_generator.py` and `recall_mrr.py`)
    """
    random = np.random.default_rng(seed)
    rows = kept.rows
    columns = [kept.source[rows]]
    fixed = functions.names["compiler"].codes[rows] if kind == "XO" else np.zeros(len(rows), int)
    # One random function of each symbol and setting stands first, another second.
    mixed = random.permutation(len(rows))
    group = numbers_of([columns[0][mixed], fixed[mixed]])
    order = np.argsort(group, kind="stable")
    begins = np.flatnonzero(np.diff(group[order], prepend=-1))
    first = rows[mixed[order[begins]]]
    several = np.diff(np.append(begins, len(order))) > 1
    second = np.full(len(first), -1, np.int64)
    second[several] = rows[mixed[order[begins[several] + 1]]]
    setting = fixed[mixed[order[begins]]]
    symbol = columns[0][mixed[order[begins]]]
    queries = _one_each(symbol, np.flatnonzero(several), random)[:QUERIES]
    found = _empty(kind, first[queries], list(pools), methods)
    left_out: dict[str, int] = {}
    members = {one: np.flatnonzero(setting == one) for one in np.unique(setting).tolist()}
    for one, here in members.items():
        asked = np.flatnonzero(setting[queries] == one)
        # The match and the negatives of a query are the second functions of their symbols where
        # there are two: any is as likely as any other.
        pool_rows = np.where(second[here] >= 0, second[here], first[here])
        own = np.searchsorted(here, queries[asked])
        usable = [p for p in pools if p <= len(here)]
        for p in pools:
            if p > len(here) and len(asked):
                why = f"{FEW_NEGATIVES} {p:,}"
                left_out[why] = left_out.get(why, 0) + len(asked)
        if not usable or not len(asked):
            continue
        most = max(usable) - 1
        negatives = np.empty((len(asked), most), np.int32)
        for i, place in enumerate(own.tolist()):
            drawn = random.choice(len(here) - 1, most, replace=False)
            negatives[i] = drawn + (drawn >= place)
        for method in methods:
            for p, above, ties in _drawn(method, first[queries[asked]], pool_rows, own, negatives,
                                         usable):  # fmt: skip
                place = found.pools.index(p)
                found.counted[asked, place] = True
                found.values[method.name][asked, place] = expected(table(p - 1, p), above, ties)
            advance(float(len(asked)) * len(pool_rows))
    compiler = functions.names["compiler"].names
    said = ", ".join(compiler[one] for one in members) if kind == "XO" else "all compilers"
    found.settings.append(Setting(said, len(kept.rows), len(queries), 0, left_out))
    found.too_large = [p for i, p in enumerate(found.pools) if not found.counted[:, i].any()]
    return found


def _one_each(symbol: Array, usable: Array, random: np.random.Generator) -> Array:
    """Return one of the groups of each symbol, in a random order: numbers of groups."""
    usable = random.permutation(usable)
    _, first = np.unique(symbol[usable], return_index=True)
    found: Array = random.permutation(usable[first])
    return found


def _drawn(
    method: Method, query: Array, targets: Array, own: Array, negatives: Array, pools: list[int]
) -> list[tuple[int, Array, Array]]:
    """Return for each pool how many of its negatives rank above the match, and how many tie."""
    if method.rows is None:
        zero = np.zeros(len(query), np.int64)
        return [(pool, zero, zero + pool - 1) for pool in pools]
    match = own_products(method.rows, query, method.rows, targets[own])
    above = np.empty((len(pools), len(query)), np.int64)
    ties = np.empty_like(above)
    for start, block in products(method.rows, query, method.rows, targets):
        here = slice(start, start + len(block))
        scores = np.take_along_axis(block, negatives[here], axis=1) - match[here, None]
        for i, pool in enumerate(pools):
            above[i, here] = (scores[:, : pool - 1] > TIE).sum(1)
            ties[i, here] = (np.abs(scores[:, : pool - 1]) <= TIE).sum(1)
    return [(pool, above[i], ties[i]) for i, pool in enumerate(pools)]


def _empty(row: str, query: Array, pools: list[int], methods: Sequence[Method]) -> Measured:
    shape = (len(query), len(pools))
    values = {method.name: np.zeros((*shape, len(METRICS))) for method in methods}
    return Measured(row, query, pools, np.zeros(shape, bool), values)
