"""An exponential moving average (EMA) of the weights, kept beside them in float32.

After an update of the weights, with the decay d and t = 0, 1, … earlier updates of the average,

    d_t = min(d, (1 + t) / (10 + t))        average ← d_t · average + (1 - d_t) · weights

The average is often better than the last weights (Polyak and Juditsky 1992). The first updates use
a smaller decay, as `num_updates` does in TensorFlow's ExponentialMovingAverage
(https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage): the random first
weights are forgotten within some steps, so no bias has to be corrected by a division by 1 - d^t.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tokmill.training.engines.tensors import damaged, read_metadata

AVERAGE = "average.safetensors"
UPDATES = "updates"
"""In the metadata of that file: how often the average was updated."""
BLOCK = 1 << 18
"""Values that are swapped at a time."""


def decay_at(decay: float, updates: int) -> float:
    """Return d_t: the share of the average that stays, after so many updates."""
    return min(decay, (1 + updates) / (10 + updates))


class Average:
    """The average of some tensors, which begins with their values now.

    `parts` returns the tensors: what this process holds of each weight, in float32 on any device,
    with the same shapes each time. The average takes 4 bytes a value.
    """

    def __init__(self, decay: float, parts: Callable[[], list[Tensor]]) -> None:
        self.decay, self.parts = decay, parts
        self.tensors = [part.clone() for part in parts()]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights to the average, after they have changed."""
        share = 1 - decay_at(self.decay, self.updates)
        torch._foreach_lerp_(self.tensors, self.parts(), share)
        self.updates += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Swap weights and average, a block at a time, so that no second copy is needed."""
        for weight, average in zip(self.parts(), self.tensors, strict=True):
            blocks = (torch.split(one.view(-1), BLOCK) for one in (weight, average))
            for one, other in zip(*blocks, strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)

    def metadata(self) -> dict[str, str]:
        return {UPDATES: str(self.updates)}

    def load(self, path: Path) -> None:
        """Read the number of updates from a file of an average."""
        said = read_metadata(path).get(UPDATES, "")
        if not re.fullmatch(r"\d{1,18}", said):
            raise damaged(path, "it does not say how often the average was updated")
        self.updates = int(said)
