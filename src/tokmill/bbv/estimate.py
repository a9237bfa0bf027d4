"""The CPI of a program, estimated from the CPI of some intervals, with a confidence interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tokmill import plugins
from tokmill.bbv.clusters import Floats
from tokmill.bbv.designs import Sample

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
    """Estimate by the shares that the intervals stand for, with Student's interval.

    Args:
        sample: of `n` intervals.
        cpi: (n,) of each of them.
        spread: how the variance is estimated; successive differences (Wolter 2007, section 8.2)
            are for intervals in the order of time.
        confidence: of the interval, between 0 and 1.
    """
    found = float(sample.shares @ cpi)
    drawn = (sample.shares * (cpi - found))[~sample.certain]
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
    error = np.sqrt(variance * (1 - sample.fraction))
    quantile = plugins.require("scipy.stats").t.ppf(0.5 + confidence / 2, max(degrees, 1.0))
    return Estimate(found, found - quantile * error, found + quantile * error)


def _independent(parts: Floats) -> float:
    """Return the variance of a sum of independent parts."""
    count = len(parts)
    return float(((parts - parts.mean()) ** 2).sum()) * count / (count - 1)


def _successive(parts: Floats) -> float:
    """Return the variance of a sum of parts at equal steps from a random one on.

    Half of the squared differences, and what the place of the first part moves: where the parts
    follow a smooth curve, the sum is off by its rise from end to end times a number that is uniform
    in ±1/2 (the trapezoidal rule).
    """
    count = len(parts)
    noise = float((np.diff(parts) ** 2).sum()) / 2 * count / (count - 1)
    rise = float(parts[-1] - parts[0]) * count / (count - 1)
    return noise + rise**2 / 12
