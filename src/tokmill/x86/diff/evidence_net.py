"""The logit of pairs: a weighted sum of their evidence, and a hidden layer that corrects it.

The layer was learned by `benchmarks/diff_evidence.py`. All numbers are multiples of 1 / UNIT, and
sums of their products fit an f8, so the same evidence gives the same logit on every machine.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokmill.store.schema import Array

FILE = Path(__file__).with_name("evidence_net.npy")
UNIT = 1024
CHUNK = 1 << 11
"""Pairs whose hidden units are held at once."""


class Net(NamedTuple):
    """A layer of H rectified units."""

    hidden: Array
    """(columns of evidence, H) f8."""
    bias: Array
    """(H,) f8."""
    out: Array
    """(H,) f8, weights of the units."""

    @classmethod
    def of(cls, table: Array) -> "Net":
        """Return the net of a table, (columns + 2, H) i2: its fields in rows, in 1 / UNIT."""
        table = table / UNIT
        return cls(table[:-2], table[-2], table[-1])

    def terms(self, weights: Array, *evidence: Array) -> Array:
        """Return of n pairs the weighted sum of evidence, and the correction: (2, n) f4.

        `evidence`: arrays of n rows; side by side they have a column for each weight.
        """
        terms = np.zeros((2, len(evidence[0])), np.float32)
        weights = _units(weights)
        for low in range(0, len(evidence[0]), CHUNK):
            part = slice(low, low + CHUNK)
            seen = _units(np.concatenate([one[part] for one in evidence], 1))
            hidden = seen @ self.hidden
            hidden += self.bias * UNIT
            np.maximum(hidden, 0, out=hidden)
            np.rint(hidden, out=hidden)
            terms[0, part], terms[1, part] = seen @ weights / UNIT**2, hidden @ self.out / UNIT
        return terms


def _units(values: Array) -> Array:
    result = np.multiply(values, UNIT, dtype=np.float64)
    np.rint(result, out=result)
    return result


@cache
def net() -> Net:
    with FILE.open("rb") as file:
        return Net.of(np.lib.format.read_array(file, allow_pickle=False))
