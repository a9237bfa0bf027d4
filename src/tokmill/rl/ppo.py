"""Proximal policy optimisation (Schulman et al., 2017), with masked actions of several parts.

Advantages are generalised (Schulman et al., 2016). `clipped_loss` is the surrogate objective with
clipping; `Entropy` keeps the policy from becoming certain too early.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
STRONGEST = 16.0
"""How many times the coefficient of the entropy grows at most."""


def advantages(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> tuple[Array, Array]:
    """Return (advantages, returns), float64 (T,), of an episode that ended after T moves.

    A_t = Σ_k (γ λ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} − V_t, and V after the end is 0.
    """
    advantage, after, value_after = np.zeros(len(rewards)), 0.0, 0.0
    for place in range(len(rewards) - 1, -1, -1):
        delta = rewards[place] + gamma * value_after - values[place]
        after = delta + gamma * lam * after
        advantage[place], value_after = after, values[place]
    return advantage, advantage + np.asarray(values, np.float64)


def normalised(values: Array) -> Array:
    """Return values with mean 0 and variance 1; with one value, 0."""
    return (values - values.mean()) / (values.std() + 1e-8)


class Losses(NamedTuple):
    """Sums over rows."""

    policy: Tensor
    value: Tensor
    kl: Tensor
    """Estimate of the divergence from the old policy: (r − 1) − log r (Schulman, 2020)."""
    clipped: Tensor
    """Rows whose ratio is outside of the clip."""


def clipped_loss(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    value: Tensor,
    target: Tensor,
    clip: float,
) -> Losses:
    """Return the losses of rows, all (B,), summed.

    policy: −Σ min(r A, clip(r, 1 − ε, 1 + ε) A) with r = exp(logp − old); value: ½ Σ (V − R)².
    """
    log_ratio = logp - old
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    policy = -torch.minimum(ratio * advantage, clipped * advantage).sum()
    with torch.no_grad():
        kl = (ratio - 1 - log_ratio).sum()
        outside = ((ratio - 1).abs() > clip).float().sum()
    return Losses(policy, 0.5 * (value - target).square().sum(), kl, outside)


class Entropy:
    """The coefficient of the entropy, which grows while the policy is too certain.

    `floor`: the least share of the largest possible entropy. Below it the coefficient doubles at
    every step, up to `STRONGEST` times; above it, it halves back to `coefficient`. Below half the
    floor is a collapse.
    """

    def __init__(self, coefficient: float, floor: float) -> None:
        self.coefficient, self.floor = coefficient, floor
        self.strength, self.alarmed = 1.0, False

    @property
    def now(self) -> float:
        return self.coefficient * self.strength

    def see(self, share: float) -> bool:
        """Take the entropy of a step, as a share of the largest; say whether it collapsed now."""
        low = share < self.floor
        self.strength = min(2 * self.strength, STRONGEST) if low else max(self.strength / 2, 1.0)
        collapsed = share < self.floor / 2
        begun, self.alarmed = collapsed and not self.alarmed, collapsed
        return begun

    def state(self) -> dict[str, Any]:
        return {"strength": self.strength, "alarmed": self.alarmed}

    def load(self, state: dict[str, Any]) -> None:
        self.strength, self.alarmed = float(state["strength"]), bool(state["alarmed"])


def minibatches(rows: int, size: int, passes: int) -> list[list[Array]]:
    """Return for each pass the shuffled rows in parts of about `size`; torch's random numbers.

    Parts differ by one row at most: a last small one would teach much from few rows.
    """
    parts = max(1, math.ceil(rows / size))
    return [np.array_split(torch.randperm(rows).numpy(), parts) for _ in range(passes)]
