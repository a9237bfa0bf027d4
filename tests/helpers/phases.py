"""Programs that never ran: intervals of phases, with block vectors, rates and a known CPI; rows as
block vectors.
"""

from dataclasses import dataclass

import numpy as np
import scipy.sparse

from tokmill.bbv.points.clusters import Floats
from tokmill.bbv.points.executions import Population, population
from tokmill.bbv.points.simpoint import Matrix

BLOCKS = 40


@dataclass(frozen=True)
class Phases:
    """A program."""

    vectors: Matrix
    rates: dict[str, Floats]
    cpi: Floats
    phase: np.ndarray[tuple[int], np.dtype[np.int64]]

    @property
    def population(self) -> Population:
        """What is known before it is simulated."""
        return population(self.vectors, np.arange(BLOCKS), self.rates)

    @property
    def truth(self) -> float:
        """Cycles over instructions."""
        counts = np.asarray(self.vectors.sum(axis=1)).reshape(-1)
        return float(counts @ self.cpi / counts.sum())


def phases(
    seed: int,
    *,
    intervals: int = 400,
    kinds: int = 6,
    drift: float = 0.8,
    noise: float = 0.05,
    tail: float = 0.0,
    seen: bool = True,
) -> Phases:
    """Make a program that stays in a phase for 17 intervals in the mean.

    Args:
        seed: of all that is random.
        intervals: how many.
        kinds: of phases.
        drift: correlation of the noise from one interval to the next.
        noise: standard deviation of the logarithm of CPI inside of a phase.
        tail: sigma of log-normal misses, which cost 0.3 in the median; 0: all similar.
        seen: whether a rate tells them.
    """
    random = np.random.default_rng(seed)
    turns = random.random(intervals) < 0.06
    phase = random.integers(kinds, size=intervals)[np.maximum.accumulate(
        np.where(turns, np.arange(intervals), 0)
    )]  # fmt: skip
    base = np.exp(random.normal(0, 0.5, kinds))
    own = random.random((kinds, BLOCKS)) ** 4
    off = np.zeros(intervals)
    for i in range(1, intervals):
        off[i] = drift * off[i - 1] + random.normal(0, noise * np.sqrt(1 - drift**2))
    misses = random.lognormal(0, tail, intervals) if tail else np.ones(intervals)
    shares = own[phase] * (1 + 0.1 * random.random((intervals, BLOCKS)))
    shares /= shares.sum(axis=1, keepdims=True)
    counts = np.rint(shares * (1e6 * (1 + 0.2 * random.random((intervals, 1)))))
    rates = {
        "d1": 0.1 * base[phase] * np.exp(random.normal(0, 0.3, intervals)),
        "last": 0.003 * misses * seen + 0.001 * random.random(intervals),
    }
    cpi = base[phase] * np.exp(off) + 0.3 * misses
    return Phases(scipy.sparse.csr_matrix(counts), rates, cpi, phase)
