"""Which intervals of a program to simulate, and what follows of their CPI: survey sampling.

Intervals are drawn in proportion to their instructions (Cochran, Sampling Techniques, 1977,
chapters 5, 8 and 9A). One with so many instructions that it would be drawn twice is taken for
certain.
"""

import functools
from dataclasses import dataclass

import numpy as np

from tokmill import plugins
from tokmill.bbv.points import clusters
from tokmill.bbv.points.clusters import Floats, Ints
from tokmill.bbv.points.executions import Population

Random = np.random.Generator

ENDS_FROM = 10
"""With so many intervals the ends of a program are among those of two-phase sampling."""
OF_STRATUM = 3
"""Intervals a stratum, in the mean, of two-phase sampling."""


@dataclass(frozen=True)
class Sample:
    """Intervals that were drawn."""

    places: Ints
    """(n,) rows of the population; each stands once."""
    shares: Floats
    """(n,) of the program's instructions that each stands for; sums to 1."""
    certain: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """(n,) whether it stands for itself alone."""
    strata: Ints
    """(n,) from which stratum it was drawn; of one design without strata all are 0."""
    fraction: float
    """Share of the intervals that are not certain which were drawn."""

    def __len__(self) -> int:
        return len(self.places)


def certain_intervals(shares: Floats, n: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Say which intervals have at least the share of a draw, of what the others leave."""
    certain = np.zeros(len(shares), bool)
    while (left := n - int(certain.sum())) > 0:
        rest = float(shares[~certain].sum())
        more = ~certain & (shares >= rest / left)
        if not more.any():
            break
        certain |= more
    return certain


def systematic(population: Population, n: int, random: Random) -> Sample:
    """Draw an interval every so many instructions, from a random one on."""
    certain = certain_intervals(population.shares, n)
    places = np.flatnonzero(certain)
    rest = np.flatnonzero(~certain)
    drawn = _steps(population.shares[rest], n - len(places), random)
    left = 1 - population.shares[places].sum()
    count = n - len(places)
    return Sample(
        np.concatenate([places, rest[drawn]]),
        np.concatenate([population.shares[places], np.full(count, left / max(count, 1))]),
        np.arange(n) < len(places),
        np.zeros(n, np.int64),
        count / max(len(rest), 1),
    )


def _steps(shares: Floats, count: int, random: Random) -> Ints:
    if not count:
        return np.zeros(0, np.int64)
    ends = np.cumsum(shares)
    marks = (random.random() + np.arange(count)) / count * ends[-1]
    places = np.searchsorted(ends, marks, side="right")
    return np.minimum(places, len(shares) - 1).astype(np.int64)


def two_phase(population: Population, n: int, random: Random) -> Sample:
    """Draw from strata of similar intervals: two-phase stratified sampling.

    Of at least `ENDS_FROM` intervals the first and the last one are two, taken for certain: a
    program begins and ends with work of the kernel, which no vector shows. The others are drawn.
    """
    if n < ENDS_FROM:
        return _stratified(population, n, random)
    ends, rest, middle, share = _without_ends(population)
    drawn = _stratified(middle, n - len(ends), random)
    return Sample(
        np.concatenate([ends, rest[drawn.places]]),
        np.concatenate([population.shares[ends], drawn.shares * share]),
        np.concatenate([np.ones(len(ends), bool), drawn.certain]),
        np.concatenate([np.full(len(ends), -1, np.int64), drawn.strata]),
        drawn.fraction,
    )


@functools.lru_cache(maxsize=8)
def _without_ends(population: Population) -> tuple[Ints, Ints, Population, float]:
    """Return (first and last, the others, the population of these, their share)."""
    ends = np.asarray([0, len(population) - 1])
    rest = np.arange(1, len(population) - 1)
    share = float(population.shares[rest].sum())
    middle = Population(rest, population.shares[rest] / share, population.features[rest])
    return ends, rest, middle, share


def _stratified(population: Population, n: int, random: Random) -> Sample:
    """Draw from strata of similar intervals.

    First phase: what is cheap, block and memory vectors, is known of all intervals and clusters
    them. Second phase: of each stratum at least two intervals are drawn, more where instructions
    and the spread of the vectors are larger (Neyman's allocation), at equal steps of time.
    """
    labels = strata(population, max(1, n // OF_STRATUM))
    sizes = np.bincount(labels)
    heavy: Floats = np.bincount(labels, population.shares).astype(np.float64)
    off = population.features - _means(population, labels, heavy)[labels]
    squares = population.shares * (off**2).sum(axis=1)
    spread = np.sqrt(np.bincount(labels, squares) / heavy)
    # Half by instructions: what is known is no CPI, and may miss what spreads it.
    wanted = heavy * (spread / max(float(heavy @ spread), 1e-300) + 1)
    counts = _allotted(wanted, sizes, n)
    parts = []
    for stratum in np.flatnonzero(counts):
        places = np.flatnonzero(labels == stratum)
        inner = Population(
            places, population.shares[places] / heavy[stratum], population.features[places]
        )
        drawn = systematic(inner, int(counts[stratum]), random)
        parts.append((places[drawn.places], drawn.shares * heavy[stratum], drawn.certain, stratum))
    # A stratum for which there is no interval left is stood for by the others.
    shares = np.concatenate([part[1] for part in parts])
    return Sample(
        np.concatenate([part[0] for part in parts]),
        shares / shares.sum(),
        np.concatenate([part[2] for part in parts]),
        np.concatenate([np.full(len(part[0]), part[3], np.int64) for part in parts]),
        n / len(population),
    )


def _means(population: Population, labels: Ints, heavy: Floats) -> Floats:
    sums = np.zeros((len(heavy), population.features.shape[1]))
    np.add.at(sums, labels, population.shares[:, None] * population.features)
    return sums / heavy[:, None]


@functools.lru_cache(maxsize=8)
def strata(population: Population, k: int) -> Ints:
    """Return the stratum of each interval: clusters of what is known, the same for any draw."""
    return clusters.k_means(population.features, population.shares, k)[0]


def _allotted(wanted: Floats, sizes: Ints, n: int) -> Ints:
    """Return how many of `n` each stratum gets: two, or all it has, and the rest as is wanted."""
    counts = np.zeros(len(sizes), np.int64)
    for least in (1, 2):
        for stratum in np.argsort(-wanted, kind="stable"):
            if counts[stratum] < min(least, sizes[stratum]) and counts.sum() < n:
                counts[stratum] += 1
    while counts.sum() < n:
        # The next goes to where one stands for most.
        open_ = counts < sizes
        counts[np.argmax(np.where(open_, wanted / (counts + 1), -1.0))] += 1
    return counts


@dataclass(frozen=True)
class Estimate:
    """An estimated CPI."""

    cpi: float
    low: float
    high: float
    """The confidence interval; not finite if nothing can be said."""


def expansion(sample: Sample, cpi: Floats) -> Estimate:
    """Estimate by the shares that the intervals stand for, with Student's interval of 95 %."""
    estimate = float(sample.shares @ cpi)
    drawn = (sample.shares * (cpi - estimate))[~sample.certain]
    strata = sample.strata[~sample.certain]
    if not len(drawn):
        return Estimate(estimate, estimate, estimate)
    of = [drawn[strata == stratum] for stratum in np.unique(strata)]
    parts = [part for part in of if len(part) > 1]
    # Strata of one interval are taken together.
    alone = np.concatenate([part for part in of if len(part) == 1] or [np.zeros(0)])
    if len(alone) > 1:
        parts.append(alone)
    if not parts:
        return Estimate(estimate, -np.inf, np.inf)
    variances = [
        float(((part - part.mean()) ** 2).sum()) * len(part) / (len(part) - 1) for part in parts
    ]
    variance = sum(variances)
    # Satterthwaite 1946.
    below = sum(v**2 / (len(part) - 1) for v, part in zip(variances, parts, strict=True))
    degrees = variance**2 / below if below > 0 else float(len(drawn) - len(of))
    error = np.sqrt(variance * (1 - sample.fraction))
    quantile = plugins.require("scipy.stats").t.ppf(0.975, max(degrees, 1.0))
    return Estimate(estimate, estimate - quantile * error, estimate + quantile * error)
