"""Options of sampling, and the random numbers of a row; torch is not needed."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from tokmill.base.recipe import Natural
from tokmill.store.schema import Array

COLDEST = 1e-6
"""A lower temperature acts as 0: float32 logits that differ at all differ by more than this."""
MOST = 1e300
"""The largest temperature; float64 cannot represent much larger numbers."""
BLOCK = 64
"""Random numbers of a row that are made at a time."""


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """How an id is chosen, in this order: temperature, top_k, top_p."""

    temperature: Annotated[float, Meta(ge=0, le=MOST)] = 0.8
    """Divides the logits; 0, or less than a millionth: greedy decoding, ties by the
    lowest id."""
    top_k: Natural = 50
    """Sample from the k likeliest ids, ties by the lowest id; 0: from all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus sampling: the likeliest ids up to this probability (Holtzman et al. 2020)."""
    seed: Natural = 0
    """Seed of sampling; the random numbers of a continuation depend on it and on its number."""

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
