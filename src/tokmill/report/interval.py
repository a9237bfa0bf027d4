"""The mean over seeds and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

NORMAL = 1.959963984540054
"""The normal distribution's quantile at 1 - (1 - 0.95) / 2."""
STUDENT = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
"""The same quantile of Student's t with 1, 2, … degrees of freedom."""


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, to four digits.

    Beyond the table: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


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
    return mean, student_t(count - 1) * math.sqrt(variance / count)
