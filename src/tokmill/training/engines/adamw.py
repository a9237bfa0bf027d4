"""AdamW (Loshchilov and Hutter 2019), torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from tokmill.models.model import Group
from tokmill.training.engines.optim import MOMENTS, STEP
from tokmill.training.recipe.config import OptimConfig

KEPT = (STEP, "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight: the number of its steps, and its two moments."""


class AdamW(torch.optim.AdamW):
    """AdamW over parameter groups, each with `weight_decay` and `lr_scale`."""

    Config: ClassVar[type[OptimConfig]] = OptimConfig
    splits = True
    apart = False

    def __init__(
        self, groups: list[Group], config: OptimConfig, blocks: Sequence[nn.Module] = ()
    ) -> None:
        kept = [{MOMENTS: KEPT, **group} for group in groups]
        super().__init__(kept, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    @staticmethod
    def check(config: OptimConfig, where: str = "") -> None:
        """Accept everything: AdamW has no keys of its own."""
