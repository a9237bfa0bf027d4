"""Columns to vectors: one embedding a column of the store, joined into one stream.

Shapes: B rows, T positions, D width, V ids of a column.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from tokmill.errors import UsageError, nearest
from tokmill.models.layers import embedding

PREFIX = "column_"
"""Before a column's name: a `ModuleDict` takes no key such as `type`."""


class Fields(nn.Module):
    """The sum of one embedding a column.

    `sizes` maps each column to the number of its ids. A second way to join (concatenate, then a
    linear map) belongs in `join`; heads may be tied only where an embedding is D wide.
    """

    def __init__(self, sizes: Mapping[str, int], dim: int, std: float = 0.02) -> None:
        super().__init__()
        if not sizes:
            raise UsageError(
                "there is no column to learn from",
                hint="a model reads columns that have a vocabulary and a value a token",
            )
        self.sizes, self.std = dict(sizes), std
        self.embeddings = nn.ModuleDict(
            {PREFIX + name: nn.Embedding(size, dim) for name, size in sizes.items()}
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the embeddings anew."""
        for table in self.embeddings.values():
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=self.std)

    def weight(self, column: str) -> nn.Parameter:
        """Return the embedding (V, D) of a column."""
        if column not in self.sizes:
            raise UsageError(
                f"the model has no column {column!r}", hint=nearest(column, self.sizes)
            )
        weight = self.embeddings[PREFIX + column].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return (B, T, D) from name → (B, T) int64."""
        return self.join([embedding(columns[name], self.weight(name)) for name in self.sizes])

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return one vector a position from one a column."""
        x_BTD = parts[0]
        for part_BTD in parts[1:]:
            x_BTD = x_BTD + part_BTD
        return x_BTD
