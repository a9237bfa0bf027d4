"""Arithmetic on sorted arrays: the fast way finds what numpy finds."""

from __future__ import annotations

import numpy as np
import pytest

from tokmill.x86.image.ranges import numbered

RANDOM = np.random.default_rng(1)
LONG = RANDOM.integers(0, 2**64, 300, dtype=np.uint64)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(0, np.uint64),
        np.asarray([7], np.uint64),
        np.asarray([2**64 - 1], np.uint64),
        np.asarray([0, 2**64 - 1, 0, 1, 2**63], np.uint64),
        RANDOM.integers(0, 50, 1_000).astype(np.uint64),
        LONG[RANDOM.integers(0, len(LONG), 5_000)],
        # They differ only in the bits that the place takes.
        (np.uint64(2**63) + RANDOM.integers(0, 40, 5_000).astype(np.uint64)),
        np.asarray([2**63 + 1, 2**63, 2**63 + 1, 2**63], np.uint64),
        np.full(1_000, 2**64 - 1, np.uint64),
    ],
)
def test_values_are_numbered_as_numpy_does(values: np.ndarray) -> None:
    before = values.copy()
    found = numbered(values)
    wanted = np.unique(values, return_inverse=True)
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one, other) and one.dtype == other.dtype
    assert np.array_equal(values, before)
