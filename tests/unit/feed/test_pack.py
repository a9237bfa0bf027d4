"""Best fit on a histogram: small cases by hand, and a thousand million documents."""

import numpy as np
import pytest

from tokmill.base.errors import UsageError
from tokmill.feed.packed import best_fit, cut, rests


@pytest.mark.parametrize("lengths", [[5], [0, 2], [-1]])
def test_pieces_that_no_bin_holds(lengths: list[int]) -> None:
    with pytest.raises(UsageError, match="in bins of 4"):
        best_fit(np.asarray(lengths), np.ones(len(lengths), np.int64), 4)


def test_a_thousand_million_documents() -> None:
    """Its cost is that of the different lengths: in a list of pieces it would not end."""
    capacity = 2048
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
