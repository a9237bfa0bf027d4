"""Methods that choose intervals of a program and estimate its CPI from theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tokmill.bbv import clusters, designs, estimate
from tokmill.bbv.clusters import Floats
from tokmill.bbv.designs import Random, Sample
from tokmill.bbv.estimate import Estimate
from tokmill.bbv.population import Population
from tokmill.errors import UsageError, nearest


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
        return estimate.expansion(sample, cpi, confidence)


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
