"""Attention within documents, computed in the way that is fastest on the device.

Names of tensors carry their shape: B rows, T positions, M selected positions, H query heads,
G key and value heads, K width of a head, L positions of a document, N = B · T positions of all rows
end to end. `x_BHTK` is (B, H, T, K).

A position attends to its own document, or to the part of it before itself (`Seen`). All ways give
the same result except for rounding; the mask is the slow and readable one. Dropout draws from
torch's generator, and differs between the ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tokmill.models.model import Tensors
from tokmill.models.transformers.attention import Attend, attention, causal_attention, grouped

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
    """Return (N, H, K)."""
    return x_BHTK.transpose(1, 2).flatten(0, 1)


def rows_again(y_NHK: Tensor, like_BHTK: Tensor) -> Tensor:
    """Return (B, H, T, K) from (N, H, K)."""
    return y_NHK.view(len(like_BHTK), -1, *y_NHK.shape[1:]).transpose(1, 2)
