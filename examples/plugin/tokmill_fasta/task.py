"""The task `gc`: predict the share of G and C of a record, from the mean of its hidden states.

Shapes: B rows, T positions, D width of the model.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows, Whole
from tokmill.models.model import Group, Inputs, Model, Tensors, decay_groups
from tokmill.store.store import Store
from tokmill.tasks.task import Task


class GcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the share is learned."""

    kind: Literal["gc"] = "gc"
    """Which task this is."""
    length: int = 128
    """Positions T of a row; longer records are cut off."""


class GcShare(Task):
    """Predicts a number between 0 and 1 for each record; the loss is the squared error."""

    Config = GcConfig

    def __init__(self, config: GcConfig, model: Model, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        self.output = nn.Linear(model.dim, 1)

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        return Whole(store, self.length, shards=shards, seed=seed)

    def prepare(self, batch: Batch) -> Batch:
        there = batch.document >= 0
        gc = np.isin(batch.columns["token"], (1, 2)) & there
        share = gc.sum(1) / np.maximum(there.sum(1), 1)
        return dataclasses.replace(batch, targets={"gc": share.astype(np.float32)})

    def count(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch.entry >= 0))

    def example(self, rows: int) -> Tensors:
        return dataclasses.replace(super().example(rows), targets={"gc": torch.zeros(rows)})

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        there = (batch.document >= 0).unsqueeze(-1)
        mean = (self.model(batch) * there).sum(1) / there.sum(1).clamp(min=1)
        error = torch.sigmoid(self.output(mean)[:, 0]) - batch.targets["gc"]
        # Rows that fill up a batch have no target.
        loss = torch.nan_to_num(error).square().sum()
        return loss, {"loss": loss.detach()}

    def param_groups(self, weight_decay: float) -> list[Group]:
        own = decay_groups(self.output.parameters(), weight_decay)
        return super().param_groups(weight_decay) + own
