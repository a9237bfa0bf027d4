"""CPI by a formula over counted events: modelled, never measured; and its weights, fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tokmill.errors import TokmillError
from tokmill.store.schema import Array

EVENTS = {
    "instructions": ("Ir",),
    "l1_misses": ("I1mr", "D1mr", "D1mw"),
    "ll_misses": ("ILmr", "DLmr", "DLmw"),
    "branch_misses": ("Bcm", "Bim"),
}
"""Term of the formula → the events of callgrind that are added."""
USUAL = {"instructions": 1.0, "l1_misses": 10.0, "ll_misses": 100.0, "branch_misses": 10.0}
"""Cycles an event of the usual estimate (`CEst` of kcachegrind)."""
RATES = {
    "i1_misses": ("I1mr",),
    "d1_misses": ("D1mr", "D1mw"),
    "ll_misses": ("ILmr", "DLmr", "DLmw"),
    "branch_misses": ("Bcm", "Bim"),
}
"""Column of a store → the events of callgrind that are added, per 1,000 instructions."""
LEAST = 8
"""Measured intervals that weights are fitted on at least."""


class Fitted(NamedTuple):
    """Weights that were fitted on the even intervals, and their errors on the odd ones."""

    weights: dict[str, float]
    """Reference cycles an event."""
    median: float
    """Median of |modelled - measured| / measured on the odd intervals."""
    p90: float
    usual_median: float
    """The same of the usual weights, multiplied by one factor that fits the even intervals."""
    constant_median: float
    """The same of the mean of the even intervals."""
    intervals: int


def summed(totals: Sequence[Mapping[str, int]], events: Sequence[str]) -> Array:
    """Return the number of events of each interval (float64)."""
    return np.array([sum(row.get(name, 0) for name in events) for row in totals], np.float64)


def terms(totals: Sequence[Mapping[str, int]]) -> Array:
    """Return the terms of the formula of each interval: (intervals, 4) float64."""
    return np.stack([summed(totals, events) for events in EVENTS.values()], axis=1)


def modelled(totals: Sequence[Mapping[str, int]], weights: Mapping[str, float]) -> Array:
    """Return the modelled CPI of each interval; NaN for one without instructions."""
    values = terms(totals)
    cycles = values @ np.array([weights[name] for name in EVENTS])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values[:, 0] > 0, cycles / values[:, 0], np.nan)


def fit(totals: Sequence[Mapping[str, int]], measured: Array) -> Fitted:
    """Fit the weights on the even intervals with a measured CPI, none of them negative.

    Relative errors are minimised, as CPI differ. Raises `TokmillError` for less than 8 intervals.
    """
    known = np.flatnonzero(np.isfinite(measured) & (summed(totals, ("Ir",)) > 0))
    if len(known) < LEAST:
        raise TokmillError(
            f"{len(known)} intervals have a measured CPI, and weights need {LEAST}",
            hint="--intervals asks for more, or a longer run",
        )
    values = terms(totals)[known]
    rates, cpi = values / values[:, :1], measured[known]
    even, odd = np.arange(len(known)) % 2 == 0, np.arange(len(known)) % 2 == 1
    weights = _not_negative(rates[even] / cpi[even, None], np.ones(int(even.sum())))
    usual = rates @ np.array(list(USUAL.values()))
    usual = usual * np.median(cpi[even] / usual[even])

    def error(guess: Array) -> Array:
        result: Array = np.abs(guess - cpi)[odd] / cpi[odd]
        return result

    fitted = error(rates @ weights)
    return Fitted(
        dict(zip(EVENTS, weights.tolist(), strict=True)),
        float(np.median(fitted)),
        float(np.quantile(fitted, 0.9)),
        float(np.median(error(usual))),
        float(np.median(error(np.full(len(cpi), cpi[even].mean())))),
        len(known),
    )


def _not_negative(matrix: Array, target: Array) -> Array:
    """Return the least squares solution without negative values: the best over all subsets."""
    best, least = np.zeros(matrix.shape[1]), np.inf
    for chosen in range(1, 1 << matrix.shape[1]):
        columns = [i for i in range(matrix.shape[1]) if chosen >> i & 1]
        found, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
        loss = float(((matrix[:, columns] @ found - target) ** 2).sum())
        if (found >= 0).all() and loss < least:
            best, least = np.zeros(matrix.shape[1]), loss
            best[columns] = found
    return best
