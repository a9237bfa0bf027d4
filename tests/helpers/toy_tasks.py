"""Small tasks of each kind: label a record, a pair, a triplet over references, a set of vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokmill import plugins
from tokmill.feed.entries import Pairs, Tuples
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows, Whole
from tokmill.feed.values import Vectors
from tokmill.models.model import Group as Params
from tokmill.models.model import Model, Tensors, decay_groups
from tokmill.models.model_inputs import Inputs
from tokmill.store.schema import Schema
from tokmill.store.store import Store
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import SEGMENT, Facts, store_inputs

CLASSES = 4
NAMES = ("label", "soft", "pair", "triplet", "group", "set")
TRIPLET = ("anchor", "positive", "negative")


def mean(hidden: Tensor, document: Tensor) -> Tensor:
    """The mean of a row's states (B, D); 0 of a row without tokens."""
    there = (document >= 0).unsqueeze(-1)
    return (hidden * there).sum(1) / there.sum(1).clamp(min=1)


class LabelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a record is labelled."""

    kind: Literal["label"] = "label"
    length: int = 16
    column: str = "label"


class Label(Task):
    """Tell the class of a record: a target a row. Its evaluation sees all rows at once."""

    Config: type[msgspec.Struct] = LabelConfig
    collects = True
    classes = CLASSES

    def __init__(self, config: Any, model: Model, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        self.head_of_classes = nn.Linear(model.dim, self.classes)

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        return Whole(store, self.length, shards=shards, seed=seed)

    def extra_columns(self, schema: Schema) -> list[str]:
        return [self.config.column]

    def prepare(self, batch: Batch) -> Batch:
        label = batch.values[self.config.column].astype(np.int64)
        return dataclasses.replace(batch, targets={"label": label})

    def count(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch.entry >= 0))

    def example(self, rows: int) -> Tensors:
        made = super().example(rows)
        return dataclasses.replace(made, targets={"label": made.document[:, 0]})

    def logits(self, batch: Tensors) -> Tensor:
        made: Tensor = self.head_of_classes(mean(self.model(batch), batch.document))
        return made

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        target = batch.targets["label"]
        loss = F.cross_entropy(self.logits(batch), target, ignore_index=-1, reduction="sum")
        return loss, {"loss": loss.detach()}

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        return {"found": self.logits(batch).argmax(1), "label": batch.targets["label"]}

    def measure(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """The mean over classes of the share that is found, which is no sum over rows."""
        right = results["found"] == results["label"]
        classes = results["label"].unique()
        recall = [right[results["label"] == one].float().mean() for one in classes]
        return {"recall": float(torch.stack(recall).mean()), "evaluated": float(len(right))}

    def param_groups(self, weight_decay: float) -> list[Params]:
        return super().param_groups(weight_decay) + decay_groups(
            self.head_of_classes.parameters(), weight_decay
        )


class SoftConfig(LabelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a record is labelled by shares."""

    kind: Literal["soft"] = "soft"  # type: ignore[assignment]


class Soft(Label):
    """Several targets a row, which are fractions: .7 for its class and .1 for each other."""

    Config = SoftConfig
    collects = False

    def prepare(self, batch: Batch) -> Batch:
        label = batch.values[self.config.column].astype(np.int64)
        shares = np.where(np.arange(CLASSES) == label[:, None], 0.7, 0.1).astype(np.float32)
        return dataclasses.replace(batch, values={"shares": shares})

    def nothing(self, batch: Batch, rows: np.ndarray) -> Batch:
        batch = super().nothing(batch, rows)
        shares = np.where(rows[:, None], 0, batch.values["shares"]).astype(np.float32)
        return dataclasses.replace(batch, values={"shares": shares})

    def idle(self, like: Tensors) -> Tensors:
        one = super().idle(like)
        return dataclasses.replace(one, values={"shares": one.values["shares"] * 0})

    def example(self, rows: int) -> Tensors:
        made = super().example(rows)
        return dataclasses.replace(made, targets={}, values={"shares": torch.zeros(rows, CLASSES)})

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(batch.values["shares"] * self.logits(batch).log_softmax(1)).sum()
        return loss, {"loss": loss.detach()}


class PairConfig(LabelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a pair is labelled."""

    kind: Literal["pair"] = "pair"  # type: ignore[assignment]
    column: str = "same"


class Pair(Label):
    """Tell whether two referred records are of one class; both in one row, told by a segment."""

    Config = PairConfig
    classes = 2

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        return dataclasses.replace(store_inputs(facts), made={SEGMENT: 2})

    @classmethod
    def token_store(cls, config: Any, store: Store) -> Store:
        return store.reference("anchor")

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        return Pairs(store, self.length, ("anchor", "other"), shards=shards, seed=seed)

    def prepare(self, batch: Batch) -> Batch:
        batch = super().prepare(batch)
        segment = np.maximum(batch.document, 0).astype(np.int64)
        columns = {**batch.columns, SEGMENT: segment}
        return dataclasses.replace(batch, columns=columns, document=np.minimum(batch.document, 0))


class TripletConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How likeness is learned."""

    kind: Literal["triplet"] = "triplet"
    length: int = 16


class Triplet(Task):
    """An anchor is to be nearer to its positive than to all other records of the step."""

    Config = TripletConfig
    compares = collects = True

    @classmethod
    def token_store(cls, config: Any, store: Store) -> Store:
        return store.reference("anchor")

    @classmethod
    def entry_rows(cls, config: Any) -> int:
        return 3

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        return Tuples(store, self.length, TRIPLET, shards=shards, seed=seed)

    @property
    def target_names(self) -> list[str]:
        return []

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def count(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch.entry >= 0)) // 3

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        return {"vectors": F.normalize(mean(self.model(batch), batch.document), dim=1)}

    def compare(
        self, vectors: Tensor, results: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        anchors, others = self.parted(vectors, results["entry"])
        target = 2 * torch.arange(len(anchors), device=vectors.device)
        loss = F.cross_entropy(5 * anchors @ others.T, target, reduction="sum")
        return loss, {"loss": loss.detach()}

    def measure(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """Mean reciprocal rank of the positive among the others of all entries."""
        anchors, others = self.parted(results["vectors"], results["entry"])
        alike = anchors @ others.T
        own = alike[torch.arange(len(anchors)), 2 * torch.arange(len(anchors))]
        rank = 1 + (alike > own[:, None] + 1e-6).sum(1)
        return {"mrr": float((1 / rank).mean()), "pool": float(len(others))}

    def parted(self, vectors: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Anchors, and the positive and negative of each."""
        assert entry.tolist() == torch.arange(len(entry)).div(3, rounding_mode="floor").tolist()
        each = vectors.view(-1, 3, vectors.shape[1])
        return each[:, 0], each[:, 1:].reshape(-1, vectors.shape[1])


class GroupConfig(LabelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a group is labelled."""

    kind: Literal["group"] = "group"  # type: ignore[assignment]
    column: str = "group"


class Group(Label):
    """Tell the class of each row of an entry of 1 to 4 rows from the mean of all."""

    Config = GroupConfig

    @classmethod
    def token_store(cls, config: Any, store: Store) -> Store:
        return store.reference("member")

    @classmethod
    def entry_rows(cls, config: Any) -> int:
        return 4

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        return Tuples(store, self.length, ["member"], shards=shards, seed=seed)

    def logits(self, batch: Tensors) -> Tensor:
        assert batch.entry is not None
        own = (batch.entry[:, None] == batch.entry).float()
        states = own @ mean(self.model(batch), batch.document) / own.sum(1, keepdim=True)
        made: Tensor = self.head_of_classes(states)
        return made


class SetConfig(LabelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a set of vectors is labelled."""

    kind: Literal["set"] = "set"  # type: ignore[assignment]
    column: str = "group"


class Set(Label):
    """Tell the class of a set of referred records from their vectors alone."""

    Config = SetConfig

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        return Inputs(vectors=facts.vectors)

    @classmethod
    def vectors(cls, config: Any, store: Store) -> dict[str, Vectors]:
        found = Store(store.reference("member").path, ["vectors"])
        return {"vector": Vectors("member", found, "vector")}

    def extra_columns(self, schema: Schema) -> list[str]:
        return ["member", self.config.column]

    def prepare(self, batch: Batch) -> Batch:
        batch = super().prepare(batch)
        return dataclasses.replace(batch, columns={"vector": batch.columns["vector"]})


TASKS = {name: plugins.Part(f"toy_tasks:{name.title()}", "", name) for name in NAMES}
