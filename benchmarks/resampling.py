"""How well a method estimates where the CPI of every interval is known: by drawing again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.bbv.points import clusters
from tokmill.bbv.points.clusters import Floats
from tokmill.bbv.points.designs import Estimate, Random, Sample, expansion, two_phase
from tokmill.bbv.points.executions import Population

DRAWS = 200
"""Samples by which a number of points is judged."""
QUANTILE = 95
GROWTH = 1.25
"""Each number of points that is tried is larger by this factor."""
HALF = 2
"""At most one of so many intervals is simulated: with more, simulate all of them."""


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

    points: int
    mean: float
    """Mean of the absolute errors."""
    quantile: float
    """`QUANTILE` per cent of the absolute errors are at most this."""
    coverage: float
    """Share of the confidence intervals that hold the truth; NaN if the method has none."""
    half_width: float
    """Median of half the width of the confidence intervals."""


def resample(
    population: Population,
    cpi: Floats,
    method: Method,
    points: int,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    confidence: float = 0.95,
    advance: Callable[[float], Any] = lambda amount: None,
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
        advance: called with 1 after each sample.
    """
    truth = float(population.shares @ cpi)
    found: list[Estimate] = []
    for number in range(draws):
        random = np.random.default_rng([seed, number])
        sample = method(population, points, random)
        found.append(estimated(method, sample, cpi[sample.places], confidence))
        advance(1)
    off = np.abs([one.cpi / truth - 1 for one in found])
    finite = all(np.isfinite(one.high) for one in found)
    # Rounding: where all intervals are equal, the interval is a point.
    room = 1e-9 * abs(truth)
    inside = [one.low - room <= truth <= one.high + room for one in found]
    return Resampled(
        points,
        float(off.mean()),
        float(np.percentile(off, QUANTILE)),
        float(np.mean(inside)) if finite else float("nan"),
        float(np.median([(one.high - one.low) / 2 / abs(one.cpi) for one in found])),
    )


def enough_points(
    population: Population,
    cpi: Floats,
    method: Method,
    target: float,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    confidence: float = 0.95,
    advance: Callable[[float], Any] = lambda amount: None,
) -> Resampled:
    """Return the errors at the fewest points that reach a target.

    Reached is `target` if `QUANTILE` per cent of the samples are so near to the truth, and at the
    next larger number that is tried, too.

    Raises:
        TokmillError: half of the intervals do not reach it.
    """
    before: Resampled | None = None
    best: Resampled | None = None
    for points in numbers(len(population)):
        found = resample(
            population,
            cpi,
            method,
            points,
            draws=draws,
            seed=seed,
            confidence=confidence,
            advance=advance,
        )
        best = found if best is None or found.quantile < best.quantile else best
        if found.quantile > target:
            before = None
        elif before is not None:
            return before
        else:
            before = found
    if before is not None:
        return before
    what = "there are no intervals" if best is None else (
        f"{QUANTILE} % of the samples are within {best.quantile:.2%} at best, "
        f"with {best.points:,} points"
    )  # fmt: skip
    raise TokmillError(
        f"an error of {target:.3g} cannot be reached with half of {len(population):,} intervals: "
        f"{what}",
        hint="simulate all of it, make intervals shorter, or give --memory: rates tell "
        "intervals apart that run the same blocks",
    )


def numbers(intervals: int) -> list[int]:
    """Return the numbers of points that are tried, rising."""
    found, last = [], max(1, intervals // HALF)
    points = 2.0
    while round(points) < last:
        found.append(round(points))
        points = max(points * GROWTH, points + 1)
    return [*found, last]
