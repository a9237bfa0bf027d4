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
    infer: Callable[[Population, Sample, Floats, float], Estimate]
    """(population, sample, CPI of the sample, confidence) → estimate."""
    help: str


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


def _no_interval(
    population: Population, sample: Sample, cpi: Floats, confidence: float
) -> Estimate:
    # Nothing was drawn at random, so nothing can be said about the error.
    return Estimate(float(sample.shares @ cpi), -np.inf, np.inf)


def _by_proxy(population: Population, sample: Sample, cpi: Floats, confidence: float) -> Estimate:
    # The samples' means of the proxy are all about right: what is left is off the proxy's line.
    found = estimate.expansion(sample, cpi, "plain", confidence)
    if len(sample) < estimate.FEWEST:
        return found
    proxy = population.proxy[:, None]
    scale = float((population.shares @ (proxy - population.shares @ proxy) ** 2)[0])
    errors = estimate.ridge(proxy[sample.places], cpi, scale).errors
    parts = np.where(sample.certain, 0.0, sample.shares * errors)
    return estimate.interval(found.cpi, sample, parts, "plain", confidence)


METHODS: dict[str, Method] = {
    "simpoint": Method(
        centres, _no_interval, "SimPoint 3.2: nearest to the centres of clusters; no interval"
    ),
    "regression": Method(
        designs.systematic,
        lambda p, s, y, c: estimate.regression(p, s, y, "plain", c),
        "every so many instructions, ridge regression on block and memory vectors",
    ),
    "systematic": Method(
        designs.systematic,
        lambda p, s, y, c: estimate.expansion(s, y, "successive", c),
        "every so many instructions",
    ),
    "two-phase": Method(
        designs.two_phase,
        lambda p, s, y, c: estimate.expansion(s, y, "strata", c),
        "strata of similar intervals, more intervals where they vary",
    ),
    "ranked-set": Method(
        designs.ranked_set, _by_proxy, "ranked sets by a proxy of CPI, repeatedly drawn"
    ),
    "random": Method(
        designs.at_random,
        lambda p, s, y, c: estimate.expansion(s, y, "plain", c),
        "at random, in proportion to instructions",
    ),
    "random-regression": Method(
        designs.at_random,
        lambda p, s, y, c: estimate.regression(p, s, y, "plain", c),
        "at random, with the same ridge regression",
    ),
}


def method(name: str) -> Method:
    """Return a method; raises `UsageError` for an unknown name."""
    if name not in METHODS:
        raise UsageError(f"no method is called {name!r}", hint=nearest(name, METHODS))
    return METHODS[name]
