"""The interval of a mean, against the standard library and against the density itself."""

import math
import statistics

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from tokmill.report.comparison.compare_runs import mean_interval

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40)


@given(values)
def test_mean_and_deviation_are_those_of_the_standard_library(found: list[float]) -> None:
    mean, half = mean_interval(found)
    quantile = float(scipy.stats.t.ppf(0.975, len(found) - 1))
    expected = statistics.stdev(found) / math.sqrt(len(found)) * quantile
    assert mean == pytest.approx(statistics.fmean(found), rel=1e-12, abs=1e-9)
    assert half == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_what_has_no_interval() -> None:
    assert mean_interval([2.5]) == (2.5, None)
    assert mean_interval([1.0, 1.0]) == (1.0, 0.0)
    mean, half = mean_interval([1.0, math.nan])
    assert math.isnan(mean)
    assert half is None
