"""The parts of a decoder that do not depend on documents: functions, and modules around them.

All take any leading axes; the axes named in a docstring are the last ones. If PyTorch has the
operation, the function calls it under our own name and signature, so that there is one place to
look; `linear` and `linear_cross_entropy` are faster than those of PyTorch.

torch multiplies float32 matrices with MKL, whose kernels for AVX-512 run on Intel's processors
only. oneDNN, which torch uses for bf16, has them for all: on a Zen 5 it is 1.5 to 2.3 times as
fast, and as exact. On an Intel Xeon MKL is faster, 1.05 to 1.3 times in forward passes and up to 4
times in gradients of weights. oneDNN's operator has no gradient of its own; `OneDnn` gives it one.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def is_intel(description: str) -> bool:
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
    and not is_intel(_description())
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
        return OneDnn.apply(x, weight, bias)  # type: ignore[no-untyped-call]
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
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def product_for(x: Tensor, weight: Tensor) -> Product:
    """Return the faster `linear` for x (N, M) and matrices about as large as a weight.

    It is for products of few rows whose shapes are repeated often, so that compiling a kernel is
    worth it; without a gradient and without autocast.
    """
    many = x.shape[0] >= FEW_ROWS and weight.numel() >= MANY_WEIGHTS
    same = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return onednn if many and same and ONEDNN and torch.backends.mkldnn.enabled else F.linear


class OneDnn(torch.autograd.Function):
    """`linear` by oneDNN, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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


__all__ = [
    "Activation", "FeedForward", "Linear", "RMSNorm", "embedding", "gelu", "linear",
    "linear_cross_entropy", "rms_norm", "silu", "swiglu",
]  # fmt: skip

Activation = Literal["swiglu", "gelu", "gelu_tanh"]

CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Logits in memory at a time. On a CPU 16 MiB in float32, which malloc reuses; from 32 MiB on it
would ask the kernel for new pages each time. On a GPU as many as keep it busy."""
ALIGNED = {"cpu": 1, "cuda": 64}
"""Ids are padded to a multiple of this: an H100 multiplies by 50,257 columns at half the speed."""
LEAST_ROWS = 256
"""Fewest rows of a chunk; with fewer, adding up the weight's gradient costs as much as computing
it."""
MANY_IDS, LEAST_PRODUCT = 8192, 64
"""With more ids than this, a product of so many rows is worth compiling a kernel for; with fewer
ids a chunk has `ROWS`."""


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return rows of `weight` (V, D) as (…, D) from integer ids (…)."""
    return F.embedding(ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """Return x · Φ(x), with Φ exact or by GPT-2's tanh (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh" if approximate else "none")


def swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
) -> Tensor:
    """Return w2 · (silu(w1 · x + b1) ⊙ (w3 · x + b3)) + b2 (Shazeer 2020).

    x is (…, D), w1 and w3 are (F, D), w2 is (D, F).
    """
    x = x.to(product_dtype(x))  # once, and not before each of two products
    return linear(silu(linear(x, w1, b1)) * linear(x, w3, b3), w2, b2)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    pull: float = 0.0,
    bias: Tensor | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return the summed cross-entropy in nats of the logits hidden · weightᵀ + bias.

    hidden is (…, D), weight (V, D), bias (V,), targets int64 (…), -1 where there is nothing to
    learn. Only a chunk of the logits is in memory at a time, in float32; their gradient is computed
    in the same pass. Under autocast the products are in its type. Differentiable once.

    `pull`: adds `pull` · the highest logit to the gradient of that logit, at each position with a
    target. It keeps logits near 0, and is not in the returned loss. (RWKV's L2Wrap.)
    `compiled`: by kernels of torch.compile.
    """
    return LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2),
        weight,
        targets.flatten(),
        product_dtype(hidden),
        torch.is_grad_enabled(),
        pull,
        bias,
        compiled,
    )


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product with x is computed here."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def kind_of(x: Tensor) -> Literal["cpu", "cuda"]:
    return "cuda" if x.is_cuda else "cpu"


def chunk_rows(hidden: Tensor, ids: int) -> int:
    """Return the number of positions whose logits are in memory at a time."""
    return max(LEAST_ROWS, CHUNK[kind_of(hidden)] // ids)


class LinearCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy` for rows, hidden (N, D) and targets (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        learn: bool,
        pull: float,
        bias: Tensor | None,
        compiled: bool,
    ) -> Tensor:
        """Return the loss; keep the gradients for a loss with factor 1."""
        hidden_ND, weight_VD = hidden.to(dtype), weight.to(dtype)
        ids = len(weight)
        padding = -ids % ALIGNED[kind_of(hidden)]
        if padding:
            weight_VD = F.pad(weight_VD, (0, 0, 0, padding))
            bias = bias if bias is None else F.pad(bias, (0, padding))
        of_hidden = torch.empty_like(hidden) if learn and ctx.needs_input_grad[0] else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        of_weight = None
        of_bias = None
        if bias is not None and learn and ctx.needs_input_grad[6]:
            of_bias = torch.zeros(len(weight_VD), dtype=wide, device=hidden.device)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        rows = chunk_rows(hidden, ids)
        compute = compiled_gradient() if compiled else loss_and_gradient
        least = LEAST_PRODUCT if len(weight) > MANY_IDS else ROWS
        # oneDNN makes (D, V) faster than (V, D); MKL makes both as fast, and (V, D) is not turned.
        ctx.turned = prefers_onednn(hidden_ND, weight_VD, least)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits_NV = product(hidden_ND[part], weight_VD.t(), least)
            added, gradient_NV = compute(logits_NV, targets[part], bias, ids, pull, wide)
            loss += added
            if of_bias is not None:
                of_bias += gradient_NV.sum(0, dtype=wide)
            if of_hidden is not None:
                of_hidden[part] = product(gradient_NV, weight_VD, least)
            if learn and ctx.needs_input_grad[1]:
                pair = (hidden_ND[part], gradient_NV)
                left, right = pair if ctx.turned else pair[::-1]
                of_weight = plus_product(of_weight, left.t(), right, wide, least)
        if of_weight is None and learn and ctx.needs_input_grad[1]:  # there are no rows
            of_weight = torch.zeros_like(weight.t() if ctx.turned else weight, dtype=wide)
        if padding:
            of_weight = of_weight if of_weight is None else of_weight[:ids]
            of_bias = of_bias if of_bias is None else of_bias[:ids]
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Return the kept gradients times that of the loss."""
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        if of_hidden is not None:
            of_hidden = of_hidden * scale
        if of_weight is not None and not ctx.turned:
            of_weight = of_weight * scale
        elif of_weight is not None:
            # Transposed while it is copied: what is added to it later is (V, D) and contiguous.
            of_weight = of_weight.t().clone(memory_format=torch.contiguous_format).mul_(scale)
        if of_bias is not None:
            of_bias = of_bias * scale
        return of_hidden, of_weight, None, None, None, None, of_bias, None


def plus_product(
    total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype, least: int
) -> Tensor:
    """Return total + a · b in `dtype`, from `product`; `total` (None at first) is overwritten."""
    if total is None:
        return product(a, b, least).to(dtype)
    if dtype == a.dtype and not prefers_onednn(a, b, least):
        return total.addmm_(a, b)
    return total.add_(product(a, b, least))


def loss_and_gradient(
    logits_NV: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None,
    ids: int,
    pull: float,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in `wide`, and the gradient of the logits.

    Columns from `ids` on are padding.
    """
    wide_NV = logits_NV.to(wide)
    if bias_V is not None:
        wide_NV += bias_V
    wide_NV[:, ids:] = -torch.inf
    loss = cross_entropy_with_gradient_(wide_NV, targets_N, pull)
    return loss, wide_NV.to(logits_NV.dtype)


@functools.cache
def compiled_gradient() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `loss_and_gradient` by torch.compile, from a formula that becomes two passes."""

    def compute(
        logits_NV: Tensor,
        targets_N: Tensor,
        bias_V: Tensor | None,
        ids: int,
        pull: float,
        wide: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        id_V, learnt_N1 = torch.arange(logits_NV.shape[1], device=logits_NV.device), targets_N >= 0
        wide_NV, learnt_N1 = logits_NV.to(wide), learnt_N1[:, None]
        if bias_V is not None:
            wide_NV = wide_NV + bias_V
        wide_NV = torch.where(id_V < ids, wide_NV, -torch.inf)
        total_N1 = wide_NV.logsumexp(-1, keepdim=True)
        target_N1 = targets_N.clamp(min=0)[:, None]
        loss = torch.where(learnt_N1, total_N1 - wide_NV.gather(1, target_N1), 0).sum()
        gradient_NV = (wide_NV - total_N1).exp() - (id_V == target_N1).to(wide)
        if pull:
            highest_N1, at_N1 = wide_NV.max(-1, keepdim=True)
            gradient_NV = gradient_NV + (id_V == at_N1) * (pull * highest_N1)
        return loss, (gradient_NV * learnt_N1).to(logits_NV.dtype)

    return torch.compile(compute)


def cross_entropy_with_gradient_(logits_NV: Tensor, targets_N: Tensor, pull: float = 0.0) -> Tensor:
    """Return the summed cross-entropy and overwrite the logits with their gradient.

    The gradient is softmax(logits) less 1 at the target, and 0 in rows without a target; `pull`:
    see `linear_cross_entropy`.
    """
    learnt_N = targets_N >= 0
    target_N1 = targets_N.clamp(min=0)[:, None]
    highest_N1 = logits_NV.amax(-1, keepdim=True)
    at_N1 = logits_NV.argmax(-1, keepdim=True) if pull else target_N1
    logit_N1 = logits_NV.gather(1, target_N1) - highest_N1
    total_N1 = logits_NV.sub_(highest_N1).exp_().sum(-1, keepdim=True)
    loss_N = (total_N1.log() - logit_N1)[:, 0]
    logits_NV.mul_(learnt_N[:, None] / total_N1)
    logits_NV.scatter_add_(1, target_N1, -learnt_N[:, None].to(logits_NV.dtype))
    if pull:
        logits_NV.scatter_add_(1, at_N1, pull * highest_N1 * learnt_N[:, None])
    return torch.where(learnt_N, loss_N, 0).sum()


class Linear(nn.Linear):
    """`linear` with parameters `weight` (N, M) and `bias` (N,)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """`rms_norm` with a parameter `weight` (D,)."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FeedForward(nn.Module):
    """A branch of width `hidden`: `gate`, `up` and `down` (`swiglu`), or `up`, GELU and `down`."""

    def __init__(
        self, dim: int, hidden: int, activation: Activation = "swiglu", bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        if activation == "swiglu":
            self.gate = Linear(dim, hidden, bias=bias)
        self.up = Linear(dim, hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        if self.activation == "swiglu":
            gate = self.gate
            return swiglu(x, gate.weight, down.weight, up.weight, gate.bias, down.bias, up.bias)
        return down(gelu(up(x), approximate=self.activation == "gelu_tanh"))


class Scores(NamedTuple):
    """Scores of one column at each position; 0 and False without a target."""

    loss: Tensor
    """(B, T) float32 or wider: -log p(target), in nats."""
    right: Tensor
    """(B, T) bool: whether the target was the likeliest id."""


def token_scores(
    hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, bias_V: Tensor | None = None
) -> Scores:
    """Return the scores of the logits hidden · weightᵀ + bias, without a gradient.

    `targets_BT`: int64, -1 for no target. As in `linear_cross_entropy`, only a chunk of the logits
    is in memory at a time, and products have autocast's type if it is on.
    """
    dtype = product_dtype(hidden_BTD)
    hidden, targets = hidden_BTD.flatten(0, -2).to(dtype), targets_BT.flatten()
    weight_DV = weight_VD.to(dtype).t()
    wide = torch.promote_types(hidden_BTD.dtype, torch.float32)
    loss = torch.zeros(len(targets), dtype=wide, device=targets.device)
    right = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    rows = chunk_rows(hidden, len(weight_VD))
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        logits_NV = product(hidden[part], weight_DV).to(wide)
        if bias_V is not None:
            logits_NV += bias_V
        target_N = targets[part].clamp(min=0)
        logit_N = logits_NV.gather(1, target_N[:, None])[:, 0]
        loss[part] = logits_NV.logsumexp(-1) - logit_N
        right[part] = logits_NV.argmax(-1) == target_N
    valid = targets >= 0
    return Scores(
        torch.where(valid, loss, 0).view(targets_BT.shape), (right & valid).view(targets_BT.shape)
    )
