"""What benchmarks/sampling_cpi.py says of methods that choose intervals."""

from collections.abc import Callable
from types import ModuleType

import pytest

from phases import phases
from tokmill.bbv.points import designs


@pytest.fixture(scope="module")
def sampling(benchmark_script: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_script("sampling_cpi")


CASES = {
    "phases": {"seed": 1},
    "drifting": {"seed": 2, "drift": 0.98, "noise": 0.3},
    "heavy tails": {"seed": 3, "tail": 1.0},
    "long": {"seed": 4, "tail": 1.0, "intervals": 2000},
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_intervals_of_two_phase_sampling_cover_often(case: str, sampling: ModuleType) -> None:
    """Variances of small strata are not known without bias."""
    made = phases(**CASES[case])  # type: ignore[arg-type]
    way = designs.two_phase
    found = sampling.resample(made.population, made.cpi, way, 30, draws=1000)
    assert found.coverage >= 0.9, found
