"""What benchmarks/resampling.py says of methods that choose intervals."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from phases import phases
from tokmill.base.errors import TokmillError
from tokmill.bbv.points import designs


@pytest.fixture(scope="module")
def resampling(benchmark_script: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_script("resampling")


CASES = {
    "phases": {"seed": 1},
    "drifting": {"seed": 2, "drift": 0.98, "noise": 0.3},
    "heavy tails": {"seed": 3, "tail": 1.0},
    "long": {"seed": 4, "tail": 1.0, "intervals": 2000},
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_intervals_of_two_phase_sampling_cover_often(case: str, resampling: ModuleType) -> None:
    """Variances of small strata are not known without bias."""
    made = phases(**CASES[case])  # type: ignore[arg-type]
    way = designs.two_phase
    found = resampling.resample(made.population, made.cpi, way, 30, draws=1000)
    assert found.coverage >= 0.9, found


def test_a_target_chooses_the_number_of_points(resampling: ModuleType) -> None:
    made = phases(6)
    known, way = made.population, designs.two_phase
    wide = resampling.enough_points(known, made.cpi, way, 0.05, draws=60)
    narrow = resampling.enough_points(known, made.cpi, way, 0.01, draws=60)
    assert 2 <= wide.points < narrow.points < 200
    assert wide.quantile <= 0.05 and narrow.quantile <= 0.01


def test_a_target_out_of_reach_is_told(resampling: ModuleType) -> None:
    made = phases(7, intervals=40, tail=2.5, seen=False)
    with pytest.raises(TokmillError, match="cannot be reached with half of 40 intervals"):
        resampling.enough_points(made.population, made.cpi, designs.two_phase, 0.001, draws=40)


def test_numbers_of_points_rise_to_half(resampling: ModuleType) -> None:
    for intervals in range(1, 300):
        tried = resampling.numbers(intervals)
        assert tried == sorted(set(tried)) and tried[-1] == max(1, intervals // 2)
