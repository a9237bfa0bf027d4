"""The closed forms, against fractions by the definition, and against pools that are drawn."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from tokmill.similarity.pool_measures import AT, METRICS, expected, table


def slow(negatives: int, pool: int, above: int, ties: int) -> list[Fraction]:
    """The same as `expected(table(…))` of one query, by the definition."""
    found = [Fraction(0)] * len(METRICS)
    for tied in range(ties + 1):
        r = above + tied
        for x in range(min(r, pool - 1) + 1):
            ways = comb(r, x) * comb(negatives - r, pool - 1 - x)
            share = Fraction(ways, comb(negatives, pool - 1) * (ties + 1))
            for row, k in enumerate(AT):
                found[row] += share if x < k else 0
            found[-1] += share / (1 + x)
    return found


@pytest.mark.parametrize("negatives", [1, 2, 9, 40])
def test_agrees_with_fractions(negatives: int) -> None:
    for pool in {1, 2, negatives // 2 + 1, negatives, negatives + 1}:
        values = table(negatives, pool)
        assert values.shape == (len(METRICS), negatives + 1) and np.isfinite(values).all()
        for above in range(0, negatives + 1, max(1, negatives // 7)):
            for ties in {0, 1, (negatives - above) // 2, negatives - above}:
                if above + ties > negatives:
                    continue
                found = expected(values, np.asarray([above]), np.asarray([ties]))[0]
                exact = [float(value) for value in slow(negatives, pool, above, ties)]
                assert found == pytest.approx(exact, abs=1e-14), (pool, above, ties)


def test_stays_exact_for_many() -> None:
    """The pools of published tables: against fractions for chosen ranks."""
    for negatives, pool in ((20_000, 10_000), (9_999, 10_000), (100_000, 1_000)):
        values = table(negatives, pool)
        assert (values >= 0).all() and (values <= 1).all()
        for r in (0, 1, 7, 200, negatives):
            exact = Fraction(comb(negatives - r, pool - 1), comb(negatives, pool - 1))
            assert values[0, r] == pytest.approx(float(exact), rel=1e-11, abs=1e-300)
            missing = Fraction(comb(negatives - r, pool), comb(negatives + 1, pool))
            mrr = Fraction(negatives + 1, (r + 1) * pool) * (1 - missing)
            assert values[-1, r] == pytest.approx(float(mrr), rel=1e-11)


def test_impossible_pools_are_refused() -> None:
    for negatives, pool in ((5, 7), (5, 0), (5, -1)):
        with pytest.raises(ValueError, match="no pool of"):
            table(negatives, pool)
