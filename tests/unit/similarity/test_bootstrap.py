"""Intervals over units that are drawn again."""

import numpy as np
import pytest

from tokmill.similarity.pool_measures import bootstrap, interval


def slow(values: np.ndarray, unit: np.ndarray, drawn: np.ndarray) -> float:
    kinds = np.unique(unit)
    taken = np.concatenate([values[unit == kinds[i]] for i in drawn])
    return float(taken.mean())


def test_means_are_those_of_whole_units_drawn_again() -> None:
    values = np.asarray([[1.0], [0.0], [0.25], [0.5], [1.0]])
    unit = np.asarray([7, 7, 7, 2, 9])
    found = bootstrap(values, np.ones((5, 1), bool), np.zeros(1, int), unit, resamples=50)
    drawn = np.random.default_rng(0).integers(0, 3, (50, 3))
    assert found is not None
    assert found[:, 0] == pytest.approx([slow(values[:, 0], unit, row) for row in drawn])


def test_values_that_do_not_count() -> None:
    values, counted = np.asarray([[1.0], [0.0]]), np.asarray([[True], [False]])
    found = bootstrap(values, counted, np.zeros(1, int), np.asarray([0, 1]), resamples=200)
    assert found is not None
    means = found[:, 0]
    # Drawn twice the unit that counts for nothing: no mean. Else the mean of the other.
    assert set(means[np.isfinite(means)]) == {1.0} and np.isnan(means).any()
    assert interval(means) == (1.0, 1.0)


def test_no_interval_of_one_unit_or_of_nothing() -> None:
    one = np.ones((4, 1)), np.ones((4, 1), bool), np.zeros(1, int)
    assert bootstrap(*one, np.zeros(4, int)) is None
    empty = np.zeros((0, 1)), np.zeros((0, 1), bool), np.zeros(1, int)
    assert bootstrap(*empty, np.zeros(0, int)) is None
    assert interval(np.asarray([np.nan])) is None


def test_intervals_cover() -> None:
    """Of many samples of a known mean, about 95 % have it in their interval."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        values = (random.random((150, 1)) < 0.4).astype(float)
        found = bootstrap(
            values, np.ones((150, 1), bool), np.zeros(1, int), np.arange(150), resamples=300
        )
        assert found is not None
        ends = interval(found[:, 0])
        assert ends is not None
        inside += ends[0] <= 0.4 <= ends[1]
    assert 0.9 <= inside / 200 <= 0.99


def test_a_project_that_differs_makes_the_interval_of_projects_wide() -> None:
    values = np.repeat([[1.0], [1.0], [0.0]], 100, axis=0)
    counted, of = np.ones((300, 1), bool), np.zeros(1, int)
    widths = []
    for unit in (np.arange(300), np.repeat([0, 1, 2], 100)):
        found = bootstrap(values, counted, of, unit)
        assert found is not None
        ends = interval(found[:, 0])
        assert ends is not None
        widths.append(ends[1] - ends[0])
    assert widths[0] < 0.2 < 0.6 < widths[1]
