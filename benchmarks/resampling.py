"""How well a method estimates where the CPI of every interval is known: by drawing again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tokmill.bbv.points import clusters
from tokmill.bbv.points.clusters import Floats
from tokmill.bbv.points.designs import Estimate, Random, Sample, expansion, two_phase
from tokmill.bbv.points.executions import Population

DRAWS = 200
"""Samples by which a number of points is judged."""

Method = Callable[[Population, int, Random], Sample]


def centres(population: Population, n: int, random: Random) -> Sample:
    """Choose the interval nearest to the centre of each of `n` clusters, as SimPoint does."""
    labels, means = clusters.k_means(
        population.features, population.shares, n, seed=int(random.integers(2**31))
    )
    off = ((population.features - means[labels]) ** 2).sum(axis=1)
    firsts = clusters.nearest(labels, off, population.shares)
    heavy: Floats = np.bincount(labels, population.shares).astype(np.float64)
    count = len(firsts)
    return Sample(firsts, heavy, np.zeros(count, bool), np.arange(count), n / len(population))


METHODS: dict[str, Method] = {"simpoint": centres, "two-phase": two_phase}


def estimated(method: Method, sample: Sample, cpi: Floats, confidence: float) -> Estimate:
    """Return the estimate of a sample; only intervals that are drawn have a confidence interval."""
    if method is centres:
        return Estimate(float(sample.shares @ cpi), -np.inf, np.inf)
    return expansion(sample, cpi, confidence)


class Resampled(NamedTuple):
    """Errors of many samples of one program; as shares of its CPI."""

    mean: float
    """Mean of the absolute errors."""
    coverage: float
    """Share of the confidence intervals that hold the truth; NaN if the method has none."""


def resample(
    population: Population,
    cpi: Floats,
    method: Method,
    points: int,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    confidence: float = 0.95,
) -> Resampled:
    """Draw many samples and compare their estimates with the truth.

    Args:
        population: of N intervals.
        cpi: (N,) of all of them.
        method: what draws and estimates.
        points: intervals of a sample.
        draws: number of samples.
        seed: of all that is random.
        confidence: of the intervals.
    """
    truth = float(population.shares @ cpi)
    found: list[Estimate] = []
    for number in range(draws):
        random = np.random.default_rng([seed, number])
        sample = method(population, points, random)
        found.append(estimated(method, sample, cpi[sample.places], confidence))
    off = np.abs([one.cpi / truth - 1 for one in found])
    finite = all(np.isfinite(one.high) for one in found)
    # Rounding: where all intervals are equal, the interval is a point.
    room = 1e-9 * abs(truth)
    inside = [one.low - room <= truth <= one.high + room for one in found]
    return Resampled(
        float(off.mean()),
        float(np.mean(inside)) if finite else float("nan"),
    )
