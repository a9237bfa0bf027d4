"""From the hidden states of a row to one vector; the states may come segment by segment.

Names of tensors carry their shape: B rows, T positions of a segment, D width.

Rows are in falling order of length, so that the rows which are in a segment are the first ones.
Sums are in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from tokmill.base.errors import UsageError, nearest
from tokmill.models.model import Model, OfSets, Tensors

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
        """Take the next segment."""
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
        """Take the next segment."""
        row_B = torch.arange(len(hidden_BTD), device=hidden_BTD.device)
        self.last_BD[: len(hidden_BTD)] = hidden_BTD[row_B, length_B - 1].float()

    def result(self) -> Tensor:
        """Return the last states."""
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
        made_BD = pool_segments([segment], hidden_BTD[:, 0], pool)
        return torch.where(length_B[:, None] > 0, made_BD, 0)


def inside(hidden_BTD: Tensor, length_B: Tensor) -> Tensor:
    """Return (B, T) bool: which positions count."""
    return torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device) < length_B[:, None]


def check_pool(pool: str) -> None:
    """Raise `UsageError` for an unknown pooling."""
    if pool not in get_args(Pool):
        raise UsageError(
            f"hidden states cannot be pooled by {pool!r}", hint=nearest(pool, get_args(Pool))
        )
