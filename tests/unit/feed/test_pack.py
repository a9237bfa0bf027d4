"""Best fit on a histogram: small cases by hand, and a thousand million documents."""

import numpy as np
import pytest

from tokmill.base.errors import UsageError
from tokmill.feed.packed import Patterns, best_fit, cut, rests


def listed(patterns: Patterns) -> list[tuple[int, list[tuple[int, int]]]]:
    """(bins, [(length, pieces), …]) of each pattern."""
    entries = list(zip(patterns.lengths.tolist(), patterns.counts.tolist(), strict=True))
    runs = zip(patterns.offsets[:-1].tolist(), patterns.offsets[1:].tolist(), strict=True)
    return [
        (repeats, entries[start:stop])
        for repeats, (start, stop) in zip(patterns.repeats.tolist(), runs, strict=True)
    ]


def packed(histogram: dict[int, int], capacity: int) -> list[tuple[int, list[tuple[int, int]]]]:
    lengths, counts = np.asarray(list(histogram)), np.asarray(list(histogram.values()))
    return listed(best_fit(lengths, counts, capacity))


def test_small_plans_by_hand() -> None:
    assert sorted(packed({10: 3}, 10)) == [(3, [(10, 1)])]
    assert sorted(packed({3: 7}, 10)) == [(1, [(3, 1)]), (2, [(3, 3)])]
    # The fours go where 4 are left, the tighter place, and only then where 5 are left.
    found = sorted(packed({4: 3, 6: 2, 5: 1}, 10))
    assert found == [(1, [(5, 1), (4, 1)]), (2, [(6, 1), (4, 1)])]
    # A group of bins is split where the pieces end.
    found = sorted(packed({6: 5, 2: 3}, 10))
    assert found == [(1, [(6, 1), (2, 1)]), (1, [(6, 1), (2, 2)]), (3, [(6, 1)])]


def test_nothing_to_pack() -> None:
    for lengths in ([], [3]):
        patterns = best_fit(np.asarray(lengths, np.int64), np.zeros(len(lengths), np.int64), 4)
        assert patterns.repeats.tolist() == []
        assert patterns.offsets.tolist() == [0]
        assert patterns.used().tolist() == []


@pytest.mark.parametrize("lengths", [[5], [0, 2], [-1]])
def test_pieces_that_no_bin_holds(lengths: list[int]) -> None:
    with pytest.raises(UsageError, match="in bins of 4"):
        best_fit(np.asarray(lengths), np.ones(len(lengths), np.int64), 4)


def test_used_numbers_the_pieces_of_a_length() -> None:
    patterns = best_fit(np.asarray([6, 5, 2]), np.asarray([3, 2, 7]), 10)
    taken: dict[int, list[int]] = {2: [], 5: [], 6: []}
    used = iter(patterns.used().tolist())
    for repeats, entries in listed(patterns):
        for length, count in entries:
            first = next(used)
            taken[length] += range(first, first + repeats * count)
    assert {length: sorted(numbers) for length, numbers in taken.items()} == {
        2: list(range(7)),
        5: [0, 1],
        6: [0, 1, 2],
    }


@pytest.mark.parametrize("capacity", [2048, 32_768])
def test_a_thousand_million_documents(capacity: int) -> None:
    """Its cost is that of the different lengths: in a list of pieces it would not end."""
    lengths = np.arange(1, 200_000)
    likely = np.exp(-((np.log(lengths) - 6.2) ** 2) / (2 * 1.2**2)) / lengths
    documents = np.random.default_rng(0).multinomial(10**9, likely / likely.sum())
    windows, rest = cut(lengths, capacity, 0)
    order = np.argsort(rest)
    pieces, counts, _ = rests(rest[order], documents[order])
    patterns = best_fit(pieces, counts, capacity)
    tokens = int((lengths * documents).sum()) - int((windows * documents).sum()) * capacity
    assert (pieces * counts).sum() == tokens
    assert tokens / (patterns.repeats.sum() * capacity) >= 0.9999
    assert capacity / 2 < len(patterns.repeats) < 2 * capacity
    assert len(patterns.lengths) < 10 * capacity
