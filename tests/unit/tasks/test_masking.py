"""Which tokens are hidden, and what stands in their place."""

import numpy as np
import pytest

from tokmill.feed.order import key
from tokmill.tasks.hidden.masked import choose, replaced, wanted

ROWS, LENGTH = 200, 64
KEYS = key(7, np.arange(ROWS))


def some_maskable() -> np.ndarray:
    random = np.random.default_rng(0)
    inside = np.arange(LENGTH) < random.integers(1, LENGTH + 1, ROWS)[:, None]
    inside &= random.random((ROWS, LENGTH)) < 0.9
    inside[0] = False
    return inside


@pytest.mark.parametrize("most", [0, 5])
def test_the_number_is_exact(most: int) -> None:
    maskable = some_maskable()
    count = wanted(maskable, 0.15, most)
    for row, number in zip(maskable, count.tolist(), strict=True):
        there = int(row.sum())
        expected = min(max(1, round(0.15 * there)), there)
        assert number == (min(expected, most) if most else expected)
    chosen = choose(KEYS, maskable, count)
    assert (chosen.sum(1) == count).all() and not (chosen & ~maskable).any()


def test_every_token_is_hidden_as_often_as_another() -> None:
    maskable = np.ones((ROWS, LENGTH), bool)
    found = np.zeros(LENGTH)
    for epoch in range(50):
        found += choose(key(7, epoch, np.arange(ROWS)), maskable, wanted(maskable, 0.15)).sum(0)
    share = found / (50 * ROWS)
    # 10,000 draws with p = 10 / 64: five standard deviations are .018.
    assert np.abs(share - 10 / 64).max() < 0.018


def test_rows_are_independent_of_their_batch() -> None:
    maskable = some_maskable()
    together = choose(KEYS, maskable, wanted(maskable, 0.15))
    for row in range(0, ROWS, 17):
        one = slice(row, row + 1)
        alone = choose(KEYS[one], maskable[one], wanted(maskable[one], 0.15))
        assert (alone[0] == together[row]).all()


def test_what_the_model_sees() -> None:
    ids = np.random.default_rng(3).integers(5, 40, (ROWS, LENGTH))
    chosen = choose(KEYS, ids > 0, wanted(ids > 0, 0.5))
    keys = {"mask": 4, "size": 40, "specials": [0, 1, 2, 3, 4], "shares": (0.8, 0.1)}
    first, second = (replaced(ids, chosen, KEYS, column=c, **keys) for c in (0, 1))
    assert (first[~chosen] == ids[~chosen]).all()
    masked = first[chosen] == 4
    assert masked.mean() == pytest.approx(0.8, abs=0.02)
    # At a position all columns are hidden in the same way, with random ids of their own.
    assert ((second[chosen] == 4) == masked).all()
    assert (first != second).any() and (first[chosen][~masked] >= 5).all()
    random = (first[chosen] != ids[chosen]) & ~masked
    assert random.mean() == pytest.approx(0.1 * 34 / 35, abs=0.015)
    drawn = np.bincount(first[chosen][random], minlength=40)[5:]
    assert (drawn > 0).all()
    assert set(np.unique(replaced(ids, chosen, KEYS, column=0, **{**keys, "shares": (0, 0)}))) == (
        set(np.unique(ids))
    )
