"""The interface of models: from columns to hidden states.

Shapes: B rows, T positions, D width of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Group = dict[str, Any]
"""A parameter group of torch.optim, with `weight_decay` and `lr_scale`."""


WEIGHT = "weight"
"""A column (B, T, 1) float32 that a task may make: the weight of each element of a set."""


@dataclass(slots=True)
class Tensors:
    """A batch as a model sees it, all on one device.

    `columns`: name → (B, T) int64, of vectors (B, T, W) float32. `values` and `targets`: name →
    (B, …), int64 or float32, as the task says (`Batch`). `entry`: (B,) int64, the entry of the
    process's batch to which a row belongs, -1: none, the row teaches nothing; None: each row is an
    entry. `document`: (B, T) int64, the number of the document within its row, -1 at padding.
    `position`: (B, T) int64, counted from the document's first token in the row. `whole`: every row
    is one document without padding, so that no mask but the causal one is needed. `cu_seqlens`:
    int32 (documents + 1,), where each document begins if rows are put end to end, and last B · T;
    a run of padding counts as a document. None if rows are whole, or if it was not counted.
    """

    columns: dict[str, Tensor]
    document: Tensor
    position: Tensor
    whole: bool
    cu_seqlens: Tensor | None = None
    values: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    entry: Tensor | None = None


class Model(nn.Module):
    """A backbone. `dim` is the width D of its hidden states.

    `causal`: whether the hidden state of a position depends only on that position and those before
    it. Only a causal model can predict what comes next, and only to a causal model can padded rows
    be given without a mask. `recompute`: whether blocks are computed again in the backward pass of
    a training, so that their results need not be kept; the numbers are the same.
    """

    dim: int
    causal: bool
    recompute = False

    def forward(self, batch: Tensors, places: Tensor | None = None) -> Tensor:
        """Return hidden states (B, T, D).

        With `places`, (B, M) int64, only those of these positions of each row, (B, M, D), so that
        the others need not be computed. A place of -1 is not used; its state is arbitrary.
        """
        raise NotImplementedError

    def run_block(self, block: nn.Module, x_BTD: Tensor, *rest: Any) -> Tensor:
        """Return what a block makes of the stream, maybe to be run again in the backward pass."""
        if self.recompute and self.training and torch.is_grad_enabled():
            y_BTD: Tensor = checkpoint(block, x_BTD, *rest, use_reentrant=False)
        else:
            y_BTD = block(x_BTD, *rest)
        return y_BTD

    @property
    def longest(self) -> int:
        """Largest number of positions of a document; 0: no limit."""
        return 0

    def cached(self) -> Cached | None:
        """Return an object that decodes with a cache, each id once; None: there is none."""
        return None

    def embedding(self, column: str) -> nn.Parameter:
        """Return the embedding (V, D) of a column, for heads that are tied to it."""
        raise NotImplementedError

    def init_head(self, weight: Tensor) -> None:
        """Draw a head (V, D) that is not tied: normal, std 0.02."""
        nn.init.normal_(weight, std=0.02)

    def flops_per_token(self, length: int) -> float:
        """Return the floating point operations for a token of a training step, without the head."""
        raise NotImplementedError

    def param_groups(self, weight_decay: float) -> list[Group]:
        """Return parameter groups; decay only on matrices."""
        return decay_groups(self.parameters(), weight_decay)


@runtime_checkable
class Recurrent(Protocol):
    """A model whose state has the same size for documents of any length."""

    def start(self, rows: int) -> Any:
        """Return the state before the first position of so many rows."""
        ...

    def run(self, columns: Mapping[str, Tensor], state: Any) -> tuple[Tensor, Any]:
        """Return hidden states (B, T, D) of positions that follow `state`, and the state after."""
        ...


@runtime_checkable
class OfSets(Protocol):
    """A model of sets: it makes the vector of a row itself, whatever the order of its positions."""

    def signature(self, batch: Tensors) -> Tensor:
        """Return a vector of each row, (B, D)."""
        ...


class Cached(Protocol):
    """Reads a batch of rows, each id once, and keeps what later ids need."""

    def begin(self, columns: Mapping[str, Tensor], starts: Tensor) -> Tensor:
        """Forget all rows and read others; return the hidden states (B, D) of their last ids.

        `columns`: name → (B, T) int64, rows flush right; `starts`: (B,) int64, below T, where each
        begins.
        """
        ...

    def next(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states (B, D) of the ids (B, 1) that come next in each row."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows (int64 numbers; one may be repeated)."""
        ...


def over_states(function: Callable[..., Tensor], *states: Any) -> Any:
    """Return a state whose tensors are a function of those of other states of the same model.

    A state is made of tensors in lists and dataclasses.
    """
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    if isinstance(first, list | tuple):
        parts = (over_states(function, *same) for same in zip(*states, strict=True))
        return type(first)(parts)
    names = [part.name for part in dataclasses.fields(first)]
    values = {n: over_states(function, *(getattr(state, n) for state in states)) for n in names}
    return type(first)(**values)


def take_rows(state: Any, rows: slice | Tensor) -> Any:
    return over_states(lambda tensor: tensor[rows], state)


def join_rows(*states: Any) -> Any:
    """Return the state of the rows of several states, one after the other."""
    return over_states(lambda *tensors: torch.cat(tensors), *states)


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[Group]:
    """Return two groups: tensors with two or more axes decay, scales and biases do not."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    groups: list[Group] = [
        {"params": matrices, "weight_decay": weight_decay, "lr_scale": 1.0},
        {"params": others, "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    return [group for group in groups if group["params"]]


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model, which are used in turn; the rest is used throughout."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            yield from part
