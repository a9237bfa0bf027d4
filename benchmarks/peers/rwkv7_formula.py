"""RWKV-7 as its authors write it, in plain torch: a peer of tokmill's model that shares no code.

From the paper (Peng et al. 2025, arXiv 2503.14456) and the official training code. The recurrence
runs a position after the other, and autograd makes its gradients. Weights have the official names;
`official` maps those of a tokmill checkpoint to them.

Shapes: B rows, T positions, D width, H heads, N width of a head. A row may hold several documents:
`begins` (B, T) bool says where one begins, and nothing is carried over to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

NOT_TRAINED = ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")
"""The first layer has no earlier values to mix in."""
PULL = 1e-4
"""L2Wrap: this times the highest logit is added to its gradient."""
Weights = dict[str, Tensor]


def official(name: str) -> str:
    """Return the official name of a weight of a tokmill checkpoint.

    The official model has one table `emb` and one `head`, here each column has its own.
    """
    name = name.removeprefix("model.")
    name = name.replace("fields.embeddings.column_", "emb.").replace("fields.joined", "emb.joined")
    return name.replace("heads.linear.column_", "head.")


def trained(weights: Mapping[str, Tensor]) -> Weights:
    """Return copies to learn, by their official names."""
    copies = {}
    for name, value in weights.items():
        copy = value.detach().clone()
        copies[official(name)] = copy.requires_grad_(official(name) not in NOT_TRAINED)
    return copies


def groups(weights: Weights, decay: float) -> list[dict[str, object]]:
    """Return the official groups of parameters, with the factor of their learning rate.

    `w0` learns twice as fast. Only matrices whose name has `.weight` decay.
    """
    twice, decayed, others = [], [], []
    for name, weight in weights.items():
        if not weight.requires_grad:
            continue
        if "att.w0" in name:
            twice.append(weight)
        elif weight.squeeze().ndim >= 2 and ".weight" in name:
            decayed.append(weight)
        else:
            others.append(weight)
    return [
        {"params": others, "weight_decay": 0.0, "scale": 1.0},
        {"params": twice, "weight_decay": 0.0, "scale": 2.0},
        {"params": decayed, "weight_decay": decay, "scale": 1.0},
    ]


def rate(step: int, steps: int, warmup: int, highest: float, floor: float) -> float:
    """Return the learning rate of a step from 0: a linear warm-up, then a cosine."""
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return highest * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)


def part(weights: Weights, prefix: str) -> Weights:
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def before(x: Tensor, begins: Tensor) -> Tensor:
    """Return the position before each (B, T, D); zeros where a document begins."""
    return F.pad(x, (0, 0, 1, -1)).masked_fill(begins[..., None], 0)


AT_ONCE = 8
"""Positions whose steps are compiled together: fewer calls, the same products and sums."""


def positions(
    state: Tensor, r: Tensor, decay: Tensor, k: Tensor, v: Tensor, removed: Tensor, added: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state (B · H, N, N) after some positions, and their outputs.

    Inputs are (positions, B · H, N).
    """
    outputs = []
    for t in range(len(r)):
        lost = (state * removed[t][:, None]).sum(-1)
        state = (
            state * decay[t][:, None]
            + lost[..., None] * added[t][:, None]
            + v[t][..., None] * k[t][:, None]
        )
        outputs.append((state * r[t][:, None]).sum(-1))
    return state, torch.stack(outputs)


@functools.cache
def compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(positions, dynamic=False)


def recurrence(
    r: Tensor, decay: Tensor, k: Tensor, v: Tensor, kappa: Tensor, a: Tensor, begins: Tensor
) -> Tensor:
    """Return y (B, T, H, N), a position after the other; S is (value, key) of each head.

        S ← S (diag(decay) - κ̂ᵀ (a ⊙ κ̂)) + vᵀ k        y = S r

    Where a document begins, S counts as 0: it only occurs in the products with decay and κ̂.
    """
    rows, length, heads, width = r.shape
    goes_on = ~begins[:, :, None, None]

    def cut(x: Tensor) -> tuple[Tensor, ...]:
        return x.transpose(0, 1).reshape(length, rows * heads, width).split(AT_ONCE)

    state = r.new_zeros(rows * heads, width, width)
    outputs = []
    inputs = r, decay * goes_on, k, v, -kappa * goes_on, kappa * a
    for some in zip(*map(cut, inputs), strict=True):
        whole = len(some[0]) == AT_ONCE
        state, y = (compiled() if whole else positions)(state, *some)
        outputs.append(y)
    return torch.cat(outputs).view(length, rows, heads, width).transpose(0, 1)


def time_mix(
    x: Tensor, first: Tensor | None, weights: Weights, begins: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Return the branch with the recurrence, and the values of the first layer."""
    rows, length, width = x.shape
    to_before = before(x, begins) - x
    mixed = {name: torch.addcmul(x, to_before, weights[f"x_{name}"]) for name in "rwkvag"}
    r = mixed["r"] @ weights["receptance.weight"].t()
    k = mixed["k"] @ weights["key.weight"].t()
    v = mixed["v"] @ weights["value.weight"].t()
    w = weights["w0"] + torch.tanh(mixed["w"] @ weights["w1"]) @ weights["w2"]
    w = -F.softplus(-w) - 0.5
    a = torch.sigmoid(weights["a0"] + mixed["a"] @ weights["a1"] @ weights["a2"])
    g = torch.sigmoid(mixed["g"] @ weights["g1"]) @ weights["g2"]
    if first is None:
        first = v
    else:
        share = torch.sigmoid(weights["v0"] + mixed["v"] @ weights["v1"] @ weights["v2"])
        v = v + (first - v) * share
    of_heads = rows, length, heads, width // heads
    kappa = F.normalize((k * weights["k_k"]).view(of_heads), dim=-1, p=2.0)
    k = k * (1 + (a - 1) * weights["k_a"])
    r, k, v_heads, a = r.view(of_heads), k.view(of_heads), v.view(of_heads), a.view(of_heads)
    y = recurrence(r, torch.exp(-torch.exp(w)).view(of_heads), k, v_heads, kappa, a, begins)
    y = y.reshape(rows * length, width)
    y = F.group_norm(y, heads, weights["ln_x.weight"], weights["ln_x.bias"], eps=64e-5)
    bonus = (r * k * weights["r_k"]).sum(-1, keepdim=True) * v_heads
    y = y.view(rows, length, width) + bonus.view(rows, length, width)
    return (y * g) @ weights["output.weight"].t(), first


def channel_mix(x: Tensor, weights: Weights, begins: Tensor) -> Tensor:
    """Return the branch with the squared ReLU."""
    k = torch.addcmul(x, before(x, begins) - x, weights["x_k"])
    return torch.relu(k @ weights["key.weight"].t()) ** 2 @ weights["value.weight"].t()


def embedded(columns: Mapping[str, Tensor], weights: Weights) -> Tensor:
    """Return one vector a position: the embeddings of the columns end to end, and a linear map."""
    parts = [F.embedding(ids, weights[f"emb.{name}.weight"]) for name, ids in columns.items()]
    return torch.cat(parts, -1) @ weights["emb.joined.weight"].t()


def hidden(x: Tensor, begins: Tensor, weights: Weights, layers: int, heads: int) -> Tensor:
    """Return the states (B, T, D) that the heads read, from embedded positions."""
    first = None
    for layer in range(layers):
        block = part(weights, f"blocks.{layer}.")
        if layer == 0:
            x = norm(x, block, "ln0")
        y, first = time_mix(norm(x, block, "ln1"), first, part(block, "att."), begins, heads)
        x = x + y
        x = x + channel_mix(norm(x, block, "ln2"), part(block, "ffn."), begins)
    return norm(x, weights, "ln_out")


class L2Wrap(torch.autograd.Function):
    """The loss unchanged; its gradient pulls the highest logit of each target towards 0."""

    @staticmethod
    def forward(ctx, loss: Tensor, logits: Tensor, targets: Tensor, pull: float) -> Tensor:
        """Return the summed loss of logits (N, V)."""
        ctx.pull = pull
        ctx.save_for_backward(logits, targets)
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor):
        """Add to the gradient of the logits; `scale` is that of the summed loss."""
        logits, targets = ctx.saved_tensors
        highest, place = logits.max(-1, keepdim=True)
        highest = highest * (targets >= 0)[:, None] * ctx.pull * scale
        return scale, torch.zeros_like(logits).scatter_(-1, place, highest), None, None


def losses(
    states: Tensor, targets: Mapping[str, Tensor], weights: Weights, pull: float
) -> Iterator[Tensor]:
    """Yield the summed cross-entropy in nats of each column; targets of -1 are none."""
    for name, wanted in targets.items():
        logits = (states @ weights[f"head.{name}.weight"].t()).flatten(0, 1)
        loss = F.cross_entropy(logits, wanted.flatten(), ignore_index=-1, reduction="sum")
        yield L2Wrap.apply(loss, logits, wanted.flatten(), pull) if pull else loss
