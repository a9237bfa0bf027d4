"""A task that compares the rows of a step with each other: neighbours in the batch are similar."""

from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokmill import plugins
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows, Whole
from tokmill.models.model import Tensors
from tokmill.store.store import Store
from tokmill.tasks.task import Task

PLACE = plugins.Part("compare_task:Neighbours", "train", "neighbours are similar")


class NeighboursConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How neighbours are learned."""

    kind: Literal["neighbours"] = "neighbours"
    length: int = 16


class Neighbours(Task):
    """The vector of a row is to be nearer to that of its neighbour than to all others."""

    Config = NeighboursConfig
    compares = True

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """One record a row, so rows are of several lengths."""
        return Whole(store, self.length)

    @property
    def target_names(self) -> list[str]:
        """None."""
        return []

    def prepare(self, batch: Batch) -> Batch:
        """The batch as it is."""
        return batch

    def count(self, batch: Batch) -> int:
        """Entries."""
        return int(np.count_nonzero(batch.entry >= 0))

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        """The mean of a row's states, and its first id."""
        there = (batch.document >= 0).unsqueeze(-1)
        states = (self.model(batch) * there).sum(1) / there.sum(1).clamp(min=1)
        return {"vectors": states, "first": batch.columns["token"][:, 0]}

    def compare(
        self, vectors: Tensor, results: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of finding the neighbour among all rows."""
        count = len(vectors)
        assert results["entry"].tolist() == list(range(count))
        units = nn.functional.normalize(vectors, dim=-1)
        similar = (5 * units @ units.T).fill_diagonal_(-torch.inf)
        other = torch.arange(count) ^ 1
        loss = nn.functional.cross_entropy(similar, other, reduction="sum")
        return loss, {"loss": loss.detach(), "first": results["first"].sum()}
