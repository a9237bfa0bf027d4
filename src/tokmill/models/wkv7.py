"""The recurrence of RWKV-7 (Peng et al. 2025, arXiv 2503.14456), in three forms of one function.

Shapes: B rows, T positions, H heads, N width of a head (of its keys and of its values).

A head keeps a state S, a matrix from keys to values (value, key). With log decays w, and S = 0
before a document's first position,

    S_t = S_{t-1} · diag(exp(w_t)) + (S_{t-1} a_t) b_tᵀ + v_t k_tᵀ        y_t = S_t r_t

`step_by_step` is that, a position after the other, and `chunked` a chunk of positions at a time
(`wkv7_torch`); `by_kernels` (`wkv7_triton`) is the same in kernels for CUDA, which have not been
run on a GPU yet.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tokmill.models.wkv7_torch import chunked, step_by_step

Form = Literal["auto", "step_by_step", "chunked", "triton"]
FEW = 8
"""Positions up to which the recurrence itself costs least, where no gradient is wanted."""


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
            numbers below that. Half precision is computed in float32.
        state: (B, H, N, N) (value, key), what a call on the positions before gave; None: zeros. It
            belongs to the first document of the row.
        document: (B, T) integers, equal within a document of the row and other than those of the
            neighbours; the state begins anew with each. None: a row is one document.
        form: "auto" chooses by T, by whether a gradient is wanted, and by device, N and type.

    Returns:
        y (B, T, H, N) of the type of r; the state (B, H, N, N) in float32, or in float64.

    Raises `ValueError` for shapes and types that do not fit, and for an unknown form.
    """
    _check(r, w, k, v, a, b, state, form)
    wide = torch.promote_types(r.dtype, torch.float32)
    size, length, heads, width = r.shape
    if state is None:
        state = r.new_zeros(size, heads, width, width, dtype=wide)
    inputs = r, w, k, v, a, b
    if form == "auto":
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state))
        form = _fastest(r) if learns or length > FEW else "step_by_step"
    if form == "triton":
        # Imported here: it registers operators.
        from tokmill.models.wkv7_triton import by_kernels

        return by_kernels(*inputs, state, document)
    inputs = r.to(wide), w.to(wide), k.to(wide), v.to(wide), a.to(wide), b.to(wide)
    compute = {"chunked": chunked, "step_by_step": step_by_step}[form]
    # Autocast would take the products in half precision, which powers of the decay do not bear.
    with torch.autocast(r.device.type, enabled=False):
        y_BTHN, state = compute(*inputs, state.to(wide), document)
    return y_BTHN.to(r.dtype), state


def _check(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    form: str,
) -> None:
    if form not in get_args(Form):
        raise ValueError(f"there is no form {form!r}: {', '.join(get_args(Form))}")
    for name, x in zip("rwkvab", (r, w, k, v, a, b), strict=True):
        if x.ndim != 4 or x.shape != r.shape or not x.is_floating_point():
            raise ValueError(
                f"{name} is {x.dtype} {[*x.shape]}; wanted are six tensors (B, T, H, N) of one "
                f"shape and a floating type, r is {r.dtype} {[*r.shape]}"
            )
    if state is not None:
        shape = (r.shape[0], r.shape[2], r.shape[3], r.shape[3])
        if state.shape != shape:
            raise ValueError(f"the state is {[*state.shape]}, not (B, H, N, N) = {[*shape]}")


def _fastest(r: Tensor) -> Form:
    """Return the form for many positions: kernels on CUDA, where there are some."""
    if r.device.type != "cuda":
        return "chunked"
    from tokmill.models.wkv7_triton import suits

    return "triton" if suits(r) else "chunked"
