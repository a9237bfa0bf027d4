"""Order is arithmetic: permutations are permutations, keys are spread."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokmill.feed.order import BLOCK, Order, key, permute, shard_groups


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


def test_an_order_stays_what_it_is() -> None:
    """A resumed run must see the rows that it would have seen."""
    assert permute(np.arange(10), 10, 7, 3).tolist() == [9, 1, 8, 3, 2, 7, 0, 5, 6, 4]
    assert permute(np.asarray([0, 5000, 99999]), 100000, -1, 2).tolist() == [5620, 46353, 88436]
    alone = permute(np.arange(4), np.asarray([4, 5, 6, 7]), 1, np.arange(4))
    assert alone.tolist() == [1, 2, 4, 5]
    assert key(7, 3, np.arange(2)).tolist() == [11354123414509658144, 14333557711760511726]


GROUPS = [
    [1],
    [7],
    [0, 5, 0, 3, 1, 0],
    [BLOCK - 1, 2, BLOCK, 1],
    [1] * 50 + [BLOCK] + [2] * 40,
    [2 * BLOCK + 17],
]


@pytest.mark.parametrize("groups", GROUPS, ids=range(len(GROUPS)))
def test_an_order_against_its_definition(groups: list[int]) -> None:
    count, first = sum(groups), np.cumsum(groups) - groups
    wanted = []
    for epoch in range(2):
        if len(groups) == 1:
            wanted += permute(np.arange(count), count, 5, epoch).tolist()
            continue
        for group in permute(np.arange(len(groups)), len(groups), 5, epoch).tolist():
            inside = permute(np.arange(groups[group]), max(1, groups[group]), 5, epoch, group)
            wanted += (first[group] + inside).tolist()
    order = Order(np.asarray(groups), 5)
    assert order.rows(0, 2 * count)[1].tolist() == wanted
    # Any stretch, whatever was asked before.
    for start, stop in ((count - 1, count + 1), (0, 0), (BLOCK - 1, BLOCK + 1), (count, 2 * count)):
        start, stop = min(start, 2 * count), min(stop, 2 * count)
        assert order.rows(start, stop)[1].tolist() == wanted[start:stop]


def test_an_order_without_shuffling() -> None:
    epoch, row = Order(np.asarray([3, 0, 4]), 1, shuffle=False).rows(5, 16)
    assert row.tolist() == [5, 6, 0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert epoch.tolist() == [0, 0, *[1] * 7, 2, 2]


@pytest.mark.parametrize(("count", "k"), [(0, 0), (7, 0), (7, 7), (7, 9), (7, 1), (7, 3), (60, 8)])
def test_shard_groups(count: int, k: int) -> None:
    groups = shard_groups(count, k, 11)
    assert sorted(np.concatenate(groups).tolist()) == list(range(count))
    assert all(group.dtype == np.int64 and (np.diff(group) > 0).all() for group in groups)
    size = k if 0 < k < count else count
    assert [len(group) for group in groups[:-1]] == [size] * (len(groups) - 1)
    assert 0 < len(groups[-1]) <= size or count == 0
    again, other = shard_groups(count, k, 11), shard_groups(count, k, 12)
    assert list(map(list, again)) == list(map(list, groups))
    if 1 < k < count:
        assert list(map(list, other)) != list(map(list, groups))
        assert groups[0].tolist() != list(range(k))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 99), st.booleans())
def test_numbers_are_the_inverse_of_rows(groups: list[int], seed: int, shuffle: bool) -> None:
    order = Order(np.asarray(groups), seed, shuffle=shuffle)
    for epoch in range(3) if order.count else ():
        start = epoch * order.count
        numbers = np.arange(start, start + order.count)
        rows = order.rows(start, start + order.count)[1]
        assert order.numbers(epoch, rows).tolist() == numbers.tolist()
