"""A small task for models that look ahead: every fourth token is hidden, and told from the rest."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tokmill import plugins
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows, Whole
from tokmill.models.heads import Heads, Transform
from tokmill.models.model import Group, Inputs, Model, Tensors, predicted
from tokmill.store.store import Store
from tokmill.tasks.task import Task

PLACES = "places"


class MaskedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows are records; every `every`-th token is hidden."""

    kind: Literal["toy_masked"] = "toy_masked"
    length: int = 16
    every: int = 4


class Masked(Task):
    """Predicts the hidden tokens; id 0 stands in their place."""

    Config = MaskedConfig

    def __init__(self, config: Any, model: Model, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        self.every = config.every
        transform = Transform(model.dim)
        self.heads = Heads(model, self.sizes, tied=True, bias=True, transform=transform)

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        return Whole(store, self.length, shards=shards, seed=seed)

    def prepare(self, batch: Batch) -> Batch:
        inside = batch.document >= 0
        hidden = inside & (np.arange(batch.document.shape[1]) % self.every == 1)
        ids = {name: batch.columns[name].astype(np.int64) for name in self.sizes}
        targets = {name: np.where(hidden, column, -1) for name, column in ids.items()}
        columns = {name: np.where(hidden, 0, column) for name, column in ids.items()}
        places, targets = predicted(targets)
        return dataclasses.replace(batch, columns=columns, targets={PLACES: places, **targets})

    def count(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch.targets[PLACES] >= 0))

    def example(self, rows: int) -> Tensors:
        made = super().example(rows)
        few = torch.zeros(rows, max(1, self.length // self.every), dtype=torch.int64)
        return dataclasses.replace(made, targets=dict.fromkeys([PLACES, *self.sizes], few))

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        targets = dict(batch.targets)
        states = self.model(batch, targets.pop(PLACES))
        loss = torch.stack(list(self.heads.losses(self.model, states, targets).values())).sum()
        return loss, {"loss": loss.detach()}

    def param_groups(self, weight_decay: float) -> list[Group]:
        return super().param_groups(weight_decay) + self.heads.param_groups(weight_decay)


PART = plugins.Part("toy_masked:Masked", "", "predict hidden tokens")


@pytest.fixture
def toy_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the task into the table, in this process."""
    monkeypatch.setitem(plugins.TASKS, "toy_masked", PART)
