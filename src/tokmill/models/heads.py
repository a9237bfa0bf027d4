"""From hidden states to predictions: ids of columns, a class for each row, one vector.

Names of tensors carry their shape: B rows, T positions, D width of the model, V ids of a column,
C classes. `…` stands for any axes.

If only some positions are predicted, as in masked language modelling, select these first
(`predicted`): a head computes all positions that it is given. For pooling the states may come
segment by segment (T positions of a segment). Rows are then in falling order of length, so that the
rows which are in a segment are the first ones. Sums are in float32.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokmill.base.errors import UsageError, nearest
from tokmill.models.model import PREFIX, Group, Model, OfSets, Tensors, decay_groups
from tokmill.models.transformers.layers import Linear, gelu, linear, linear_cross_entropy


class Transform(nn.Module):
    """The first part of BERT's head for masked tokens: a linear map, GELU and LayerNorm."""

    def __init__(
        self, dim: int, bias: bool = True, eps: float = 1e-12, approximate: bool = False
    ) -> None:
        """Make the weights; `approximate`: GELU by GPT-2's tanh."""
        super().__init__()
        self.linear, self.norm = Linear(dim, dim, bias=bias), nn.LayerNorm(dim, eps, bias=bias)
        self.approximate = approximate
        init_linear(self.linear)

    @classmethod
    def of(cls, model: Model) -> Self:
        """Return one in the style of a model, as those of BERT and DistilBERT are."""
        style = getattr(model, "config", None)
        return cls(
            model.dim,
            getattr(style, "bias", True),
            getattr(style, "norm_eps", 1e-12),
            getattr(style, "activation", "") == "gelu_tanh",
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(gelu(self.linear(hidden), self.approximate))


class Heads(nn.Module):
    """A matrix (V, D) for each of some columns.

    Args:
        sizes: column → number V of its ids.
        tied: the head of a column is its embedding in the model, and has no matrix here.
        bias: whether a bias (V,) is added to the logits of each column.
        transform: applied to hidden states first, once for all columns; None: nothing.
    """

    def __init__(
        self,
        model: Model,
        sizes: Mapping[str, int],
        tied: bool,
        *,
        bias: bool = False,
        transform: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.transform = transform
        self.linear = nn.ModuleDict()
        self.biases = nn.ParameterDict()
        if bias:
            for column, size in sizes.items():
                self.biases[PREFIX + column] = nn.Parameter(torch.zeros(size))
        if tied:
            for column in sizes:
                model.embedding(
                    column
                )  # A model whose embedding cannot be a head raises its error now.
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

    def bias(self, column: str) -> Tensor | None:
        """Return the bias (V,) of a column's logits, or None."""
        return self.biases[PREFIX + column] if len(self.biases) else None

    def states(self, hidden: Tensor) -> Tensor:
        """Return the states (…, D) with which the matrices are multiplied."""
        return hidden if self.transform is None else self.transform(hidden)

    def logits(self, model: Model, hidden: Tensor, column: str) -> Tensor:
        """Return (…, V) of a column from hidden states (…, D)."""
        return linear(self.states(hidden), self.weight(model, column), self.bias(column))

    def losses(
        self, model: Model, hidden: Tensor, targets: Mapping[str, Tensor], pull: float = 0.0
    ) -> dict[str, Tensor]:
        """Return column → the summed cross-entropy in nats of its targets, from states (…, D).

        `targets`: name → (…) int64, -1 where there is nothing to learn; `pull`: see
        `linear_cross_entropy`.
        """
        states = self.states(hidden)
        return {
            name: linear_cross_entropy(
                states,
                self.weight(model, name),
                target,
                pull,
                self.bias(name),
                compiled=model.compiled,
            )
            for name, target in targets.items()
        }

    def param_groups(self, weight_decay: float) -> list[Group]:
        """Return the groups of parameters that are not the model's."""
        return decay_groups(self.parameters(), weight_decay)


class Pooler(nn.Module):
    """A row's first hidden state, through a linear map and tanh.

    It belongs to the head that reads it: weights that no loss reaches are refused by DDP.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = Linear(dim, dim)
        init_linear(self.linear)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return (B, D) from the hidden states of rows."""
        return torch.tanh(self.linear(hidden_BTD[:, 0]))


class Classes(nn.Module):
    """One of C classes for each row, from one vector for each row."""

    def __init__(self, dim: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(dropout), Linear(dim, classes)
        init_linear(self.linear)

    def forward(self, vectors_BD: Tensor) -> Tensor:
        return self.linear(self.dropout(vectors_BD))

    def loss(self, vectors_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return the summed cross-entropy in nats; labels int64, -1 where there is none."""
        logits_BC = self(vectors_BD).float()
        return F.cross_entropy(logits_BC, labels_B, ignore_index=-1, reduction="sum")


def init_linear(layer: nn.Linear) -> None:
    """Draw a linear map as BERT does: normal, std 0.02; the bias is 0."""
    nn.init.normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


Pool = Literal["mean", "last", "signature"]
"""How hidden states become one vector: their mean; the last one; a model of sets makes it itself
(`model.OfSets`)."""


Segment = tuple[Tensor, Tensor]
"""Hidden states (B, T, D) of the rows that reach a segment, and the number of tokens (B,)."""


class RunningMean:
    """The mean of a row's hidden states."""

    def __init__(self, rows: int, dim: int, device: torch.device) -> None:
        self.sum_BD = torch.zeros(rows, dim, device=device)
        self.count_B = torch.zeros(rows, dtype=torch.int64, device=device)

    def add(self, hidden_BTD: Tensor, length_B: Tensor) -> None:
        inside_BT1 = inside(hidden_BTD, length_B)[..., None]
        self.sum_BD[: len(hidden_BTD)] += hidden_BTD.float().masked_fill(~inside_BT1, 0).sum(1)
        self.count_B[: len(hidden_BTD)] += length_B

    def result(self) -> Tensor:
        return self.sum_BD / self.count_B[:, None]


class RunningLast:
    """A row's last hidden state."""

    def __init__(self, rows: int, dim: int, device: torch.device) -> None:
        self.last_BD = torch.zeros(rows, dim, device=device)

    def add(self, hidden_BTD: Tensor, length_B: Tensor) -> None:
        row_B = torch.arange(len(hidden_BTD), device=hidden_BTD.device)
        self.last_BD[: len(hidden_BTD)] = hidden_BTD[row_B, length_B - 1].float()

    def result(self) -> Tensor:
        return self.last_BD


def vector_of(model: Model, batch: Tensors, pool: Pool) -> Tensor:
    """Return the vector of each row, (B, D) float32, as `tokmill embed` makes it of one segment."""
    if pool == "signature":
        return of_sets(model).signature(batch).float()
    return pool_rows(model(batch), batch.document, pool)


def of_sets(model: Model) -> OfSets:
    """Return a model that makes the vectors of rows itself; raises `UsageError` for another."""
    if not isinstance(model, OfSets):
        raise UsageError(
            "only a model of sets makes a signature",
            where="model.kind",
            hint="--set model.kind=set_transformer, or pool hidden states: mean, last",
        )
    return model


def pool_segments(segments: Iterable[Segment], like_BD: Tensor, pool: Pool) -> Tensor:
    """Return the vectors of rows whose hidden states come segment by segment, (B, D) float32.

    like_BD: any tensor of this shape, on the device. The result has gradients if the states have.
    """
    kind = RunningMean if pool == "mean" else RunningLast
    pooling: RunningMean | RunningLast = kind(len(like_BD), like_BD.shape[1], like_BD.device)
    for hidden_BTD, length_B in segments:
        pooling.add(hidden_BTD, length_B)
    return pooling.result()


def pool_rows(hidden_BTD: Tensor, document_BT: Tensor, pool: Pool) -> Tensor:
    """Return the vectors of rows of a single segment, (B, D) float32; 0 of rows without tokens.

    document_BT: int64, negative at padding, which is at the end of a row.
    """
    length_B = (document_BT >= 0).sum(1)
    # Autocast would weigh in half precision.
    with torch.autocast(hidden_BTD.device.type, enabled=False):
        segment = hidden_BTD, length_B.clamp(min=1)
        pooled_BD = pool_segments([segment], hidden_BTD[:, 0], pool)
        return torch.where(length_B[:, None] > 0, pooled_BD, 0)


def inside(hidden_BTD: Tensor, length_B: Tensor) -> Tensor:
    """Return (B, T) bool: which positions count."""
    return torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device) < length_B[:, None]


def check_pool(pool: str) -> None:
    """Raise `UsageError` for an unknown pooling."""
    if pool not in get_args(Pool):
        raise UsageError(
            f"hidden states cannot be pooled by {pool!r}", hint=nearest(pool, get_args(Pool))
        )
