"""Methods that choose intervals of a program and estimate its CPI from theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.base.errors import UsageError, nearest
from tokmill.bbv.points import clusters, designs
from tokmill.bbv.points.clusters import Floats
from tokmill.bbv.points.designs import Random, Sample
from tokmill.bbv.points.population import Population


class Method(NamedTuple):
    """A way to choose intervals, and what follows from their CPI."""

    choose: Callable[[Population, int, Random], Sample]
    """(population, number of intervals, randomness) → sample."""
    draws: bool
    """Whether intervals are drawn at random; only then is there a confidence interval."""

    def infer(self, sample: Sample, cpi: Floats, confidence: float) -> Estimate:
        """Return what the CPI of the intervals of a sample, (n,), says of the program."""
        if not self.draws:
            return Estimate(float(sample.shares @ cpi), -np.inf, np.inf)
        return expansion(sample, cpi, confidence)


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


METHODS: dict[str, Method] = {
    "simpoint": Method(centres, draws=False),
    "two-phase": Method(designs.two_phase, draws=True),
}


def method(name: str) -> Method:
    """Return a method; raises `UsageError` for an unknown name."""
    if name not in METHODS:
        raise UsageError(f"no method is called {name!r}", hint=nearest(name, METHODS))
    return METHODS[name]


@dataclass(frozen=True)
class Estimate:
    """An estimated CPI."""

    cpi: float
    low: float
    high: float
    """The confidence interval; not finite if nothing can be said."""

    @property
    def half_width(self) -> float:
        """Half of the interval's width, as a share of the estimate."""
        return (self.high - self.low) / 2 / abs(self.cpi) if self.cpi else float("inf")


def expansion(sample: Sample, cpi: Floats, confidence: float = 0.95) -> Estimate:
    """Estimate by the shares that the intervals stand for, with Student's interval.

    Args:
        sample: of `n` intervals; errors vary within its strata.
        cpi: (n,) of each of them.
        confidence: of the interval, between 0 and 1.
    """
    found = float(sample.shares @ cpi)
    drawn = (sample.shares * (cpi - found))[~sample.certain]
    strata = sample.strata[~sample.certain]
    if not len(drawn):
        return Estimate(found, found, found)
    of = [drawn[strata == stratum] for stratum in np.unique(strata)]
    parts = [part for part in of if len(part) > 1]
    # Strata of one interval are taken together.
    alone = np.concatenate([part for part in of if len(part) == 1] or [np.zeros(0)])
    if len(alone) > 1:
        parts.append(alone)
    if not parts:
        return Estimate(found, -np.inf, np.inf)
    variances = [_independent(part) for part in parts]
    variance = sum(variances)
    # Satterthwaite 1946.
    below = sum(v**2 / (len(part) - 1) for v, part in zip(variances, parts, strict=True))
    degrees = variance**2 / below if below > 0 else float(len(drawn) - len(of))
    error = np.sqrt(variance * (1 - sample.fraction))
    quantile = plugins.require("scipy.stats").t.ppf(0.5 + confidence / 2, max(degrees, 1.0))
    return Estimate(found, found - quantile * error, found + quantile * error)


def _independent(parts: Floats) -> float:
    count = len(parts)
    return float(((parts - parts.mean()) ** 2).sum()) * count / (count - 1)
