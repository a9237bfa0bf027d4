"""Self-attention within documents: scaled dot products and rotary positions.

Names of tensors carry their shape: B rows, T positions, M selected positions, D width, H
query heads, G key and value heads, K width of a head, L positions of a document, N = B · T
positions of all rows end to end. `x_BHTK` is (B, H, T, K).

Sources: Vaswani et al. 2017 (attention), Su et al. 2021 (rotary positions), Ainslie et al. 2023
(grouped queries).

A position attends to its own document, or to the part of it before itself (`Seen`).
`document_attention` takes the way that is fastest on the device. All ways give the same result
except for rounding; the mask is the slow and readable one. Dropout draws from torch's generator,
and differs between the ways.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokmill.base.errors import UsageError
from tokmill.models.model import Tensors, taken
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
            cosine, sine = turn
            if places is not None:
                cosine, sine = (taken(part[:, 0], places)[:, None] for part in turn)
            q = rotate(q, (cosine, sine))
            k = rotate(k, turn)
        y = attend(q, k, self.split(self.v(x), self.groups))
        return self.o(y.transpose(-3, -2).flatten(-2))

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Return (…, heads, T, K) from (…, T, heads · K)."""
        return x.view(*x.shape[:-1], heads, -1).transpose(-3, -2)


SHORT = 8
"""If documents have fewer tokens on average, one call for each costs more than a mask wastes."""


class Seen(NamedTuple):
    """The part of its document that a position attends to."""

    causal: bool = True
    """True: itself and positions before it; False: also those after it."""
    dropout: float = 0.0
    """The share of probabilities that are dropped."""


CAUSAL = Seen()


def document_attention(
    batch: Tensors, dtype: torch.dtype, width: int, seen: Seen = CAUSAL
) -> Attend:
    """Return attention within documents, in the way that is fastest here.

    `dtype` and `width` are those of a head. The kernel cannot apply dropout; with dropout the mask
    is used in its place.
    """
    borders, device = batch.cu_seqlens, batch.document.device
    if batch.whole:
        if seen.dropout:
            return partial(attention, causal=seen.causal, dropout=seen.dropout)
        return causal_attention if seen.causal else attention
    if borders is not None:
        if has_kernel(device, dtype, width) and not seen.dropout:
            return partial(attention_by_kernel, borders=borders, seen=seen)
        if device.type == "cpu" and batch.document.numel() >= SHORT * (len(borders) - 1):
            lengths = borders.diff().tolist()
            return partial(attention_by_document, lengths=lengths, seen=seen)
    mask = document_mask(batch.document, seen)
    return partial(attention, mask=mask, dropout=seen.dropout)


def attention_at(batch: Tensors, places_BM: Tensor, seen: Seen = CAUSAL) -> Attend:
    """Return `document_attention` for queries only at the positions `places`, (B, H, M, K)."""
    if batch.whole and not seen.causal:
        return partial(attention, dropout=seen.dropout) if seen.dropout else attention
    document, place_T = batch.document, torch.arange(batch.document.shape[1])
    places_BM, place_T = places_BM.clamp(min=0), place_T.to(document.device)
    seen_BMT = document.gather(1, places_BM)[:, :, None] == document[:, None, :]
    if seen.causal:
        seen_BMT &= place_T <= places_BM[..., None]
    return partial(attention, mask=seen_BMT[:, None], dropout=seen.dropout)


def has_kernel(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Say whether a device has `attention_by_kernel`: CUDA from Ampere on, for 16 bits alone."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and width % 8 == 0
        and width <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def document_mask(document_BT: Tensor, seen: Seen = CAUSAL) -> Tensor:
    """Return (B, 1, T, T) bool: the positions that each position attends to.

    Padding is a document of its own, so no row of the mask is empty.
    """
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    place_T = torch.arange(document_BT.shape[1], device=same_BTT.device)
    if seen.causal:
        same_BTT &= place_T <= place_T[:, None]
    return same_BTT[:, None]


def attention_by_document(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, lengths: Sequence[int], seen: Seen = CAUSAL
) -> Tensor:
    """Return attention of one document after the other; `lengths` add up to N.

    On a CPU this is the fastest exact way: it computes nothing that a mask would discard.
    """
    lengths = list(lengths)
    parts = (torch.split(end_to_end(x), lengths) for x in (q_BHTK, k_BGTK, v_BGTK))
    done = []
    for one in zip(*parts, strict=True):
        q_1HLK, k_1GLK, v_1GLK = (x_LHK.transpose(0, 1)[None] for x_LHK in one)
        y_1HLK = attention(q_1HLK, k_1GLK, v_1GLK, causal=seen.causal, dropout=seen.dropout)
        done.append(y_1HLK[0].transpose(0, 1))
    return rows_again(torch.cat(done), q_BHTK)


def attention_by_kernel(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, borders: Tensor, seen: Seen = CAUSAL
) -> Tensor:
    """Return attention within documents by PyTorch's kernel for rows of variable length (CUDA).

    `borders` is int32 (documents + 1,), on the same device. There is no dropout.
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
        window_size=(-1, 0 if seen.causal else -1),
        enable_gqa=grouped(q_BHTK, k_BGTK),
    )
    assert isinstance(y_NHK, Tensor)
    return rows_again(y_NHK, q_BHTK)


def end_to_end(x_BHTK: Tensor) -> Tensor:
    return x_BHTK.transpose(1, 2).flatten(0, 1)


def rows_again(y_NHK: Tensor, like_BHTK: Tensor) -> Tensor:
    """Return (B, H, T, K) from (N, H, K)."""
    return y_NHK.view(len(like_BHTK), -1, *y_NHK.shape[1:]).transpose(1, 2)
