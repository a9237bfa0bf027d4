"""Order is arithmetic: permutations are permutations, keys are spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokmill.feed.order import key, permute


@pytest.mark.parametrize("first", [1, 76, 151, 226])
def test_bijection_for_all_small_n(first: int) -> None:
    for n in range(first, first + 75):
        found = permute(np.arange(n), n, 7, n)
        assert found.dtype == np.int64
        assert sorted(found.tolist()) == list(range(n))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 1 << 62), st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_large_n_is_injective_and_within_range(n: int, seed: int, place: int) -> None:
    place %= n
    positions = np.unique(np.clip(np.arange(place - 500, place + 500), 0, n - 1))
    found = permute(positions, n, seed)
    assert len(np.unique(found)) == len(positions)
    assert found.min() >= 0
    assert found.max() < n


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 500), st.integers(0, 9), st.integers(1, 60))
def test_blocks_give_what_the_whole_gives(n: int, seed: int, block: int) -> None:
    whole = permute(np.arange(n), n, seed).tolist()
    parts = [permute(np.arange(i, min(i + block, n)), n, seed) for i in range(0, n, block)]
    assert np.concatenate(parts).tolist() == whole
    assert permute(np.arange(n).reshape(n, 1), n, seed).tolist() == [[v] for v in whole]


def test_keys_give_other_orders() -> None:
    n = 1000
    orders = {
        tuple(permute(np.arange(n), n, seed, epoch)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25
    assert tuple(range(n)) not in orders


def test_places_are_spread() -> None:
    """Over many keys each value comes to each place about equally often (chi-square, 5 sigma)."""
    n, trials = 50, 1500
    counts = np.zeros((n, n))
    for seed in range(trials):
        counts[np.arange(n), permute(np.arange(n), n, seed)] += 1
    expected = trials / n
    chi = float(((counts - expected) ** 2 / expected).sum())
    degrees = (n - 1) * n
    assert abs(chi - degrees) < 5 * (2 * degrees) ** 0.5


def slow_mix(value: int) -> int:
    mask = (1 << 64) - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def slow_key(*parts: int) -> int:
    mask, golden, state = (1 << 64) - 1, 0x9E3779B97F4A7C15, 0
    for part in parts:
        state = slow_mix(((state + golden) & mask) ^ slow_mix((part + golden) & mask))
    return state


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=4))
def test_key_against_plain_integers(parts: list[int]) -> None:
    assert key(*parts).tolist() == [slow_key(*parts)]
    *first, last = parts
    rows = np.asarray([last, 0, 1], np.uint64)
    assert key(*first, rows).tolist() == [slow_key(*first, v) for v in (last, 0, 1)]


def test_negative_seeds_are_seeds() -> None:
    assert key(-1).tolist() == [slow_key((1 << 64) - 1)]
    assert sorted(permute(np.arange(9), 9, -5).tolist()) == list(range(9))
