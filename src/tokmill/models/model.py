"""What a model reads from a batch, the embedding of its columns, and the interface of models.

Inputs are columns of ids, columns that a task makes, columns of vectors. Shapes: B rows, T
positions, D width of the model, V ids of a column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokmill.base.errors import UsageError, nearest
from tokmill.models.transformers.layers import Linear, embedding
from tokmill.store.schema import Array


@dataclass(frozen=True)
class Inputs:
    """The columns that a model reads; the task names them (`Task.inputs`).

    `ids`: column of the store → number of its ids. `roles`: column → role → id, from the store's
    vocabularies, such as `{"token": {"mask": 4, "pad": 0}}`; special tokens are found by role,
    because their ids differ between vocabularies. `made`: column that no store holds, such as
    `segment` → number of its ids; the task fills it (`Task.prepare`). `vectors`: column → width W;
    in a batch they are (B, T, W) float32, the others (B, T) int64. `classes`: column of labels →
    the names of its classes, by number.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    made: Mapping[str, int] = field(default_factory=dict)
    vectors: Mapping[str, int] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def embedded(self) -> dict[str, int]:
        """The columns of ids, of the store and made: column → number of its ids."""
        return {**self.ids, **self.made}

    def role(self, column: str, name: str) -> int:
        """Return the id that has a role in a column's vocabulary.

        Raises `UsageError` if there is no such id; no default is used.
        """
        roles = self.roles.get(column, {})
        if name not in roles:
            has = ", ".join(f"{role}={number}" for role, number in roles.items())
            raise UsageError(
                f"the vocabulary of the column {column!r} has no {name!r} token "
                f"(roles: {has or 'none'})",
                hint="build the store with a vocabulary that has one: "
                f"`tokmill build … --set roles.{name}=TOKEN` names it",
            )
        return roles[name]


def predicted(targets: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Return the positions where any column has a target, and the targets there; (B, M) int64 each.

    `targets`: name → (B, T) int64, -1 where there is nothing to learn. The places of a row ascend;
    after them come unused ones (-1, with targets of -1). M is at least 1, so that a batch without
    targets is still a batch.
    """
    wanted = np.any([target >= 0 for target in targets.values()], axis=0)
    most = max(1, int(wanted.sum(1).max(initial=0)))
    places = np.argsort(~wanted, axis=1, kind="stable")[:, :most]
    used = np.take_along_axis(wanted, places, axis=1)
    return np.where(used, places, -1), {
        name: np.where(used, np.take_along_axis(target, places, axis=1), -1)
        for name, target in targets.items()
    }


def taken(x_BTD: Tensor, places_BM: Tensor) -> Tensor:
    """Return (B, M, D), the positions of each row that `places` (int64) names; -1: any one."""
    index_BMD = places_BM.clamp(min=0)[..., None].expand(-1, -1, x_BTD.shape[-1])
    return x_BTD.gather(1, index_BMD)


Join = Literal["sum", "concat"]
"""How the embeddings of several columns become one vector."""

PREFIX = "column_"
"""Put before a column's name, because a `ModuleDict` refuses keys such as `type`."""


class Fields(nn.Module):
    """One vector for each column, joined: their sum, or a linear map to D of all, end to end.

    A column of ids has an embedding, a column of vectors a linear map. `width`: width of a column's
    vector if they are put end to end; 0: D / columns, rounded up. Heads can be tied only if an
    embedding has width D.
    """

    def __init__(
        self,
        inputs: Inputs,
        dim: int,
        std: float = 0.02,
        *,
        join: Join = "sum",
        width: int = 0,
    ) -> None:
        super().__init__()
        sizes, vectors = inputs.embedded, inputs.vectors
        count = len(sizes) + len(vectors)
        if not count:
            raise UsageError(
                "there is no column to train on",
                hint="a model reads columns with a vocabulary and one value for each token",
            )
        if width and join == "sum":
            raise UsageError(
                f"embeddings of width {width} cannot be added to a stream of {dim}",
                where="model.field_dim",
                hint='it is for join = "concat"',
            )
        self.sizes, self.std, self.dim = sizes, std, dim
        each = dim if join == "sum" else width or -(-dim // count)
        self.embeddings = nn.ModuleDict(
            {PREFIX + name: nn.Embedding(size, each) for name, size in sizes.items()}
        )
        self.maps = nn.ModuleDict(
            {PREFIX + name: Linear(wide, each, bias=False) for name, wide in vectors.items()}
        )
        self.joined: Linear | None = None
        if join == "concat":
            self.joined = Linear(each * count, dim, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        for table in self.embeddings.values():
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=self.std)
        for linear in self.maps.values():
            assert isinstance(linear, Linear)
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        if self.joined is not None:
            nn.init.orthogonal_(self.joined.weight)

    def weight(self, column: str) -> nn.Parameter:
        """Return the embedding (V, D) of a column."""
        if column not in self.sizes:
            raise UsageError(
                f"the model has no column {column!r}", hint=nearest(column, self.sizes)
            )
        weight = self._table(column)
        if weight.shape[1] != self.dim:
            raise UsageError(
                f"the embedding of {column!r} is {weight.shape[1]} wide, the stream {self.dim}",
                where="task.tied",
                hint="--set task.tied=false gives the head weights of its own",
            )
        return weight

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return (B, T, D) from name → (B, T) int64, of vectors (B, T, W) float32."""
        parts = [embedding(columns[name], self._table(name)) for name in self.sizes]
        for key, linear in self.maps.items():
            # Under autocast the product is in half precision; the stream is not.
            parts.append(linear(columns[key.removeprefix(PREFIX)]).to(linear.weight.dtype))
        return self.join(parts)

    def _table(self, column: str) -> nn.Parameter:
        weight = self.embeddings[PREFIX + column].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return one vector for each position from one for each column."""
        if self.joined is not None:
            y_BTD: Tensor = self.joined(torch.cat(parts, -1))
            # Under autocast the product is in half precision; the stream is not, as with a sum.
            return y_BTD.to(self.joined.weight.dtype)
        x_BTD = parts[0]
        for part_BTD in parts[1:]:
            x_BTD = x_BTD + part_BTD
        return x_BTD


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
    a training, so that their results need not be kept; the numbers are the same. `compiled`:
    whether torch.compile has made the blocks, and makes the loss.
    """

    dim: int
    fields: Fields
    causal: bool
    recompute = False
    compiled = False

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
        return self.fields.weight(column)

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
    undecayed = [parameter for parameter in trained if parameter.ndim < 2]
    groups: list[Group] = [
        {"params": matrices, "weight_decay": weight_decay, "lr_scale": 1.0},
        {"params": undecayed, "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    return [group for group in groups if group["params"]]


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model, which are used in turn; the rest is used throughout."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            yield from part
