"""The hash table of keys, beside a dict."""

from __future__ import annotations

import numpy as np

from tokmill.x86.tokens.hash_index import KeyIndex


def keys(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return different keys, many of which agree in one half."""
    low = rng.integers(0, 50, 4 * count).astype(np.uint64) << np.uint64(40)
    high = rng.integers(1, count, 4 * count).astype(np.uint64)
    pairs = np.unique(np.stack([low, high], axis=1), axis=0)
    rng.shuffle(pairs)
    return pairs[:count, 0].copy(), pairs[:count, 1].copy()


def test_finds_what_was_added_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    low, high = keys(rng, 30_000)
    numbers = rng.integers(0, 1000, len(low)).astype(np.int32)
    index = KeyIndex()
    known = 0
    for size in (1, 7, 2040, 5, 9000, 8947):
        new = slice(known, known + size)
        assert (index.find(low[new], high[new]) == -1).all()
        index.add(low[new], high[new], numbers[new])
        known += size
        assert len(index) == known
        assert (index.find(low[:known], high[:known]) == numbers[:known]).all()
    assert (index.find(low[known:], high[known:]) == -1).all()
    assert 2 * len(index) <= len(index.low)


def test_equal_numbers_of_keys_that_collide() -> None:
    """All keys of one batch fight for slots; each has to win one, whatever its number."""
    low = np.arange(1, 2000, dtype=np.uint64)
    high = np.full(len(low), 7, np.uint64)
    index = KeyIndex()
    index.add(low, high, np.zeros(len(low), np.int32))
    assert (index.find(low, high) == 0).all()
    assert (index.number >= 0).sum() == len(low)


def test_clear() -> None:
    one = np.array([5], np.uint64)
    index = KeyIndex()
    assert index.find(one[:0], one[:0]).tolist() == []
    index.add(one, one, np.array([3], np.int32))
    index.clear()
    assert len(index) == 0
    assert index.find(one, one).tolist() == [-1]
