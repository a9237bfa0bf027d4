"""Attention within documents and windows, computed in the way that is fastest on the device.

Names of tensors carry their shape: B rows, T positions, M selected positions, H query heads,
G key and value heads, K width of a head, L positions of a document, N = B · T positions of all rows
end to end. `x_BHTK` is (B, H, T, K).

A position attends to its own document, or to the part of it that `Seen` describes. All ways give
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
LEAST_QUERIES = 128
"""Fewest queries of one part of a row: with fewer a call costs more than it saves."""


class Seen(NamedTuple):
    """The part of its document that a position attends to."""

    causal: bool = True
    """True: itself and positions before it; False: also those after it."""
    window: int = 0
    """Largest distance to each side; 0: no limit."""
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
    if batch.whole and not seen.window:
        if seen.dropout:
            return partial(attention, causal=seen.causal, dropout=seen.dropout)
        return causal_attention if seen.causal else attention
    if batch.whole or borders is not None:
        if has_kernel(device, dtype, width) and not seen.dropout:
            borders = whole_borders(batch.document) if borders is None else borders
            return partial(attention_by_kernel, borders=borders, seen=seen)
        # Compiled, every new list of lengths would be a new program.
        if not torch.compiler.is_compiling():
            if borders is None:
                return partial(windowed_attention, seen=seen)
            if device.type == "cpu" and batch.document.numel() >= SHORT * (len(borders) - 1):
                lengths = borders.diff().tolist()
                return partial(attention_by_document, lengths=lengths, seen=seen)
    mask = document_mask(batch.document, seen)
    return partial(attention, mask=mask, dropout=seen.dropout)


def attention_at(batch: Tensors, places_BM: Tensor, seen: Seen = CAUSAL) -> Attend:
    """Return `document_attention` for queries only at the positions `places`, (B, H, M, K)."""
    if batch.whole and not seen.causal and not seen.window:
        return partial(attention, dropout=seen.dropout) if seen.dropout else attention
    document, place_T = batch.document, torch.arange(batch.document.shape[1])
    places_BM, place_T = places_BM.clamp(min=0), place_T.to(document.device)
    seen_BMT = document.gather(1, places_BM)[:, :, None] == document[:, None, :]
    restrict_(seen_BMT, places_BM[..., None], place_T, seen)
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
    restrict_(same_BTT, place_T[:, None], place_T, seen)
    return same_BTT[:, None]


def restrict_(mask: Tensor, query: Tensor, key: Tensor, seen: Seen) -> None:
    """Remove from a mask (…, T, S) what `seen` excludes; places `query` (…, T, 1) and `key` (S)."""
    if seen.causal:
        mask &= key <= query
    if seen.window:
        mask &= (key - query).abs() <= seen.window


def windowed_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, seen: Seen) -> Tensor:
    """Return attention of rows of one document, computed for one part of the queries at a time.

    Each part has the keys that its windows reach, and a mask of them: time and memory grow with
    T · window, not with T².
    """
    length, window = q_BHTK.shape[2], seen.window
    if not window or length <= window + 1:
        return attention(q_BHTK, k_BGTK, v_BGTK, causal=seen.causal, dropout=seen.dropout)
    done, step = [], max(2 * window, LEAST_QUERIES)
    for start in range(0, length, step):
        stop = min(start + step, length)
        first, last = max(0, start - window), min(length, stop + window)
        place = torch.arange(first, stop if seen.causal else last, device=q_BHTK.device)
        query = torch.arange(start, stop, device=q_BHTK.device)[:, None]
        mask = torch.ones(len(query), len(place), dtype=torch.bool, device=q_BHTK.device)
        restrict_(mask, query, place, seen)
        keys = slice(first, first + len(place))
        q, k, v = q_BHTK[:, :, start:stop], k_BGTK[:, :, keys], v_BGTK[:, :, keys]
        done.append(attention(q, k, v, mask, dropout=seen.dropout))
    return torch.cat(done, dim=2)


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
        done.append(windowed_attention(q_1HLK, k_1GLK, v_1GLK, seen)[0].transpose(0, 1))
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
    reach = seen.window or -1
    y_NHK = varlen_attn(
        end_to_end(q_BHTK),
        end_to_end(k_BGTK),
        end_to_end(v_BGTK),
        borders,
        borders,
        longest,
        longest,
        window_size=(reach, 0 if seen.causal else reach),
        enable_gqa=grouped(q_BHTK, k_BGTK),
    )
    assert isinstance(y_NHK, Tensor)
    return rows_again(y_NHK, q_BHTK)


def whole_borders(document_BT: Tensor) -> Tensor:
    """Return int32 (B + 1,), where rows of one document begin if they are put end to end."""
    rows, length = document_BT.shape
    return torch.arange(rows + 1, dtype=torch.int32, device=document_BT.device) * length


def end_to_end(x_BHTK: Tensor) -> Tensor:
    """Return (N, H, K)."""
    return x_BHTK.transpose(1, 2).flatten(0, 1)


def rows_again(y_NHK: Tensor, like_BHTK: Tensor) -> Tensor:
    """Return (B, H, T, K) from (N, H, K)."""
    return y_NHK.view(len(like_BHTK), -1, *y_NHK.shape[1:]).transpose(1, 2)
