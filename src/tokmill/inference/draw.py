"""Which id follows: the likeliest, or one that is drawn, from the logits of many rows at once.

Shapes: B rows, V ids of a column, K of them that may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokmill.errors import TokmillError, UsageError
from tokmill.store.schema import Array

COLDEST = 1e-6
"""A lower temperature is as 0: logits are float32, and differ by more or not at all."""
MOST = 1e300
"""Far above it a float ends."""
BLOCK = 64
"""Numbers of a row that are made ahead."""


RANGES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "temperature": (lambda x: 0 <= x <= MOST, "from 0 to 1e300", "0 takes the likeliest id"),
    "top_k": (lambda x: x >= 0, "from 0", "0 draws from all"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and up to 1", "1 draws from all"),
    "min_p": (lambda x: 0 <= x <= 1, "from 0 to 1", "0 draws from all"),
    "repetition_penalty": (lambda x: 0.01 <= x <= 100, "from 0.01 to 100", "1 changes nothing"),
    "seed": (lambda x: x >= 0, "from 0", "such as 1"),
}
"""Option → what fits, in words too, and a hint; what is no number fits nowhere."""


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """How an id is chosen, in this order: penalty, temperature, top_k, top_p, min_p."""

    temperature: float = 0.8
    """Divides the logits; 0, and what is below a millionth, takes the likeliest id, of equal ones
    the lowest."""
    top_k: int = 50
    """Draw from the k likeliest ids, of equal ones the lowest first; 0: from all."""
    top_p: float = 1.0
    """Of these, draw from the fewest whose probabilities add up to this (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Of these, draw from those that are at least this times as likely as the likeliest (Nguyen et
    al. 2024)."""
    repetition_penalty: float = 1.0
    """Of ids that a row has, logits above 0 are divided by this and others multiplied (Keskar et
    al. 2019)."""
    seed: int = 0
    """Of the draws; a row's own numbers follow from it and from the number of the row."""

    def check(self) -> None:
        """Raise `UsageError` for what is no number or out of its range."""
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
        """Whether nothing is drawn."""
        return self.temperature < COLDEST or self.top_k == 1

    def numbers(self, prompt: int, sample: int) -> Numbers:
        """Return the numbers that a row draws with."""
        return Numbers(self.seed, prompt, sample)


class Numbers:
    """Numbers in [0, 1) of one row, the same in any batch and on any device."""

    def __init__(self, *key: int) -> None:
        # Philox (Salmon et al. 2011) by its counter: numpy's stream does not change with versions.
        self.source = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        self.block: Array = self.source.random(0)
        self.used = 0

    def take(self) -> float:
        """Return the next one."""
        if self.used == len(self.block):
            self.block, self.used = self.source.random(BLOCK), 0
        self.used += 1
        return float(self.block[self.used - 1])


def choose(logits: Tensor, how: Drawing, numbers: Sequence[Numbers], seen: Tensor | None) -> Tensor:
    """Return an id of each row, int64 (B,), from logits (B, V).

    `seen`: bool (B, V), the ids that a row has, where they are penalised. Raises `TokmillError`
    where a logit is no number.
    """
    if seen is not None:
        penalty = float(how.repetition_penalty)
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen[:, : logits.shape[-1]], penalised, logits)
    # Of equal ones the first; a logit that is no number comes before all others.
    likeliest = first_highest(logits)
    highest = logits.gather(-1, likeliest)
    if not bool(highest.isfinite().all()):
        raise TokmillError(
            "the model's logits are no numbers: the training diverged, or weights are damaged",
            hint="sample from other weights, with --at best or --at STEP",
        )
    if how.greedy:
        return likeliest[:, 0]
    # Draws are made on the CPU in float64, so that every device makes the same ones.
    values, ids = best(logits.float().cpu(), how.top_k, ordered=how.top_p < 1)
    weights = values.double().sub_(highest.double().cpu()).div_(float(how.temperature)).exp_()
    if how.top_p < 1:
        shares = weights / weights.sum(-1, keepdim=True)
        weights[shares.cumsum(-1) - shares >= how.top_p] = 0
    if how.min_p:
        weights[weights < how.min_p] = 0
    sums = weights.cumsum(-1)
    at = torch.tensor([[row.take()] for row in numbers], dtype=torch.float64) * sums[:, -1:]
    # Behind the last id that may be drawn sums do not grow: rounding must not lead there.
    most = torch.searchsorted(sums, sums[:, -1:].contiguous())
    place = torch.searchsorted(sums, at, right=True).minimum(most)
    if ids is not None:
        place = ids.gather(-1, place)
    return place[:, 0].to(logits.device)


def first_highest(logits: Tensor) -> Tensor:
    """Return the lowest id (B, 1) of the highest logit, or of one that is no number."""
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        return logits.argmax(-1, keepdim=True)
    # numpy takes a tenth of the time.
    return torch.from_numpy(logits.numpy().argmax(-1, keepdims=True))


def best(logits: Tensor, k: int, ordered: bool) -> tuple[Tensor, Tensor | None]:
    """Return the k highest of logits (B, V) and their ids, (B, K) each; 0: all.

    They fall, equal ones have rising ids, and of equal ones at the border the lowest ids are in.
    All may stay in the order of their ids, which are None then, unless they are to be `ordered`.
    """
    size = logits.shape[-1]
    if not 0 < k < size:
        return logits.sort(dim=-1, descending=True, stable=True) if ordered else (logits, None)
    least = logits.topk(k).values[:, -1:]
    above, level = logits > least, logits == least
    room = k - above.sum(-1, keepdim=True)
    if bool((level.sum(-1, keepdim=True) > room).any()):
        level &= level.cumsum(-1) <= room
    ids = (above | level).nonzero()[:, 1].view(len(logits), k)
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
