"""The mean over seeds and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokmill import plugins


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of independent values, and half the width of its 95 % interval.

    For n values it is t · s / √n, where s is their standard deviation and t the quantile with n - 1
    degrees of freedom (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.2). There is no
    interval for a single value, or if values are not finite.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2 or not math.isfinite(mean):
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = float(plugins.require("scipy.special").stdtrit(count - 1, 0.975))
    return mean, quantile * math.sqrt(variance / count)
