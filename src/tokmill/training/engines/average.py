"""An exponential moving average (EMA) of the weights, which lies beside them in float32.

After an update of the weights, with the decay d and t = 0, 1, … updates of the average before,

    d_t = min(d, (1 + t) / (10 + t))        average ← d_t · average + (1 - d_t) · weights

The average of weights on the way often does better than the last ones (Polyak and Juditsky 1992).
The ramp is that of `num_updates` in TensorFlow's ExponentialMovingAverage
(https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage): the first weights,
which are random, are forgotten within some steps, so nothing has to be divided by 1 - d^t.
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
"""Values that change places at a time."""


def decay_at(decay: float, updates: int) -> float:
    """Return d_t: the share of the average that stays, after so many updates."""
    return min(decay, (1 + updates) / (10 + updates))


class Average:
    """The average of some tensors, beginning with what they are now.

    `parts` returns them, the same shapes each time: float32, on any device, what this process holds
    of each weight. The average takes 4 bytes a value.
    """

    def __init__(self, decay: float, parts: Callable[[], list[Tensor]]) -> None:
        self.decay, self.parts = decay, parts
        self.tensors = [part.clone() for part in parts()]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights in, after they have changed."""
        share = 1 - decay_at(self.decay, self.updates)
        torch._foreach_lerp_(self.tensors, self.parts(), share)
        self.updates += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Let weights and average change places, a block at a time, so without a second copy."""
        for weight, average in zip(self.parts(), self.tensors, strict=True):
            blocks = (torch.split(one.view(-1), BLOCK) for one in (weight, average))
            for one, other in zip(*blocks, strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)

    def metadata(self) -> dict[str, str]:
        """Return what a file of the average says beside its tensors."""
        return {UPDATES: str(self.updates)}

    def load(self, path: Path) -> None:
        """Take the number of updates from a file of an average."""
        said = read_metadata(path).get(UPDATES, "")
        if not re.fullmatch(r"\d{1,18}", said):
            raise damaged(path, "it does not say how often the average was updated")
        self.updates = int(said)
