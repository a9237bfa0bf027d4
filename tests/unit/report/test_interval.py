"""The interval of a mean, against the standard library and against the density itself."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokmill.report.interval import mean_interval, student_t

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40)


def below(t: float, freedom: int) -> float:
    """P(T ≤ t), by Simpson's rule over Student's density."""
    x = np.linspace(0, t, 20_001)
    logs = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    weights = np.tile([2.0, 4.0], 10_001)[:20_001]
    weights[[0, -1]] = 1
    area = float((weights * density).sum()) * (x[1] - x[0]) / 3
    return 0.5 + area * math.exp(logs) / math.sqrt(freedom * math.pi)


@pytest.mark.parametrize("freedom", [*range(1, 41), 100, 1000, 100_000])
def test_the_quantile_is_that_of_the_density(freedom: int) -> None:
    assert below(student_t(freedom), freedom) == pytest.approx(0.975, abs=3e-6)


def test_a_published_example() -> None:
    """NIST/SEMATECH e-Handbook 1.3.5.2: 195 values with a standard deviation of 0.022789."""
    half = student_t(194) * 0.022789 / math.sqrt(195)
    assert half == pytest.approx((9.264679 - 9.258242) / 2, abs=1e-6)


@given(values)
def test_mean_and_deviation_are_those_of_the_standard_library(found: list[float]) -> None:
    mean, half = mean_interval(found)
    expected = statistics.stdev(found) / math.sqrt(len(found)) * student_t(len(found) - 1)
    assert mean == pytest.approx(statistics.fmean(found), rel=1e-12, abs=1e-9)
    assert half == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_what_has_no_interval() -> None:
    assert mean_interval([2.5]) == (2.5, None)
    assert mean_interval([1.0, 1.0]) == (1.0, 0.0)
    mean, half = mean_interval([1.0, math.nan])
    assert math.isnan(mean)
    assert half is None
