"""The CPI of a program, estimated from the CPI of some intervals, with a confidence interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.bbv.clusters import Floats
from tokmill.bbv.designs import Sample
from tokmill.bbv.population import Population

PENALTIES = 10.0 ** np.arange(-2, 2.1, 0.5)
"""Penalties of ridge regression that are tried, times intervals and the variance of a column.

Smaller ones fit a sample better and go far astray where the program has what the sample lacks.
"""
FULL = 0.98
"""The most of an interval's own prediction that it may decide, when it is left out."""
FEWEST = 4
LEAST_FREEDOM = 3
"""With fewer intervals nothing is regressed."""

Spread = Literal["plain", "successive", "strata"]
"""How errors are taken to vary: independently, from one interval to the next, within strata."""


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


def expansion(
    sample: Sample, cpi: Floats, spread: Spread = "plain", confidence: float = 0.95
) -> Estimate:
    """Estimate by the shares that the intervals stand for.

    Args:
        sample: of `n` intervals.
        cpi: (n,) of each of them.
        spread: how the variance is estimated; successive differences (Wolter 2007, section 8.2)
            are for intervals in the order of time.
        confidence: of the interval, between 0 and 1.
    """
    found = float(sample.shares @ cpi)
    parts = np.where(sample.certain, 0.0, sample.shares * (cpi - found))
    return interval(found, sample, parts, spread, confidence)


def regression(
    population: Population,
    sample: Sample,
    cpi: Floats,
    spread: Spread = "plain",
    confidence: float = 0.95,
    features: Floats | None = None,
) -> Estimate:
    """Estimate by ridge regression on what is known of all intervals.

    The generalised regression estimator (Särndal, Swensson, Wretman 1992, chapter 6): the mean of
    the predictions of all intervals, corrected by the errors of those that were simulated. Its
    variance is that of the errors, each predicted from the other intervals, with the weights with
    which the estimate depends on each (section 6.6), enlarged for the slopes that were fitted.
    Where the program differs from the sample in a direction that the sample does not show, the
    slope is unknown: the penalty says how large it may be (ridge regression is a normal prior of
    the slopes), and that variance is added. The penalty is the one with the least error of
    intervals that are left out.

    Args:
        population: of N intervals.
        sample: of n of them.
        cpi: (n,) of the sample.
        spread: as of `expansion`.
        confidence: as of `expansion`.
        features: (N, columns); by default those of the population.
    """
    known = population.features if features is None else features
    if len(sample) < FEWEST or not known.shape[1]:
        return expansion(sample, cpi, spread, confidence)
    chosen = known[sample.places]
    middle = population.shares @ known
    scale = float((population.shares @ (known - middle) ** 2).mean())
    fitted = ridge(chosen, cpi, scale)
    gap = middle - sample.shares @ chosen
    weights = sample.shares + gap @ fitted.slopes
    # What an interval stands for itself is known; what others are predicted from it is not.
    parts = np.where(sample.certain, weights - sample.shares, weights) * fitted.errors
    count = len(sample)
    parts *= np.sqrt((count - 1) / max(count - 1 - fitted.freedom, LEAST_FREEDOM))
    unseen = fitted.unseen(gap) * float(fitted.errors @ fitted.errors) / count
    return interval(float(weights @ cpi), sample, parts, spread, confidence, unseen)


class Ridge(NamedTuple):
    """A ridge regression on n intervals."""

    slopes: Floats
    """(columns, n): their product with the CPI of the intervals are the coefficients."""
    errors: Floats
    """(n,) of each interval if it were left out."""
    freedom: float
    """Degrees of freedom that the slopes take."""
    penalty: float
    sizes: Floats
    """Singular values of the columns, centred."""
    directions: Floats
    """(singular values, columns)."""

    def unseen(self, gap: Floats) -> float:
        """Return the variance of `gap` @ slopes that the penalty leaves, for errors of variance 1.

        The posterior variance gap' (A'A + penalty)^-1 gap, less what the errors explain.
        """
        along = self.directions @ gap
        rest = max(0.0, float(gap @ gap - along @ along))
        kept = along / (self.sizes**2 + self.penalty)
        return float(self.penalty * (kept @ kept) + rest / self.penalty)


def ridge(chosen: Floats, cpi: Floats, scale: float) -> Ridge:
    """Return the ridge regression with the least error of intervals that are left out.

    These errors are in closed form, from the leverages (Allen 1974, PRESS).

    Args:
        chosen: (n, columns) what is known of them.
        cpi: (n,).
        scale: variance of a column, in the mean, over all intervals of the program.
    """
    count = len(cpi)
    left, sizes, right = np.linalg.svd(chosen - chosen.mean(axis=0), full_matrices=False)
    centred = cpi - cpi.mean()
    along = left.T @ centred
    best: Ridge | None = None
    for penalty in PENALTIES * max(count * scale, 1e-300):
        kept = sizes**2 / (sizes**2 + penalty)
        leverage = np.minimum(left**2 @ kept + 1 / count, FULL)
        errors = (centred - left @ (kept * along)) / (1 - leverage)
        if best is None or errors @ errors < best.errors @ best.errors:
            inverse = sizes / (sizes**2 + penalty)
            slopes = right.T @ (inverse[:, None] * left.T)
            slopes = slopes - slopes.mean(axis=1, keepdims=True)
            best = Ridge(slopes, errors, float(kept.sum()), float(penalty), sizes, right)
    assert best is not None
    return best


def interval(
    found: float,
    sample: Sample,
    parts: Floats,
    spread: Spread,
    confidence: float,
    further: float = 0.0,
) -> Estimate:
    """Return an estimate with Student's interval.

    `parts` (n,): weighted errors of the intervals, whose sum is the error of the estimate;
    `further`: variance beside theirs.
    """
    drawn = parts[~sample.certain]
    strata = sample.strata[~sample.certain]
    if not len(drawn):
        return Estimate(found, found, found)
    variance, degrees = 0.0, 0.0
    if spread == "strata":
        of = [drawn[strata == stratum] for stratum in np.unique(strata)]
        one = [_independent(part) for part in of if len(part) > 1]
        alone = np.concatenate([part for part in of if len(part) == 1] or [np.zeros(0)])
        variance = sum(one)
        # Strata of one interval are taken together.
        if len(alone) > 1:
            one.append(_independent(alone))
            variance += one[-1]
        # Satterthwaite 1946.
        sizes = [len(part) for part in of if len(part) > 1] + [len(alone)] * (len(alone) > 1)
        below = sum(v**2 / (size - 1) for v, size in zip(one, sizes, strict=True))
        degrees = variance**2 / below if below > 0 else float(len(drawn) - len(of))
        if not one:
            return Estimate(found, -np.inf, np.inf)
    elif len(drawn) < 2:
        return Estimate(found, -np.inf, np.inf)
    else:
        degrees = float(len(drawn) - 1)
        variance = _independent(drawn) if spread == "plain" else _successive(drawn)
    certain = parts[sample.certain]
    error = np.sqrt(variance * (1 - sample.fraction) + float(certain @ certain) + further)
    quantile = plugins.require("scipy.stats").t.ppf(0.5 + confidence / 2, max(degrees, 1.0))
    return Estimate(found, found - quantile * error, found + quantile * error)


def _independent(parts: Floats) -> float:
    """Return the variance of a sum of independent parts."""
    count = len(parts)
    return float(((parts - parts.mean()) ** 2).sum()) * count / (count - 1)


def _successive(parts: Floats) -> float:
    """Return the variance of a sum of parts that drift: half of the squared differences."""
    count = len(parts)
    return float((np.diff(parts) ** 2).sum()) / 2 * count / (count - 1)
