"""The recurrence of RWKV-7 on CUDA: the operator `tokmill::wkv7` and its gradient.

`wkv7(form="triton")` comes here, which takes heads of 32, 64 or 128 in float32 or bf16, and rows of
any length. The kernels and the formulas are in `wkv7_kernels`.

Checked in Triton's interpreter, on a CPU, against the recurrence done a position after the other:
outputs, states and all gradients. Triton 3.7 compiles it for compute capabilities 8.0, 8.9, 9.0 and
10.0. **Not yet run on a GPU**, so nothing here is tuned or timed.

Names of tensors carry their shape: B rows, T positions, H heads, N width of a head, C chunks, L
positions of a chunk.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from tokmill.errors import UsageError
from tokmill.models.wkv7_torch import continues
from tokmill.plugins import require

WIDTHS = (32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16)
CHUNK = 32
"""Positions L of a chunk, a power of two. With RWKV-7's w in (-0.6065, 0), factors of the decay lie
between 6e-5 and 2e4, as exponents reach half a chunk; any w above -5 stays in float32's range."""
HINT = 'form = "auto" takes what fits the device'
LEVELS = CHUNK.bit_length() - 1
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Known when this is imported, as torch.compile cannot look for packages. torch for CUDA brings
it."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in numpy, on tensors of any device."""


def takes(r: Tensor) -> bool:
    """Say whether there are kernels for heads of this width in this type, and Triton."""
    return HAS_TRITON and r.shape[-1] in WIDTHS and r.dtype in DTYPES


def suits(r: Tensor) -> bool:
    """Say whether a CUDA device has what the kernels take for heads of this width.

    These are tf32, from Ampere on, and for heads of 128 as much shared memory as Hopper's.
    """
    major, _ = torch.cuda.get_device_capability(r.device)
    return takes(r) and (major >= 8 if r.shape[-1] < 128 else major in (9, 10))


def by_kernels(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    document: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `wkv7` does, from six tensors of one type.

    Products are as exact as float32 where the inputs are and PyTorch's own would be, by
    `torch.set_float32_matmul_precision`; for bf16 and under autocast they are in tf32.

    Raises:
        MissingExtraError: Triton is not installed.
        UsageError: there is no kernel for this type, this width or this device.
    """
    if r.device.type != "cuda" and not INTERPRETED:
        raise UsageError(
            f"the form triton is for CUDA, not for tensors on {r.device}",
            where="model.form",
            hint=HINT,
        )
    if not HAS_TRITON:
        require("triton")
    if not takes(r):
        raise UsageError(
            "the form triton takes heads of 32, 64 or 128 in float32 or bfloat16, "
            f"not of {r.shape[-1]} in {r.dtype}",
            where="model.form",
            hint=HINT,
        )
    state = state.to(torch.float32)
    if not r.shape[1]:
        return torch.zeros_like(r), state
    if document is None:
        number_BT = torch.zeros(r.shape[:2], dtype=torch.int32, device=r.device)
    else:
        number_BT = (~continues(document)).cumsum(1, dtype=torch.int32)
    rough = torch.is_autocast_enabled(r.device.type)
    y_BTHN, last, _, _ = forward(r, w, k, v, a, b, state, number_BT, rough)
    return y_BTHN, last


@torch.library.custom_op("tokmill::wkv7", mutates_args=())
def forward(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    number: Tensor,
    rough: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, the last state, and for the backward pass two tensors a chunk, in float32.

    These are the states before chunks (B, H, C, N, N) (key, value) and the inverses of their
    triangular systems (B, H, C, L, L). `number`: (B, T) int32, the documents of a row counted from
    0; `rough`: products in tf32, whatever the type and what PyTorch is told.
    """
    r, w, k, v, a, b, state, number = map(Tensor.contiguous, (r, w, k, v, a, b, state, number))
    call = Call(r, rough)
    y, last = torch.empty_like(r), torch.empty_like(state)
    states, inverses = kept(r)
    turned, added, carried = torch.empty_like(states), torch.empty_like(states), call.room(1)
    kernels = call.kernels
    call.over_chunks(
        kernels.chunk_states, w, k, v, a, b, number, inverses, turned, added, carried, LEVELS=LEVELS
    )
    call.scan(turned, added, carried, state, states, last, reverse=False)
    call.over_chunks(kernels.outputs, r, w, k, v, a, b, number, inverses, states, y)
    return y, last, states, inverses


@torch.library.custom_op("tokmill::wkv7_backward", mutates_args=())
def backward(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    number: Tensor,
    states: Tensor,
    inverses: Tensor,
    dy: Tensor,
    dlast: Tensor,
    rough: bool,
) -> list[Tensor]:
    """Return the gradients of r, w, k, v, a, b and of the state before, each in its type."""
    r, w, k, v, a, b, number = map(Tensor.contiguous, (r, w, k, v, a, b, number))
    six = (r, w, k, v, a, b)
    dy, dlast = dy.contiguous(), dlast.contiguous()
    call = Call(r, rough)
    of_state = torch.empty_like(dlast)
    turned, added, dstates = (torch.empty_like(states) for _ in range(3))
    carried, u, dx = call.room(1), call.room(CHUNK), call.room(CHUNK)
    kernels = call.kernels
    call.over_chunks(
        kernels.chunk_gradients, r, w, a, b, number, inverses, dy, turned, added, carried
    )
    call.scan(turned, added, carried, dlast, dstates, of_state, reverse=True)
    dr, dw, dk, dv, da, db = of_inputs = [torch.empty_like(x) for x in six]
    call.over_chunks(
        kernels.value_gradients, *six, number, inverses, states, dstates, dy, dv, u, dx
    )
    call.over_chunks(
        kernels.key_gradients, *six, number, states, dstates, dy, u, dx, dr, dw, dk, da, db,
        columns=32, warps=8,
    )  # fmt: skip
    return [*of_inputs, of_state]


@forward.register_fake
def _(r: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    state = others[5]
    return r.new_empty(r.shape), state.new_empty(state.shape), *kept(r)


@backward.register_fake
def _(r: Tensor, *others: Any) -> list[Tensor]:
    dlast = others[9]
    return [x.new_empty(x.shape) for x in (r, *others[:5], dlast)]


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what `backward` takes."""
    *six, _, number, ctx.rough = inputs
    _, _, states, inverses = output
    ctx.save_for_backward(*six, number, states, inverses)
    # Nobody asks for gradients of states and inverses: they would be as many zeros.
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any, dy: Tensor | None, dlast: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument of `forward`."""
    saved = ctx.saved_tensors
    r, states = saved[0], saved[7]
    if dy is None:
        dy = r.new_zeros(r.shape)
    if dlast is None:
        dlast = states.new_zeros(states[:, :, 0].shape)
    return (*backward(*saved, dy, dlast, ctx.rough), None, None)


forward.register_autograd(gradients, setup_context=keep)


def kept(r: Tensor) -> tuple[Tensor, Tensor]:
    """Return room for states before chunks (B, H, C, N, N) and for inverses (B, H, C, L, L)."""
    rows, length, heads, width = r.shape
    chunks = (rows, heads, -(-length // CHUNK))
    return (
        r.new_empty(*chunks, width, width, dtype=torch.float32),
        r.new_empty(*chunks, CHUNK, CHUNK, dtype=torch.float32),
    )


class Call:
    """Launches kernels over the chunks, or the heads, of tensors (B, T, H, N) like `r`."""

    def __init__(self, r: Tensor, rough: bool) -> None:
        self.kernels = require("tokmill.models.wkv7_kernels")
        self.like = r
        self.device = torch.cuda.device_of(r)  # type: ignore[no-untyped-call]
        self.rows, self.length, self.heads, self.width = r.shape
        self.count = -(-self.length // CHUNK)
        # Looked up here, as torch.compile cannot.
        exact = torch.get_float32_matmul_precision() == "highest" and r.dtype == torch.float32
        self.precision = "tf32x3" if exact and not rough else "tf32"

    def room(self, lines: int) -> Tensor:
        """Return room for so many lines of a head a chunk, in float32."""
        shape = (self.rows, self.heads, self.count, lines, self.width)
        return self.like.new_empty(shape, dtype=torch.float32)

    def over_chunks(
        self, kernel: Any, *tensors: Tensor, columns: int = 64, warps: int = 4, **more: int
    ) -> None:
        """Run a program for each chunk of each head, `columns` of values at a time.

        Of `columns` and `warps` those that keep the numbers of a head of 64 in registers on sm_90.
        """
        with self.device:
            kernel[(self.count * self.rows * self.heads,)](
                *tensors,
                self.length,
                self.heads,
                self.count,
                L=CHUNK,
                N=self.width,
                V=min(columns, self.width),
                PRECISION=self.precision,
                num_warps=8 if self.width == 128 else warps,
                num_stages=1,
                **more,
            )

    def scan(self, *tensors: Tensor, reverse: bool) -> None:
        """Run a program for every 16 values of each head: few heads have to fill a GPU too."""
        with self.device:
            self.kernels.scan[(self.rows * self.heads * (self.width // 16),)](
                *tensors,
                self.count,
                N=self.width,
                V=16,
                REVERSE=reverse,
                PRECISION=self.precision,
                num_warps=4,
                num_stages=2 if self.width == 128 else 3,
            )
