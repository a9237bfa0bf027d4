"""What a rank is worth in a pool that is drawn at random: the mean over all pools, in closed form.

A query has one match and M negatives. A pool of size N holds the match and N - 1 of the negatives.
If r negatives rank above the match, X of them are in the pool, and X is hypergeometric:
P(X = x) = C(r, x) C(M - r, N - 1 - x) / C(M, N - 1). So

- recall at k is P(X < k), which for k = 1 is C(M - r, N - 1) / C(M, N - 1),
- the mean reciprocal rank is E[1 / (1 + X)] = (M + 1) / ((r + 1) N) · (1 - C(M - r, N) /
  C(M + 1, N)), because C(r, x) / (x + 1) = C(r + 1, x + 1) / (r + 1) (Vandermonde's identity).

Negatives that score as the match does are put in a random order with it: of t ties, 0, 1, … or t
rank above the match, each with probability 1 / (t + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

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
    found = factorials[n] - factorials[k] - factorials[n - k]
    return np.where(possible, found, -np.inf)


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
    found = (sums[:, above + ties + 1] - sums[:, above]) / (ties + 1)
    # A query without ties is looked up, so that it has no rounding of the sums.
    found = np.where(ties == 0, values[:, above], found)
    return np.ascontiguousarray(found.T, np.float64)
