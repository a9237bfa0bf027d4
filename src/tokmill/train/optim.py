"""AdamW over parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tokmill.models.model import Group
from tokmill.train.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step, 0 … steps - 1.

    It rises linearly, lr · (step + 1) / warmup, for `warmup` steps. Then, with p from 0 to 1 over
    what is left, it falls from lr to lr · floor: cosine by (1 + cos πp) / 2 (Loshchilov and Hutter
    2017, "SGDR", without restarts), linear by 1 - p. wsd (warm-up, stable, decay; Hu et al. 2024,
    "MiniCPM") stays at lr, and its p begins with the last `decay` share of the steps.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    begin = config.warmup
    if config.schedule == "wsd":
        begin = max(begin, steps - round(config.decay * steps))
    if config.schedule == "constant" or step <= begin:
        return config.lr
    p = min(1.0, (step - begin) / max(1, steps - begin))
    share = (1 + math.cos(math.pi * p)) / 2 if config.schedule == "cosine" else 1 - p
    return config.lr * (config.floor + (1 - config.floor) * share)


def same_rates(
    before: OptimConfig, steps_before: int, now: OptimConfig, steps_now: int, done: int
) -> bool:
    """Say whether the first `done` steps have the same learning rates under both recipes."""
    return all(
        learning_rate(before, step, steps_before) == learning_rate(now, step, steps_now)
        for step in range(done)
    )


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
