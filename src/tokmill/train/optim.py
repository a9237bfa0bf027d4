"""AdamW over parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tokmill.models.model import Group
from tokmill.train.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step, 0 … steps - 1.

    It rises linearly, lr · (step + 1) / warmup, for `warmup` steps; then with p from 0 to 1 over
    what is left it falls from lr to lr · floor: cosine by (1 + cos πp) / 2 (Loshchilov and Hutter
    2017, "SGDR", without restarts), linear by 1 - p.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    p = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    share = (1 + math.cos(math.pi * p)) / 2 if config.schedule == "cosine" else 1 - p
    return config.lr * (config.floor + (1 - config.floor) * share)


def make_optimizer(groups: list[Group], config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019); a group brings `weight_decay` and `lr_scale`."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradients so that their common norm is at most `limit`; return the norm before.

    A limit of 0 only measures. The result stays on the device.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if limit > 0:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
