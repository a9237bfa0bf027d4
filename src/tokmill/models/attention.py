"""Self-attention: scaled dot products, rotary positions, and rows that hold several documents.

Names of tensors carry their shape:
    B rows, T positions, D width, H query heads, G key and value heads, K width of a head,
    N = B · T positions of all rows end to end. `x_BHTK` is (B, H, T, K).

Sources: Vaswani et al. 2017 (attention), Su et al. 2021 (rotary positions), Ainslie et al. 2023
(grouped queries).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokmill.errors import UsageError
from tokmill.models.layers import Linear, RMSNorm, product_dtype
from tokmill.models.model import Tensors
from tokmill.models.predicted import taken

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries (B, H, T, K), keys and values (B, G, T, K) to (B, H, T, K)."""

Rotation = tuple[Tensor, Tensor]
"""Cosine of each value's angle and sine of it, negative in the first half; (…, T, K) each."""

SHORT = 8
"""Tokens of a document, on average, below which calls cost more than the mask throws away."""


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How rotary frequencies are lowered for a longer context: `rope_type = "llama3"`."""

    factor: float = 8.0
    """What the lowest frequencies are divided by."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer turns than this in the original context are divided by `factor`."""
    high_freq_factor: float = 4.0
    """Frequencies with more turns than this in it stay; between the two it is a straight line."""
    original_context: int = 8192
    """Positions that the model was first trained with."""

    def check(self) -> None:
        """Refuse numbers that lower nothing, or everything at once."""
        low, high = self.low_freq_factor, self.high_freq_factor
        if not (0 < low < high and self.factor > 0 and self.original_context > 0):
            raise UsageError(
                "all four numbers must be above 0, and low_freq_factor below high_freq_factor",
                where="model.rope_scaling",
                hint="Llama 3.1 has 8, 1, 4 and 8192",
            )


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return softmax(q · kᵀ / sqrt(K)) · v, (…, T, K).

    q is (…, T, K), k and v are (…, S, K). A query looks at all S positions; with `causal` at its
    own and at those before it; with `mask` (…, T, S), bool, where that is true. Only one of the two
    can be given. With fewer key heads than query heads, each serves a group of neighbours.
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped(q, k)
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `attention` in which a position looks at itself and back."""
    return attention(q, k, v, causal=True)


def grouped(q: Tensor, k: Tensor) -> bool:
    """Say whether queries have more heads than keys."""
    return q.ndim > 3 and q.shape[-3] != k.shape[-3]


def document_attention(
    batch: Tensors, dtype: torch.dtype, width: int, causal: bool = True
) -> Attend:
    """Return the attention in which a position looks at its own document.

    With `causal` it looks at itself and back, without also ahead. `dtype` and `width` are those of
    a head. All ways give the same up to rounding; the mask is the slow one, and the readable one.
    """
    if batch.whole:
        return causal_attention if causal else attention
    borders, device = batch.cu_seqlens, batch.document.device
    if borders is not None:
        if has_kernel(device, dtype, width):
            return partial(attention_by_kernel, borders=borders, causal=causal)
        long = batch.document.numel() >= SHORT * (len(borders) - 1)
        # Compiled, every new list of lengths would be a new program.
        if device.type == "cpu" and long and not torch.compiler.is_compiling():
            lengths = borders.diff().tolist()
            return partial(attention_by_document, lengths=lengths, causal=causal)
    return partial(attention, mask=document_mask(batch.document, causal))


def attention_at(batch: Tensors, places_BM: Tensor, causal: bool = True) -> Attend:
    """Return `document_attention` for queries of the positions `places` alone, (B, H, M, K)."""
    if batch.whole and not causal:
        return attention
    document, length = batch.document, batch.document.shape[1]
    places_BM = places_BM.clamp(min=0)
    seen_BMT = document.gather(1, places_BM)[:, :, None] == document[:, None, :]
    if causal:
        seen_BMT &= torch.arange(length, device=document.device) <= places_BM[..., None]
    return partial(attention, mask=seen_BMT[:, None])


def has_kernel(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Say whether a device has `attention_by_kernel`: CUDA from Ampere on, for 16 bits alone."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and width % 8 == 0
        and width <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def document_mask(document_BT: Tensor, causal: bool = True) -> Tensor:
    """Return where a position may look, (B, 1, T, T) bool: within its document, or `causal` back.

    Padding is a document of its own, so no line of the mask is empty.
    """
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    if causal:
        length = document_BT.shape[1]
        same_BTT &= torch.ones(length, length, dtype=torch.bool, device=same_BTT.device).tril()
    return same_BTT[:, None]


def attention_by_document(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, lengths: Sequence[int], causal: bool = True
) -> Tensor:
    """Return attention of one document after the other; `lengths` add up to N.

    On a CPU this is the fastest exact way: what a mask would throw away is not computed.
    """
    lengths = list(lengths)
    parts = (torch.split(end_to_end(x), lengths) for x in (q_BHTK, k_BGTK, v_BGTK))
    done = []
    for one in zip(*parts, strict=True):
        q_1HLK, k_1GLK, v_1GLK = (x_LHK.transpose(0, 1)[None] for x_LHK in one)
        done.append(attention(q_1HLK, k_1GLK, v_1GLK, causal=causal)[0].transpose(0, 1))
    return rows_again(torch.cat(done), q_BHTK)


def attention_by_kernel(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, borders: Tensor, causal: bool = True
) -> Tensor:
    """Return attention within documents by PyTorch's kernel for lengths that differ (CUDA).

    `borders` is int32 (documents + 1,), on the same device.
    """
    # Imported here: it registers operators that only CUDA has.
    from torch.nn.attention.varlen import varlen_attn

    # No document is longer than a row; the exact length would have to be fetched from the device.
    longest = q_BHTK.shape[2]
    y_NHK = varlen_attn(
        end_to_end(q_BHTK),
        end_to_end(k_BGTK),
        end_to_end(v_BGTK),
        borders,
        borders,
        longest,
        longest,
        window_size=(-1, 0 if causal else -1),
        enable_gqa=grouped(q_BHTK, k_BGTK),
    )
    assert isinstance(y_NHK, Tensor)
    return rows_again(y_NHK, q_BHTK)


def end_to_end(x_BHTK: Tensor) -> Tensor:
    """Return (N, H, K)."""
    return x_BHTK.transpose(1, 2).flatten(0, 1)


def rows_again(y_NHK: Tensor, like_BHTK: Tensor) -> Tensor:
    """Return (B, H, T, K) from (N, H, K)."""
    return y_NHK.view(len(like_BHTK), -1, *y_NHK.shape[1:]).transpose(1, 2)


def rope(
    x: Tensor, positions: Tensor, theta: float = 10_000.0, interleaved: bool = False
) -> Tensor:
    """Return x (…, T, K) with each pair of values turned by position · theta^(-2i / K).

    `positions` are integers (…, T), with an axis of 1 where x has heads. Pair i is (i, i + K / 2),
    as in public Llama checkpoints; `interleaved`: (2i, 2i + 1), as in the paper. The two differ by
    the order of rows in the weights of q and k alone: see `halves_from_pairs`.
    """
    width = x.shape[-1]
    turn = rotary(positions, width, theta)
    if not interleaved:
        return rotate(x, turn)
    halves = rotate(x.reshape(*x.shape[:-1], width // 2, 2).transpose(-1, -2).flatten(-2), turn)
    return halves.view(*x.shape[:-1], 2, width // 2).transpose(-1, -2).flatten(-2)


def halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Return a weight (heads · K, D) of q or k, trained with interleaved pairs, for halves."""
    rows, dim = weight.shape
    return weight.view(heads, rows // heads // 2, 2, dim).transpose(1, 2).reshape(rows, dim)


def rotary(
    positions: Tensor, width: int, theta: float = 10_000.0, scaling: RopeScaling | None = None
) -> Rotation:
    """Return what `rotate` turns by: position · theta^(-2i / K) for pair i, in float32.

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
    """Return the rotation (B, 1, M, K) of some positions, from that of all, (B, 1, T, K)."""
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
        *,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        """Make the weights; 0 key and value heads: as many as `heads`; 0 wide: dim / heads.

        `qk_norm`: queries and keys of each head pass an RMSNorm, `q_norm` and `k_norm`, before they
        are turned (Henry et al. 2020; as in Qwen3).
        """
        super().__init__()
        self.heads, self.groups = heads, kv_heads or heads
        width = head_dim or dim // heads
        self.q = Linear(dim, self.heads * width, bias=bias)
        self.k = Linear(dim, self.groups * width, bias=bias)
        self.v = Linear(dim, self.groups * width, bias=bias)
        self.o = Linear(self.heads * width, dim, bias=bias)
        self.q_norm = RMSNorm(width, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(width, norm_eps) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        turn: Rotation | None = None,
        attend: Attend = causal_attention,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return (…, T, D). `turn`: from `rotary`, None: no positions; `attend`: who sees whom.

        `places`: (B, M), the positions whose states are wanted, of x (B, T, D): then (B, M, D).
        """
        x = x.to(product_dtype(x))  # once, and not before each of three products
        asking = x if places is None else taken(x, places)
        q, k = self.split(self.q(asking), self.heads), self.split(self.k(x), self.groups)
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast the squares are added up in the type of the scales, float32.
            q = self.q_norm(q.type_as(self.q_norm.weight)).type_as(q)
            k = self.k_norm(k.type_as(self.k_norm.weight)).type_as(k)
        if turn is not None:
            q = rotate(q, turn if places is None else turn_at(turn, places))
            k = rotate(k, turn)
        y = attend(q, k, self.split(self.v(x), self.groups))
        out: Tensor = self.o(y.transpose(-3, -2).flatten(-2))
        return out

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Return (…, heads, T, K) from (…, T, heads · K)."""
        return x.view(*x.shape[:-1], heads, -1).transpose(-3, -2)
