"""The CPI of a program, estimated from the CPI of some intervals, with a confidence interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokmill import plugins
from tokmill.bbv.clusters import Floats
from tokmill.bbv.designs import Sample


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
    """Return the variance of a sum of independent parts."""
    count = len(parts)
    return float(((parts - parts.mean()) ** 2).sum()) * count / (count - 1)
