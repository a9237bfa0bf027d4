"""From the hidden states of a row to one vector; the states may come segment by segment.

Names of tensors carry their shape: B rows, T positions of a segment, D width.

Rows are in falling order of length, so that the rows which are in a segment are the first ones.
Sums are in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from tokmill.base.errors import UsageError, nearest
from tokmill.models.model import Model, OfSets, Tensors

Pool = Literal["mean", "last", "attention", "signature"]
"""How hidden states become one vector: their mean; the last one; a mean weighted by attention; a
model of sets makes it itself (`model.OfSets`)."""


Segment = tuple[Tensor, Tensor]
"""Hidden states (B, T, D) of the rows that reach a segment, and the number of tokens (B,)."""


class Running(Protocol):
    """Pools the hidden states of B rows that come segment by segment."""

    def add(self, hidden_BTD: Tensor, length_B: Tensor) -> None:
        """Add the next segment of the first rows; `length_B` (int64, at least 1) states count."""
        ...

    def result(self) -> Tensor:
        """Return the vectors (B, D), float32."""
        ...


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


class RunningAttention:
    """A mean of a row's hidden states h weighted by softmax(q · h / sqrt(D)); each row has a q.

    The softmax is over all segments: when a higher score comes, the sums so far are scaled (Milakov
    and Gimelshein 2018, arXiv 1805.02867).
    """

    def __init__(self, query_BD: Tensor) -> None:
        self.query_BD = query_BD.float()
        self.sum_BD = torch.zeros_like(self.query_BD)
        self.total_B = torch.zeros_like(self.query_BD[:, 0])
        self.highest_B = torch.full_like(self.total_B, -math.inf)

    def add(self, hidden_BTD: Tensor, length_B: Tensor) -> None:
        """Take the next segment."""
        hidden_BTD, rows = hidden_BTD.float(), slice(len(hidden_BTD))
        score_BT = scores(hidden_BTD, self.query_BD[rows], length_B)
        # It cancels out, so it needs no gradient.
        highest_B = torch.maximum(self.highest_B[rows], score_BT.detach().amax(1))
        kept_B = torch.exp(self.highest_B[rows] - highest_B)
        weight_BT = torch.exp(score_BT - highest_B[:, None])
        self.highest_B[rows] = highest_B
        self.total_B[rows] = self.total_B[rows] * kept_B + weight_BT.sum(1)
        added_BD = torch.einsum("bt,btd->bd", weight_BT, hidden_BTD)
        self.sum_BD[rows] = self.sum_BD[rows] * kept_B[:, None] + added_BD

    def result(self) -> Tensor:
        """Return the weighted means."""
        return self.sum_BD / self.total_B[:, None]


class AttentionPooling(nn.Module):
    """Pooling by attention with a learned query, for tasks that train one.

    Without a learned query, a row's last hidden state is the query.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        # At first all hidden states have the same weight.
        self.query = nn.Parameter(torch.zeros(dim))

    def forward(self, hidden_BTD: Tensor, length_B: Tensor) -> Tensor:
        """Return (B, D), float32; of the hidden states of a row the first `length_B` count."""
        hidden_BTD = hidden_BTD.float()
        query_BD = self.query.float().expand(len(hidden_BTD), -1)
        # Autocast would weigh in half precision.
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            weight_BT = scores(hidden_BTD, query_BD, length_B).softmax(1)
            return torch.einsum("bt,btd->bd", weight_BT, hidden_BTD)


def vector_of(model: Model, batch: Tensors, pool: Pool, query_D: Tensor | None = None) -> Tensor:
    """Return the vector of each row, (B, D) float32, as `tokmill embed` makes it of one segment."""
    if pool == "signature":
        return of_sets(model).signature(batch).float()
    return pool_rows(model(batch), batch.document, pool, query_D)


def of_sets(model: Model) -> OfSets:
    """Return a model that makes the vectors of rows itself; raises `UsageError` for another."""
    if not isinstance(model, OfSets):
        raise UsageError(
            "only a model of sets makes a signature",
            where="model.kind",
            hint="--set model.kind=set_transformer, or pool hidden states: mean, last, attention",
        )
    return model


def pool_segments(
    segments: Callable[[], Iterable[Segment]], like_BD: Tensor, pool: Pool, query_D: Tensor | None
) -> Tensor:
    """Return the vectors of rows whose hidden states come segment by segment, (B, D) float32.

    segments: a function that gives the segments from the first one on; without a learned query,
    "attention" needs them twice. like_BD: any tensor of this shape, on the device. query_D: the
    learned query of "attention"; None: a row's last state. The result has gradients if the states
    have.
    """

    def run(pooling: Running) -> Tensor:
        for hidden_BTD, length_B in segments():
            pooling.add(hidden_BTD, length_B)
        return pooling.result()

    shape = *like_BD.shape, like_BD.device
    if pool == "mean":
        return run(RunningMean(*shape))
    if pool == "last":
        return run(RunningLast(*shape))
    if query_D is not None:
        return run(RunningAttention(query_D.expand(len(like_BD), -1)))
    return run(RunningAttention(run(RunningLast(*shape))))


def pool_rows(
    hidden_BTD: Tensor, document_BT: Tensor, pool: Pool, query_D: Tensor | None = None
) -> Tensor:
    """Return the vectors of rows of a single segment, (B, D) float32; 0 of rows without tokens.

    document_BT: int64, negative at padding, which is at the end of a row.
    """
    length_B = (document_BT >= 0).sum(1)
    # Autocast would weigh in half precision.
    with torch.autocast(hidden_BTD.device.type, enabled=False):
        segment = hidden_BTD, length_B.clamp(min=1)
        made_BD = pool_segments(lambda: [segment], hidden_BTD[:, 0], pool, query_D)
        return torch.where(length_B[:, None] > 0, made_BD, 0)


def scores(hidden_BTD: Tensor, query_BD: Tensor, length_B: Tensor) -> Tensor:
    """Return q · h / sqrt(D), (B, T); -inf after the end of a row."""
    score_BT = torch.einsum("btd,bd->bt", hidden_BTD, query_BD) / math.sqrt(query_BD.shape[1])
    return score_BT.masked_fill(~inside(hidden_BTD, length_B), -math.inf)


def inside(hidden_BTD: Tensor, length_B: Tensor) -> Tensor:
    """Return (B, T) bool: which positions count."""
    return torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device) < length_B[:, None]


def check_pool(pool: str) -> None:
    """Raise `UsageError` for an unknown pooling."""
    if pool not in get_args(Pool):
        raise UsageError(
            f"hidden states cannot be pooled by {pool!r}", hint=nearest(pool, get_args(Pool))
        )
