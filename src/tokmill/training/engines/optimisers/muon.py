"""Muon: updates of matrices inside blocks are orthogonal; AdamW updates all other weights.

With the gradient G of a matrix W of m × n, the momentum μ, the rate η and the decay λ, a step is

    M ← μ M + (1 - μ) G      U = (1 - μ) G + μ M      W ← (1 - η λ) W - .2 η √max(m, n) · orth(U)

orth(U) is about the nearest matrix whose rows (or columns, if they are fewer) are orthonormal: all
singular values of U become about 1 (Jordan 2024, https://kellerjordan.github.io/posts/muon). The
factor in front makes a step about as large as one of AdamW, so that both can use the same rate and
decay (Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982).

torch.optim.Muon computes the same. It is not used here for two reasons. It always multiplies in
bfloat16, which takes 20 to 40 times as long as float32 on a processor without instructions for it.
And it works on one matrix at a time, which takes 4 times as long for small ones.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokmill.base.errors import UsageError
from tokmill.base.recipe import AboveZero, Amount, Part
from tokmill.models.model import Group
from tokmill.training.engines.optimisers.optim import MOMENTS, AdamW
from tokmill.training.recipe.config import OptimConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the polynomial a x + b x³ + c x⁵ that brings singular values near 1 (Jordan 2024)."""
ROUNDS = 5
"""How often the polynomial is applied."""
LEAST = 1e-7
"""A smaller norm is replaced by this one before a division."""
BUFFER = "momentum_buffer"
"""The state of a matrix: M above."""
MATRICES = "matrices"
"""Key of a parameter group: whether Muon updates its weights."""
AT_A_TIME = 1 << 22
"""Values of matrices of one shape that are computed together."""


class MuonConfig(OptimConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Muon's keys, beside those of AdamW, which updates embeddings, heads, norms and biases."""

    kind: Literal["muon"] = "muon"
    lr: Amount = 4e-3
    """Largest learning rate; 4e-3 to 8e-3 were best where AdamW's best was 1.5e-3 to 3e-3."""
    momentum: Part = 0.95
    """Decay rate of the momentum of matrices."""
    matrix_rate: AboveZero = 1.0
    """Learning rate of matrices as a multiple of `lr`; at 1 their steps are as large as AdamW's."""


class Muon(AdamW):
    """Muon for the weights of linear maps inside blocks, AdamW for the others."""

    Config = MuonConfig
    splits = False

    def __init__(
        self, groups: list[Group], config: MuonConfig, blocks: Sequence[nn.Module] = ()
    ) -> None:
        inner = (one for block in blocks for one in block.modules())
        wanted = {id(one.weight) for one in inner if isinstance(one, nn.Linear)}
        new_groups = list(split(groups, wanted, config.matrix_rate))
        if not any(group[MATRICES] for group in new_groups):
            raise UsageError(
                "Muon updates matrices inside blocks, and the model has none",
                where="optim.kind",
                hint="--set optim.kind=adamw",
            )
        self.momentum = config.momentum
        super().__init__(new_groups, config)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            if group[MATRICES]:
                self._move(group)
        self.param_groups = [group for group in groups if not group[MATRICES]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state; AdamW's method would look for its own moments of the matrices."""
        torch.optim.Optimizer.__setstate__(self, state)

    def _move(self, group: Group) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if not weights:
            return
        for weight in weights:
            if BUFFER not in self.state[weight]:
                self.state[weight][BUFFER] = torch.zeros_like(weight)
        gradients = [weight.grad for weight in weights]
        buffers = [self.state[weight][BUFFER] for weight in weights]
        torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
        updates = [g.lerp(m, self.momentum) for g, m in zip(gradients, buffers, strict=True)]
        for some in of_one_shape(updates):
            moves = orthogonal(torch.stack([updates[number] for number in some]))
            rate = group["lr"] * 0.2 * math.sqrt(max(moves.shape[-2:]))
            for number, move in zip(some, moves, strict=True):
                weight = weights[number]
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(move, alpha=-rate)


def split(groups: Iterable[Group], wanted: set[int], rate: float) -> Iterator[Group]:
    """Yield parameter groups, each either with matrices for Muon or with other weights.

    `wanted`: the `id`s of the matrices; `rate`: the factor of their learning rate.
    """
    for group in groups:
        given = list(group["params"])
        chosen = [weight for weight in given if id(weight) in wanted]
        others = [weight for weight in given if id(weight) not in wanted]
        if chosen:
            scale = group["lr_scale"] * rate
            muon = {"params": chosen, MATRICES: True, MOMENTS: (BUFFER,), "lr_scale": scale}
            yield group | muon
        if others:
            yield group | {"params": others, MATRICES: False}


def of_one_shape(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield lists of numbers of matrices with one shape, at most `AT_A_TIME` values together."""
    of_shape: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        of_shape.setdefault(matrix.shape, []).append(number)
    for shape, numbers in of_shape.items():
        count = max(1, AT_A_TIME // max(1, shape.numel()))
        for start in range(0, len(numbers), count):
            yield numbers[start : start + count]


def orthogonal(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return (N, m, n) matrices with all singular values brought near 1, between .7 and 1.2.

    Newton-Schulz iteration: products of matrices alone. They are computed in `dtype`, by default
    bfloat16 where the device has instructions for it, else float32.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype or product_type(matrices.device))
    x = x.mT if tall else x
    # The largest singular value is at most the norm.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def product_type(device: torch.device) -> torch.dtype:
    fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32
