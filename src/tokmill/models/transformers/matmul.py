"""Matrix products; in float32 on the CPU by the faster of the two libraries in torch.

torch multiplies float32 matrices with MKL, whose kernels for AVX-512 run on Intel's processors
only. oneDNN, which torch uses for bf16, has them for all: on a Zen 5 it is 1.5 to 2.3 times as
fast, and as exact. On an Intel Xeon MKL is faster, 1.05 to 1.3 times in forward passes and up to 4
times in gradients of weights. oneDNN's operator has no gradient of its own; `Linear` gives it one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def made_by_intel(description: str) -> bool:
    """Say whether the first processor of a /proc/cpuinfo is one of Intel's."""
    names = [line for line in description.splitlines() if line.startswith("vendor_id")]
    return bool(names) and names[0].endswith("GenuineIntel")


def _description() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read(4096)
    except OSError:
        return ""


HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
"""Whether oneDNN's operator is there."""
ONEDNN = (
    HAS_ONEDNN
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and not made_by_intel(_description())
)
"""Whether it is the faster one: it has kernels for AVX-512 where the other has none."""
FEW_ROWS, MANY_WEIGHTS = 4, 1 << 16
"""With fewer rows or a smaller matrix the other library is as fast, in sampling too."""
Product = Callable[..., Tensor]
"""From x, weight and bias, as `linear`."""
ROWS = 512
"""With fewer rows torch's own way is taken: oneDNN compiles a kernel for each shape, which takes
about half a millisecond, and sampling has many shapes."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias, (…, N), from x (…, M), weight (N, M) and bias (N,)."""
    # Shapes that do not fit get PyTorch's message.
    if x.shape[-1] == weight.shape[-1] and prefers_onednn(x, weight):
        y: Tensor = Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x, weight, bias)


def product(a: Tensor, b: Tensor, least: int = ROWS) -> Tensor:
    """Return a · b from matrices; without a gradient. `least`: see `prefers_onednn`."""
    return onednn(a, b.t()) if prefers_onednn(a, b, least) else a @ b


def prefers_onednn(a: Tensor, b: Tensor, least: int = ROWS) -> bool:
    """Say whether a product of (…, M) with a matrix is left to oneDNN: from `least` rows on."""
    return (
        ONEDNN
        and bool(torch.backends.mkldnn.enabled)
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and a.numel() >= least * a.shape[-1]
        and not torch.is_autocast_enabled("cpu")
    )


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias; arguments need not be contiguous."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def product_for(x: Tensor, weight: Tensor) -> Product:
    """Return the faster `linear` for x (N, M) and matrices about as large as a weight.

    It is for products of few rows whose shapes are repeated often, so that compiling a kernel is
    worth it; without a gradient and without autocast.
    """
    many = x.shape[0] >= FEW_ROWS and weight.numel() >= MANY_WEIGHTS
    same = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return onednn if many and same and ONEDNN and torch.backends.mkldnn.enabled else F.linear


class Linear(torch.autograd.Function):
    """`linear` by oneDNN, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return (…, N)."""
        ctx.save_for_backward(x, weight)
        return onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias, where they are asked for."""
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = onednn(gradient, weight.t())
        rows, out = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            of_weight = outer(out, rows)
        if ctx.needs_input_grad[2]:
            of_bias = out.sum(0)
        return of_x, of_weight, of_bias


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀ · b from (rows, N) and (rows, M).

    The kernel is fastest if the wider matrix is on the right.
    """
    return onednn(b.t(), a.t()).t() if a.shape[1] > b.shape[1] else onednn(a.t(), b.t())
