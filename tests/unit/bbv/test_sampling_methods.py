"""Designs and estimates."""

import numpy as np
import pytest
import scipy.sparse

from phases import phases
from tokmill.bbv.points import designs
from tokmill.bbv.points.executions import population


@pytest.mark.parametrize("points", [1, 2, 3, 7, 30, 60])
def test_a_sample_is_of_different_intervals_that_stand_for_all(points: int) -> None:
    made = phases(1, intervals=60)
    sample = designs.two_phase(made.population, points, np.random.default_rng(0))
    assert len(sample) == len(np.unique(sample.places)) == len(sample.shares) == points
    assert sample.shares.sum() == pytest.approx(1) and (sample.shares > 0).all()
    found = designs.expansion(sample, made.cpi[sample.places])
    assert np.isfinite(found.cpi) and found.low <= found.high
    if points == 60:
        assert found.cpi == pytest.approx(made.truth)


def test_the_same_seed_draws_the_same() -> None:
    made = phases(2).population
    draws = [
        designs.two_phase(made, 20, np.random.default_rng(seed)).places.tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_intervals_are_drawn_in_proportion_to_instructions() -> None:
    counts = np.asarray([1.0, 2.0, 3.0, 4.0, 30.0])
    vectors = scipy.sparse.csr_matrix(counts[:, None])
    made = population(vectors, [1])
    times = np.zeros(5)
    random = np.random.default_rng(0)
    for _ in range(4000):
        sample = designs.systematic(made, 3, random)
        times[sample.places] += 1
        # The last has more than a third: it is certain and stands for itself.
        assert sample.certain.tolist() == [True, False, False]
        assert sample.shares[0] == pytest.approx(0.75)
        assert sample.shares[1] == pytest.approx(0.125)
    assert times[4] == 4000
    assert times[:4] / 4000 == pytest.approx(2 * counts[:4] / 10, abs=0.03)


def test_every_interval_that_is_drawn_is_exact() -> None:
    made = phases(3, intervals=20)
    sample = designs.systematic(made.population, 20, np.random.default_rng(0))
    found = designs.expansion(sample, made.cpi[sample.places])
    assert found.cpi == pytest.approx(made.truth)
    assert found.high - found.low < 1e-9
