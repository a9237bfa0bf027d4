"""From columns to vectors: one embedding for each column of the store, joined into one stream.

Shapes: B rows, T positions, D width, V ids of a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from tokmill.base.errors import UsageError, nearest
from tokmill.models.model_inputs import Inputs
from tokmill.models.transformers.layers import Linear, embedding

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
