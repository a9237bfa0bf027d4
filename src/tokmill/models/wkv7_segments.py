"""A recurrence that learns long rows a segment at a time, in little more memory than one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Compute = Callable[..., tuple[Tensor, Tensor]]
"""(six inputs (B, L, H, N), state, document (B, L), before (B,)) → outputs and state; `before` is
the document that the state belongs to, None for that of the first position."""


# torch.compile cannot trace a backward pass that runs another one.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def in_segments(
    compute: Compute,
    segment: int,
    inputs: tuple[Tensor, ...],
    state: Tensor,
    document: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what `compute` makes of whole rows; its gradients cost a second forward pass.

    Of the rows only inputs, outputs and a state a segment are held for the backward pass.
    torch.utils.checkpoint would do the same, but hold the gradients of all segments in pieces, and
    between these malloc finds little use for what is let go.
    """
    y_BTHN, state = Segments.apply(compute, segment, document, state, *inputs)  # type: ignore[no-untyped-call]
    return y_BTHN, state


class Segments(torch.autograd.Function):
    """The backward pass runs one segment after the other again, from the last to the first."""

    @staticmethod
    def forward(
        context: Any,
        compute: Compute,
        segment: int,
        document: Tensor | None,
        state: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and the state at the end."""
        y_BTHN, states = torch.empty_like(inputs[0]), []
        for here, number, before in cuts(y_BTHN.shape[1], segment, document):
            states.append(state)
            y_BTHN[:, here], state = compute(*(x[:, here] for x in inputs), state, number, before)
        context.compute, context.segment, context.document = compute, segment, document
        context.save_for_backward(*inputs, *states)
        return y_BTHN, state

    @staticmethod
    @once_differentiable
    def backward(context: Any, y_grad: Tensor, state_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of state and inputs."""
        inputs, states = context.saved_tensors[:6], context.saved_tensors[6:]
        grads = [torch.empty_like(x) for x in inputs]
        pieces = cuts(y_grad.shape[1], context.segment, context.document)
        for (here, number, before), state in reversed(list(zip(pieces, states, strict=True))):
            again = [x.detach().requires_grad_() for x in (*(x[:, here] for x in inputs), state)]
            with torch.enable_grad(), torch.autocast(y_grad.device.type, enabled=False):
                made = context.compute(*again, number, before)
            *parts, state_grad = torch.autograd.grad(made, again, (y_grad[:, here], state_grad))
            for grad, part in zip(grads, parts, strict=True):
                grad[:, here] = part
        return None, None, None, state_grad, *grads


def cuts(
    length: int, segment: int, document: Tensor | None
) -> Iterator[tuple[slice, Tensor | None, Tensor | None]]:
    """Yield where each segment lies, its documents, and the document before it."""
    before = None
    for start in range(0, length, segment):
        here = slice(start, min(start + segment, length))
        number = None if document is None else document[:, here]
        yield here, number, before
        before = None if number is None else number[:, -1]
