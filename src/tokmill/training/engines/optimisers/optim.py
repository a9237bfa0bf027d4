"""The optimiser of a recipe, its gradients' norm, and the learning rate of a step."""

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from tokmill import plugins
from tokmill.models.model import Group
from tokmill.training.recipe.config import OptimConfig

STEP = "step"
"""State of a weight that is a single number: its steps. All other state has the weight's shape."""
MOMENTS = "moments"
"""Key of a parameter group: the names of the states that the optimiser keeps of each weight."""
NORM_PART = 1 << 18
"""Values whose squares are summed at a time."""


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step, 0 … steps - 1.

    It rises linearly, lr · (step + 1) / warmup, for `warmup` steps. Then, with p from 0 upwards,
    it falls from lr towards lr · floor: linear by 1 - p, cosine by (1 + cos πp) / 2
    (Loshchilov and Hutter 2017, "SGDR", without restarts). wsd (warm-up, stable, decay; Hu et al.
    2024, "MiniCPM") stays at lr, and falls linearly in the last `decay` share of the steps.

    linear and wsd: p is 1 at the last step, whose rate is lr · floor exactly. cosine: p would be 1
    one step later, as in the formula of the paper; its last rate is above lr · floor by at most
    lr · (π / 2n)², n being the steps after the warm-up.

    A kind of optimiser may have a schedule of its own (`OptimConfig.own_rate`).
    """
    own = config.own_rate(step, steps)
    if own is not None:
        return own
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    begin = config.warmup
    if config.schedule == "wsd":
        begin = max(begin, steps - round(config.decay * steps))
    if config.schedule == "constant" or step < begin:
        return config.lr
    end = steps if config.schedule == "cosine" else steps - 1
    p = min(1.0, (step - begin) / (end - begin)) if end > begin else 1.0
    if p == 0:
        return config.lr
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


class Kind(Protocol):
    """The class of an optimiser, a line of `plugins.OPTIMIZERS`: what it has beside torch's own.

    An instance is a `torch.optim.Optimizer`. Its arguments are parameter groups, the configuration
    and the blocks of the model. Each group of an instance has the key `MOMENTS`.
    """

    Config: ClassVar[type[OptimConfig]]
    splits: ClassVar[bool]
    """Whether a part of a weight can be updated without the rest: each value learns by itself, and
    all gradients are clipped by one norm."""
    apart: ClassVar[bool]
    """Whether the gradient of each weight is clipped by its own norm, not by that of all."""

    @staticmethod
    def check(config: OptimConfig, where: str = "") -> None:
        """Raise `UsageError` for impossible values of the optimiser's own keys."""
        ...


def make_optimizer(
    groups: Iterable[Group], config: OptimConfig, blocks: Iterable[nn.Module] = ()
) -> torch.optim.Optimizer:
    """Return the optimiser that a recipe asks for."""
    return plugins.load(plugins.OPTIMIZERS, config.kind)(list(groups), config, list(blocks))


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimiser's state after its first step."""
    return sum(
        weight.numel() * weight.element_size() * sum(kind != STEP for kind in group[MOMENTS])
        for group in optimizer.param_groups
        for weight in group["params"]
    )


def clipped_together(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> list[list[nn.Parameter]]:
    """Return the sets of weights whose gradients are clipped by a common norm."""
    apart: bool = getattr(optimizer, "apart", False)
    return [[weight] for weight in parameters] if apart else [list(parameters)]


def clip_gradients(parameters: Iterable[Tensor] | Tensor, limit: float) -> Tensor:
    """Scale the gradients so that their common norm is at most `limit`; return the norm before.

    `parameters`: as for `torch.nn.utils.clip_grad_norm_`, such as `model.parameters()`. With a
    limit of 0 nothing is scaled. The result stays on the device.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = total_norm([one.grad for one in given if one.grad is not None])
    if limit > 0:
        nn.utils.clip_grads_with_norm_(given, limit, norm)
    return norm


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together, as a scalar on their device.

    On a CPU squares are summed in float64. Torch would add up those of a tensor in float32 one
    after the other, and the result for 38 million values is 0.27 % too small.
    """
    tensors = list(gradients)
    if not tensors or any(type(one) is not Tensor or one.device.type != "cpu" for one in tensors):
        return nn.utils.get_total_norm(tensors)
    parts = [
        torch.linalg.vector_norm(part, dtype=torch.float64)
        for one in tensors
        # In parts, because torch makes a copy in float64.
        for part in torch.split(one.detach().reshape(-1), NORM_PART)
    ]
    norm = torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros(())
    return norm.to(torch.promote_types(tensors[0].dtype, torch.float32))


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
