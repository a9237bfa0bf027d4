"""The recurrence of RWKV-7 (Peng et al. 2025, arXiv 2503.14456).

Shapes: B rows, T positions, H heads, N width of a head (of its keys and of its values).

A head keeps a state S, a matrix from keys to values (value, key). With log decays w, and S = 0
before a document's first position,

    S_t = S_{t-1} · diag(exp(w_t)) + (S_{t-1} a_t) b_tᵀ + v_t k_tᵀ        y_t = S_t r_t

`step_by_step` is that, a position after the other, as sampling takes it; `chunked` a chunk of
positions at a time (`wkv7_torch`); `by_fla` is that in the kernels of flash-linear-attention, in
bf16 on CUDA.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tokmill.models.rwkv.wkv7_torch import chunked, continues, step_by_step
from tokmill.plugins import require

Form = Literal["auto", "step_by_step", "chunked", "fla"]
FEW = 8
"""Positions up to which the recurrence itself costs least, where no gradient is wanted."""
HAS_FLA = importlib.util.find_spec("fla") is not None


def wkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None = None,
    *,
    document: Tensor | None = None,
    form: Form = "auto",
) -> tuple[Tensor, Tensor]:
    """Return outputs and the state after the last position.

    Args:
        r, w, k, v, a, b: (B, T, H, N) of one floating type; w is the natural logarithm of the
            decay, at most 0, and above -5 for all but `step_by_step`, whose outputs alone are
            numbers below that. Half precision is computed in float32, but by `fla` in bf16.
        state: (B, H, N, N) (value, key), what a call on the positions before gave; None: zeros. It
            belongs to the first document of the row.
        document: (B, T) integers, equal within a document of the row and other than those of the
            neighbours; the state begins anew with each. None: a row is one document.
        form: "auto" chooses by T, by whether a gradient is wanted, and by device and precision.

    Returns:
        y (B, T, H, N) of the type of r; the state (B, H, N, N) in float32, or in float64.

    """
    wide = torch.promote_types(r.dtype, torch.float32)
    size, length, heads, width = r.shape
    if state is None:
        state = r.new_zeros(size, heads, width, width, dtype=wide)
    inputs = r, w, k, v, a, b
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state))
    if form == "auto":
        form = "fla" if HAS_FLA and _suits_fla(r) else "chunked"
        if not learns and length <= FEW:
            form = "step_by_step"
    if form == "fla":
        return by_fla(*inputs, state, document)
    inputs = r.to(wide), w.to(wide), k.to(wide), v.to(wide), a.to(wide), b.to(wide)
    compute = step_by_step if form == "step_by_step" else chunked
    # Autocast would take the products in half precision, which powers of the decay do not bear.
    with torch.autocast(r.device.type, enabled=False):
        y_BTHN, state = compute(*inputs, state.to(wide), document)
    return y_BTHN.to(r.dtype), state


def _suits_fla(r: Tensor) -> bool:
    """Say whether the kernels of fla take such tensors: they do not promise float32."""
    if r.device.type != "cuda":
        return False
    return r.dtype == torch.bfloat16 or (
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    )


def by_fla(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    document: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `wkv7` does, by `fla.ops.rwkv7.chunk_rwkv7` in bf16; the state stays float32.

    fla's states are (key, value). Documents of a row are sequences of unequal length to it: rows
    are put end to end, and each sequence but the first of a row begins with zeros.
    """
    size, length, heads, width = r.shape
    last = state.to(torch.float32).transpose(-1, -2)
    inputs = [x.to(torch.bfloat16) for x in (r, w, k, v, a, b)]
    if not length:
        return torch.zeros_like(r), last.transpose(-1, -2)
    ends, borders = None, None
    if document is not None:
        begins = ~continues(document)
        begins[:, 0] = True
        borders = begins.reshape(-1).nonzero().squeeze(1)
        ends = F.pad(borders, (0, 1), value=size * length)
        inputs = [x.reshape(1, size * length, heads, width) for x in inputs]
        states = last.new_zeros(len(borders), heads, width, width)
        last = states.index_copy(0, (borders % length == 0).nonzero().squeeze(1), last)
    # safe_gate: tensor cores, for w above -5.
    y, last = require("fla.ops.rwkv7").chunk_rwkv7(
        *inputs,
        initial_state=last.contiguous(),
        output_final_state=True,
        cu_seqlens=ends,
        safe_gate=True,
    )
    if borders is not None:
        # The last sequence of a row is that before the first of the next.
        last = last[torch.cat([(borders[1:] % length == 0), borders.new_ones(1, dtype=torch.bool)])]
    return y.reshape(r.shape).to(r.dtype), last.transpose(-1, -2)
