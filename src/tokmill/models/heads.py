"""Hidden states to ids: one head a column, its own weights or the column's embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from tokmill.models.fields import PREFIX
from tokmill.models.layers import Linear
from tokmill.models.model import Group, Model, decay_groups


class Heads(nn.Module):
    """A matrix (V, D) for each of some columns.

    Args:
        sizes: column → number V of its ids.
        tied: the head of a column is its embedding in the model; there are no weights here then.
    """

    def __init__(self, model: Model, sizes: Mapping[str, int], tied: bool) -> None:
        super().__init__()
        self.linear = nn.ModuleDict()
        if tied:
            for column in sizes:
                model.embedding(column)  # A model whose embedding is no head says so now.
        else:
            for column, size in sizes.items():
                head = Linear(model.dim, size, bias=False)
                model.init_head(head.weight)
                self.linear[PREFIX + column] = head

    def weight(self, model: Model, column: str) -> Tensor:
        """Return the matrix (V, D) of a column."""
        if PREFIX + column not in self.linear:
            return model.embedding(column)
        weight = self.linear[PREFIX + column].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def param_groups(self, weight_decay: float) -> list[Group]:
        """Return the groups of what is not the model's."""
        parameters: Iterable[nn.Parameter] = self.parameters()
        return decay_groups(parameters, weight_decay)
