"""Options of sampling, and the random numbers of a row; torch is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from tokmill.base.errors import UsageError
from tokmill.store.schema import Array

COLDEST = 1e-6
"""A lower temperature acts as 0: float32 logits that differ at all differ by more than this."""
MOST = 1e300
"""The largest temperature; float64 cannot represent much larger numbers."""
BLOCK = 64
"""Random numbers of a row that are made at a time."""


RANGES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "temperature": (lambda x: 0 <= x <= MOST, "from 0 to 1e300", "0 takes the likeliest id"),
    "top_k": (lambda x: x >= 0, "from 0", "0 draws from all"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and up to 1", "1 draws from all"),
    "seed": (lambda x: x >= 0, "from 0", "such as 1"),
}
"""Option → test of its value, the range in words, and a hint. NaN passes no test."""


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """How an id is chosen, in this order: temperature, top_k, top_p."""

    temperature: float = 0.8
    """Divides the logits; 0, or less than a millionth, takes the likeliest id. Among equally likely
    ids the lowest one wins."""
    top_k: int = 50
    """Draw from the k likeliest ids, of equal ones the lowest first; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest ids whose probabilities add up to this (Holtzman et al. 2020)."""
    seed: int = 0
    """Seed of the draws; each row's random numbers depend on it and on the number of the row."""

    def check(self) -> None:
        """Raise `UsageError` for values that are not numbers or are out of range."""
        for name, (fits, limits, hint) in RANGES.items():
            value, whole = getattr(self, name), name in ("top_k", "seed")
            number = isinstance(value, int) if whole else isinstance(value, int | float)
            if isinstance(value, bool) or not number or not fits(value):
                kind = "whole number" if whole else "number"
                raise UsageError(
                    f"{name} is a {kind} {limits}, not {value}",
                    where=f"--{name.replace('_', '-')}",
                    hint=hint,
                )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest id is always taken."""
        return self.temperature < COLDEST or self.top_k == 1

    def numbers(self, prompt: int, sample: int) -> Numbers:
        return Numbers(self.seed, prompt, sample)


class Numbers:
    """Random numbers in [0, 1) of one row, the same in any batch and on any device."""

    def __init__(self, *key: int) -> None:
        # Numpy guarantees that the stream of Philox (Salmon et al. 2011) does not change.
        self.source = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        self.block: Array = self.source.random(0)
        self.used = 0

    def take(self) -> float:
        if self.used == len(self.block):
            self.block, self.used = self.source.random(BLOCK), 0
        self.used += 1
        return float(self.block[self.used - 1])
