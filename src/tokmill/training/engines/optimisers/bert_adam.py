"""BertAdam: the optimiser with which BERT was trained.

With the gradient g of one weight w, its norm clipped by itself, the decay rates β and the rate η:

    m ← β₁ m + (1 - β₁) g      v ← β₂ v + (1 - β₂) g²      w ← w - η (m / (√v + ε) + λ w)

It is Adam with decoupled weight decay (Loshchilov and Hutter 2019), but without the correction of
the bias of m and v in the first steps, as in `AdamWeightDecayOptimizer` of google-research/bert
(Devlin et al. 2019, arXiv 1810.04805). λ is 0 for biases and norms.

The class of the same name in PyTorch programs differs: it compares whole names of weights, so that
biases and norms decay too; its rate begins at 0, and after the warm-up it follows the line from
`lr` at the first step to 0 at the end, so that it drops by the share of the warm-up.
`exact_original` does the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn

from tokmill.base.errors import UsageError
from tokmill.base.recipe import Amount, Natural, Part, Share
from tokmill.models.model import Group
from tokmill.training.engines.optimisers.optim import MOMENTS, learning_rate
from tokmill.training.recipe.config import OptimConfig

KEPT = ("exp_avg", "exp_avg_sq")
"""What is kept of each weight: its two moments, m and v above."""
AT_A_TIME = 1 << 22
"""Values that are updated together: this bounds the memory of the updates."""
ORIGINAL_SCHEDULES = ("linear", "constant")
"""Schedules of the original that work; its cosine raises a `TypeError`."""


class BertAdamConfig(OptimConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys of BertAdam with the defaults of BERT; `clip` limits each weight's gradient."""

    kind: Literal["bert_adam"] = "bert_adam"
    lr: Amount = 1e-4
    """Largest learning rate; fine-tuning wants 2e-5 to 5e-5."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "linear"
    warmup: Natural = 0
    """Steps over which it rises linearly; 0: `warmup_share` says how many."""
    warmup_share: Part = 0.1
    """Share of the steps over which it rises linearly."""
    floor: Share = 0.0
    weight_decay: Amount = 0.01
    betas: tuple[Part, Part] = (0.9, 0.999)
    eps: Amount = 1e-6
    exact_original: bool = False
    """Do as the PyTorch class of this name: biases and norms decay too, the rate is 0 in the first
    step, and after the warm-up it is `lr` times the share of the steps that is left."""

    def own_rate(self, step: int, steps: int) -> float | None:
        if not self.exact_original:
            if self.warmup or not self.warmup_share:
                return None
            warmup = round(self.warmup_share * steps)
            plain = msgspec.structs.replace(self, warmup=warmup, warmup_share=0.0)
            return learning_rate(plain, step, steps)
        done, share = step / steps, self.warmup / steps if self.warmup else self.warmup_share
        if done < share:
            return self.lr * done / share
        return self.lr * (1 - done) if self.schedule == "linear" else self.lr


class BertAdam(torch.optim.Optimizer):
    """BertAdam over parameter groups, each with `weight_decay` and `lr_scale`."""

    Config: ClassVar[type[OptimConfig]] = BertAdamConfig
    splits = False
    apart = True

    def __init__(
        self, groups: list[Group], config: BertAdamConfig, blocks: Sequence[nn.Module] = ()
    ) -> None:
        kept = [{**group, MOMENTS: KEPT} for group in groups]
        if config.exact_original:
            kept = [{**group, "weight_decay": config.weight_decay} for group in kept]
        self.betas, self.eps = config.betas, config.eps
        super().__init__(kept, {"lr": config.lr})

    @staticmethod
    def check(config: OptimConfig, where: str = "") -> None:
        """Refuse an impossible share, and settings that the original does not have."""
        assert isinstance(config, BertAdamConfig)
        if not config.exact_original:
            return
        if config.schedule not in ORIGINAL_SCHEDULES:
            raise UsageError(
                f"optim.schedule: the original does not train with {config.schedule!r}",
                where=where,
                hint="--set optim.schedule=linear, or --set optim.exact_original=false",
            )
        if config.floor:
            raise UsageError(
                f"optim.floor: the original has no floor, and {config.floor} is asked for",
                where=where,
                hint="--set optim.floor=0, or --set optim.exact_original=false",
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first, second = self.betas
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for some in weight_groups(weights):
                moments, squares = self._moments(some)
                gradients = [weight.grad for weight in some if weight.grad is not None]
                torch._foreach_mul_(moments, first)
                torch._foreach_add_(moments, gradients, alpha=1 - first)
                torch._foreach_mul_(squares, second)
                torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
                below = torch._foreach_sqrt(squares)
                torch._foreach_add_(below, self.eps)
                updates = torch._foreach_div(moments, below)
                if group["weight_decay"]:
                    torch._foreach_add_(updates, some, alpha=group["weight_decay"])
                torch._foreach_add_(some, updates, alpha=-group["lr"])

    def _moments(self, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return both moments of weights, made in their first step."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {name: torch.zeros_like(weight) for name in KEPT}
        first, second = ([self.state[w][name] for w in weights] for name in KEPT)
        return first, second


def weight_groups(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    size = 0
    for weight in weights:
        if some and size + weight.numel() > AT_A_TIME:
            yield some
            some, size = [], 0
        some.append(weight)
        size += weight.numel()
    if some:
        yield some
