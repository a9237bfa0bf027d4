"""What a model reads from a batch, and the embedding of its columns, joined into one stream.

Columns of ids, columns that a task makes, columns of vectors. Shapes: B rows, T positions, D width,
V ids of a column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

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
                "there is no column to learn from",
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
        """Draw the embeddings anew."""
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
