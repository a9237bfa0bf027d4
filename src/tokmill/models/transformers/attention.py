"""Self-attention: scaled dot products and rotary positions. Masks of documents: `attention_ways`.

Names of tensors carry their shape: B rows, T positions, M selected positions, D width, H
query heads, G key and value heads, K width of a head.

Sources: Vaswani et al. 2017 (attention), Su et al. 2021 (rotary positions), Ainslie et al. 2023
(grouped queries).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokmill.base.errors import UsageError
from tokmill.models.model_inputs import taken
from tokmill.models.transformers.layers import Linear, product_dtype

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries (B, H, T, K), keys and values (B, G, T, K) to (B, H, T, K)."""

Rotation = tuple[Tensor, Tensor]
"""Cosine of each value's angle and sine of it, negative in the first half; (…, T, K) each."""


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How rotary frequencies are lowered for a longer context: `rope_type = "llama3"`."""

    factor: float = 8.0
    """The lowest frequencies are divided by this."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer turns than this in the original context are divided by `factor`."""
    high_freq_factor: float = 4.0
    """Frequencies with more turns than this are not changed; between the two it is linear."""
    original_context: int = 8192
    """Positions that the model was first trained with."""

    def check(self) -> None:
        """Refuse numbers that would lower no frequency, or all of them."""
        low, high = self.low_freq_factor, self.high_freq_factor
        if not (0 < low < high and self.factor > 0 and self.original_context > 0):
            raise UsageError(
                "all four numbers must be above 0, and low_freq_factor below high_freq_factor",
                where="model.rope_scaling",
                hint="Llama 3.1 has 8, 1, 4 and 8192",
            )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Return softmax(q · kᵀ / sqrt(K)) · v, (…, T, K).

    q is (…, T, K), k and v are (…, S, K). A query attends to all S positions; with `causal` to its
    own and those before it; with `mask` (…, T, S), bool, to those where it is true. Only one of the
    two can be given. With fewer key heads than query heads, each serves a group of adjacent ones.
    `dropout`: the share of probabilities that are dropped; the others are scaled by 1 / (1 -
    share).
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped(q, k)
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `attention` in which a position attends to itself and those before it."""
    return attention(q, k, v, causal=True)


def grouped(q: Tensor, k: Tensor) -> bool:
    """Say whether queries have more heads than keys."""
    return q.ndim > 3 and q.shape[-3] != k.shape[-3]


def rotary(
    positions: Tensor, width: int, theta: float = 10_000.0, scaling: RopeScaling | None = None
) -> Rotation:
    """Return the rotation for `rotate`: angle position · theta^(-2i / K) for pair i, in float32.

    `scaling` lowers the frequencies as Llama 3.1 does (Grattafiori et al. 2024; the formula is that
    of its published code).
    """
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    frequency = theta**-exponent
    if scaling is not None:
        turns = frequency * scaling.original_context / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    angle = positions[..., None].float() * frequency
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn each pair (i, i + K / 2) of x (…, T, K) by its angle."""
    cosine, sine = turn
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, dims=-1), sine).type_as(x)


def turn_at(turn: Rotation, places_BM: Tensor) -> Rotation:
    """Return the rotation (B, 1, M, K) of some positions from that of all (B, 1, T, K)."""
    cosine, sine = (taken(part[:, 0], places_BM)[:, None] for part in turn)
    return cosine, sine


class Attention(nn.Module):
    """Self-attention of several heads with parameters `q`, `k`, `v` and `o`."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int = 0,
        head_dim: int = 0,
        bias: bool = False,
    ) -> None:
        """Make the weights; 0 key and value heads: as many as `heads`; width 0: dim / heads."""
        super().__init__()
        self.heads, self.groups = heads, kv_heads or heads
        width = head_dim or dim // heads
        self.q = Linear(dim, self.heads * width, bias=bias)
        self.k = Linear(dim, self.groups * width, bias=bias)
        self.v = Linear(dim, self.groups * width, bias=bias)
        self.o = Linear(self.heads * width, dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        turn: Rotation | None = None,
        attend: Attend = causal_attention,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return (…, T, D). `turn`: from `rotary`, None: no positions; `attend`: the attention.

        With `places` (B, M), positions of x (B, T, D), only their states are returned: (B, M, D).
        """
        x = x.to(product_dtype(x))  # once, and not before each of three products
        asking = x if places is None else taken(x, places)
        q, k = self.split(self.q(asking), self.heads), self.split(self.k(x), self.groups)
        if turn is not None:
            q = rotate(q, turn if places is None else turn_at(turn, places))
            k = rotate(k, turn)
        y = attend(q, k, self.split(self.v(x), self.groups))
        out: Tensor = self.o(y.transpose(-3, -2).flatten(-2))
        return out

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Return (…, heads, T, K) from (…, T, heads · K)."""
        return x.view(*x.shape[:-1], heads, -1).transpose(-3, -2)
