"""Predict whether one half follows another, and hidden tokens: BERT's pre-training.

Shapes: B rows, T positions, M most hidden tokens of a row, D width of the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tokmill.base.errors import UsageError
from tokmill.base.recipe import Amount
from tokmill.feed.feed import Batch
from tokmill.feed.halves import OTHER, Halves
from tokmill.feed.rows import Rows
from tokmill.models.heads import Classes, Pooler
from tokmill.models.model import Group, Inputs, Model, Tensors, decay_groups
from tokmill.models.transformers.layers import Scores
from tokmill.store.store import Store
from tokmill.tasks.hidden.masked import HIDES, PLACES, HiddenConfig, Masked
from tokmill.tasks.measures import Measures
from tokmill.tasks.task_inputs import (
    Facts,
    Frame,
    check_room,
    frame_of,
    framed,
    is_framed,
    store_inputs,
)

RELATION = "relation"
"""A target: 0 if the second half follows the first one, 1 if it is of another record, as in BERT.
"""


class SentencePairConfig(HiddenConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How pairs of halves and their hidden tokens are learned."""

    kind: Literal["sentence_pair"] = "sentence_pair"
    """Which task this is."""
    group: str = "auto"
    """Record column: another half is drawn from records with the same value; auto: `program` if
    the store has it; none: from any record."""
    apart: str = "auto"
    """Record column: another half is drawn from records with another value, if there are any; auto:
    `function` if the store has it; none: any value."""
    cut: Literal["middle", "block"] = "middle"
    """Where a record is cut: at an instruction near its middle; or where its second block begins,
    so that the halves of walks of two blocks are the two ends of an edge of the control flow."""
    pair_weight: Amount = 1.0
    """Weight of the loss of pairs; the mean loss of hidden tokens has weight 1."""


class SentencePair(Masked):
    """Rows are `[CLS] a [SEP] b [SEP]`: b follows a in its record, or is of another record."""

    Config = SentencePairConfig

    def __init__(self, config: Any, model: Model, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        if not self.frame:
            for name in inputs.ids:
                for role in ("cls", "sep"):
                    inputs.role(name, role)
        if model.causal:
            raise UsageError(
                "in a causal model the state of [CLS] has not seen the tokens after it",
                where="model.kind",
                hint="the task sentence_pair takes models that look both ways, such as encoder",
            )
        self.pooler, self.relation = Pooler(model.dim), Classes(model.dim, 2)

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        return store_inputs(facts, "always")

    @classmethod
    def measures(cls, config: Any, inputs: Inputs) -> Measures:
        pairs = ("task.group", "task.apart", "task.cut", "task.pair_weight")
        unit = "nats a hidden token and a pair"
        return Measures(loss=unit, higher=("accuracy",), decided_by=(*HIDES, *pairs))

    def check_rows(self) -> None:
        check_room(self.length, 16, "for two halves")

    @property
    def frame(self) -> Frame:
        return frame_of(self.reads)

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """Return rows of two halves, without their three special tokens."""
        self._check_store(store)
        if is_framed(store, self.frame):
            raise UsageError(
                "the records of the store begin with [CLS], so they cannot be cut into halves",
                where=str(store.path),
                hint="--set task.kind=masked reads them as they are; --template none builds text "
                "without [CLS]",
            )
        group, apart = (
            (name if name in store.schema else "") if chosen == "auto" else chosen
            for chosen, name in ((self.config.group, "program"), (self.config.apart, "function"))
        )
        names = {"group": group, "apart": apart}
        named = {key: "" if name == "none" else name for key, name in names.items()}
        blocks = self.config.cut == "block"
        return Halves(store, self.length - 3, shards=shards, seed=seed, blocks=blocks, **named)

    def evaluation_rows(self, store: Store) -> Rows:
        """Return the same, drawn by seed 0."""
        return self.rows(store)

    def placed(self, batch: Batch) -> Batch:
        if batch.document.shape[1] == self.length:
            return batch
        return framed(batch, self.frame, self.length, pair=True)

    @property
    def target_names(self) -> list[str]:
        return [*super().target_names, RELATION]

    def prepare(self, batch: Batch) -> Batch:
        relation = (batch.document == OTHER).any(1).astype(np.int64)
        return super().prepare(
            dataclasses.replace(self.placed(batch), targets={RELATION: relation})
        )

    def example(self, rows: int) -> Tensors:
        batch = super().example(rows)
        relation = torch.zeros(rows, dtype=torch.int64)
        return dataclasses.replace(batch, targets={**batch.targets, RELATION: relation})

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss of hidden tokens and of pairs.

        The loss of a pair is multiplied by the number of hidden tokens of its row. So it is part of
        the mean over hidden tokens, and does not depend on the cut into micro-batches.
        """
        if not self.training:
            sums, _ = self.scored(batch)
            return sums["loss"], sums
        hidden = self.states(batch)
        targets = {name: batch.targets[name] for name in self.columns}
        parts = self.heads.losses(self.model, hidden[:, 1:], targets)
        loss = torch.stack(list(parts.values())).sum()
        sums = {"loss_masked": loss.detach(), **self.by_column(parts)}
        return self.with_pairs(loss, sums, hidden, batch)

    def states(self, batch: Tensors) -> Tensor:
        """Return the states of `[CLS]` and of the hidden tokens, (B, 1 + M, D)."""
        places = batch.targets[PLACES]
        return self.model(batch, torch.cat([places[:, :1] * 0, places], 1))

    def with_pairs(
        self, loss: Tensor, sums: dict[str, Tensor], hidden: Tensor, batch: Tensors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        relation = batch.targets[RELATION]
        logits = self.relation(self.pooler(hidden)).float()
        each = F.cross_entropy(logits, relation, ignore_index=-1, reduction="none")
        pairs = (each * (batch.targets[PLACES] >= 0).sum(1)).sum()
        loss = loss + self.config.pair_weight * pairs
        return loss, {
            **sums,
            "loss": loss.detach(),
            "loss_pair": pairs.detach(),
            "right_pair": (logits.argmax(1) == relation).sum(),
            "known_pair": (relation >= 0).sum(),
        }

    def scored(self, batch: Tensors) -> tuple[dict[str, Tensor], dict[str, Scores]]:
        hidden = self.states(batch)
        sums, scores = self.scored_states(self.heads.states(hidden[:, 1:]), batch)
        loss = sums.pop("loss")
        return self.with_pairs(loss, {"loss_masked": loss, **sums}, hidden, batch)[1], scores

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        """Return the losses, and the share of pairs predicted right: `pair_accuracy`."""
        pair = {name: sums[f"{name}_pair"] for name in ("right", "known")}
        rest = {k: v for k, v in sums.items() if k not in ("right_pair", "known_pair")}
        metrics = super().report(rest, count, bytes_per_token)
        return {**metrics, "pair_accuracy": pair["right"] / max(pair["known"], 1)}

    def param_groups(self, weight_decay: float) -> list[Group]:
        own = [*self.pooler.parameters(), *self.relation.parameters()]
        return super().param_groups(weight_decay) + decay_groups(own, weight_decay)
