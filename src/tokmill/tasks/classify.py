"""Predict the class of a record, or a number: fine-tuning (Devlin et al. 2018).

Shapes: B rows, T positions, D width of the model, C classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError
from tokmill.feed.entries import Pairs
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows, Whole
from tokmill.models.heads import Classes, Numbers, Pooler
from tokmill.models.model import Group, Model, Tensors, decay_groups
from tokmill.models.model_inputs import Inputs
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store
from tokmill.tasks.classes import check_classes, check_numbers, classes_of
from tokmill.tasks.hidden.framing import Frame, frame_of, framed, is_framed
from tokmill.tasks.measures import Measures
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import SEGMENT, Facts, joined, store_inputs

LABEL = "label"
UNLABELLED = "without_label"
"""Metric of numbers: records whose label is NaN, which teach nothing."""
"""The name of the targets."""
MOST_SHOWN = 20
"""With more classes, metrics of single classes are left out."""


class ClassifyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the labels of records are learned."""

    kind: Literal["classify"] = "classify"
    """Which task this is."""
    length: int = 128
    """Positions T of a row, including special tokens; longer records are cut off."""
    column: str = "label"
    """The label column, with one value for each record, in the store or an overlay."""
    target: Literal["class", "number"] = "class"
    """class: labels are numbers of classes; number: any numbers, with squared error as the loss."""
    sentences: tuple[str, ...] = ()
    """Two columns that name records of another store: a row is a pair of them. Without these a row
    is a record."""
    pool: Literal["first", "mean", "last"] = "first"
    """The hidden state to predict from: of the first token ([CLS]), the mean, of the last token."""
    pooler: Literal["tanh", "relu", "none"] = "tanh"
    """Layer after this state: linear and tanh, as in BERT, or linear and ReLU, as in DistilBERT."""
    dropout: float = 0.1
    """Dropout before the last linear map, in training."""
    segment: bool | Literal["always"] = True
    """Whether the model reads which of two sentences each token belongs to; always: of one too."""


class Classify(Task):
    """Predicts a class or a number for each record. Its evaluation sees all rows at once."""

    Config = ClassifyConfig
    collects = True

    def __init__(self, config: ClassifyConfig, model: Model, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        if config.pool == "first" and model.causal:
            raise UsageError(
                "the first state of a causal model has seen only one token",
                where="task.pool",
                hint="--from RUN begins with the encoder of a run, --set model.kind=encoder with "
                "one that has learned nothing; --set task.pool=last reads the last state",
            )
        if not 0 <= config.dropout < 1:
            raise UsageError(
                f"dropout must be at least 0 and below 1, not {config.dropout}",
                where="task.dropout",
                hint="--set task.dropout=0.1",
            )
        self.names = tuple(inputs.classes.get(config.column, ()))
        """Names of the classes, by number."""
        self.pooler = None if config.pooler == "none" else Pooler(model.dim, config.pooler)
        self.output: Classes | Numbers
        if config.target == "class":
            self.output = Classes(model.dim, max(2, len(self.names)), config.dropout)
        else:
            self.output = Numbers(model.dim, 1, config.dropout)

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        found = store_inputs(facts)
        column = facts.schema.get(SEGMENT)
        two = bool(config.sentences) or (column is not None and column.per == "token")
        made = {SEGMENT: 2} if config.segment == "always" or (config.segment and two) else {}
        return dataclasses.replace(found, made=made, classes=facts.classes)

    @classmethod
    def label_classes(cls, config: Any, store: Store) -> dict[str, tuple[str, ...]]:
        if config.target == "number":
            check_numbers(store, config.column)
            return {}
        return {config.column: classes_of(store, config.column)}

    @classmethod
    def measures(cls, config: Any, inputs: Inputs) -> Measures:
        """Return the unit of the loss, and the metrics for which higher is better."""
        unit = "nats a record" if config.target == "class" else "squared error"
        names = inputs.classes.get(config.column, ())
        each = [f"f1_{name}" for name in names]
        return Measures(loss=unit, higher=("accuracy", "f1", "f1_macro", "pearson", *each))

    @classmethod
    def token_store(cls, config: Any, store: Store) -> Store:
        """Return the store itself, or the store of the pairs' records."""
        if len(config.sentences) not in (0, 2):
            raise UsageError(
                f"a pair has two columns, not {len(config.sentences)}",
                where="task.sentences",
                hint='--set \'task.sentences=["left", "right"]\'',
            )
        return store.reference(config.sentences[0]) if config.sentences else store

    @property
    def frame(self) -> Frame:
        """`[CLS]` and `[SEP]`, if the vocabularies have them."""
        return frame_of(self.reads)

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """Return rows of one record or two."""
        found = self.label_classes(self.config, store).get(self.config.column, ())
        check_classes(store, found, self.names, "the run has learned")
        names = self.config.sentences
        ready = not self.frame or (not names and is_framed(store, self.frame))
        short = 0 if ready else 3 if names else 2
        if self.length <= short + 1:
            raise UsageError(
                f"a row of {self.length} positions has no room for tokens",
                where="task.length",
                hint="--set task.length=128, for example",
            )
        if names:
            return Pairs(store, self.length - short, names, shards=shards, seed=seed)
        return Whole(store, self.length - short, shards=shards, seed=seed)

    def extra_columns(self, schema: Schema) -> list[str]:
        """Return the label column, and the segment if the store has it."""
        segment = self.reads.made if SEGMENT in schema and not self.config.sentences else ()
        return [self.config.column, *segment]

    @property
    def target_names(self) -> list[str]:
        """None: `example` adds the labels."""
        return []

    def prepare(self, batch: Batch) -> Batch:
        """Put special tokens around records without them, and add the labels as targets."""
        values = dict(batch.values)
        label = values.pop(self.config.column)
        if self.config.target == "number":
            targets = label.astype(np.float32)
            if np.isinf(targets).any():
                raise TokmillError(
                    "a record has an infinite label",
                    where=f"column {self.config.column!r}",
                    hint="use finite numbers (up to 3.4e38), and NaN where there is no label",
                )
        else:
            targets = label.astype(np.int64)
            wrong = targets[(targets < 0) | (targets >= len(self.names))]
            if len(wrong):
                raise TokmillError(
                    f"a record has the label {wrong[0]}, but the classes are 0 to "
                    f"{len(self.names) - 1}",
                    where=f"column {self.config.column!r}",
                    hint="`tokmill store validate STORE` shows whether it is damaged",
                )
        pair = bool(self.config.sentences)
        if batch.document.shape[1] < self.length and self.frame:
            batch = framed(batch, self.frame, self.length, pair=pair)
        elif pair:
            batch = joined(batch)
        columns = {
            name: batch.columns.get(name, batch.document * 0).astype(np.int64)
            for name in self.reads.embedded
        }
        return dataclasses.replace(batch, columns=columns, values=values, targets={LABEL: targets})

    def count(self, batch: Batch) -> int:
        known = batch.entry >= 0
        if self.config.target == "number":
            known &= ~np.isnan(batch.targets[LABEL])
        return int(np.count_nonzero(known))

    def example(self, rows: int) -> Tensors:
        made = super().example(rows)
        kind = torch.float32 if self.config.target == "number" else torch.int64
        return dataclasses.replace(made, targets={LABEL: torch.zeros(rows, dtype=kind)})

    def predicted_values(self, batch: Tensors) -> Tensor:
        """Return the output of the last linear map for each row, (B, C) or (B, 1)."""
        inside = batch.document >= 0
        if self.config.pool == "mean":
            weight = inside / inside.sum(1, keepdim=True).clamp(min=1)
            states = torch.einsum("bt,btd->bd", weight, self.model(batch).float())[:, None]
        else:
            last = inside.sum(1, keepdim=True) - 1
            states = self.model(
                batch, last.clamp(min=0) if self.config.pool == "last" else last * 0
            )
        vectors = states[:, 0] if self.pooler is None else self.pooler(states)
        found: Tensor = self.output(vectors).float()
        return found

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        found, label = self.predicted_values(batch), batch.targets[LABEL]
        if self.config.target == "number":
            known = ~label.isnan()
            loss = ((found[:, 0] - label.nan_to_num()).square() * known).sum()
            lacking = label.isnan()
            if batch.entry is not None:
                lacking &= batch.entry >= 0
            return loss, {"loss": loss.detach(), UNLABELLED: lacking.sum()}
        loss = torch.nn.functional.cross_entropy(found, label, ignore_index=-1, reduction="sum")
        right = (found.argmax(1) == label).sum()
        return loss, {"loss": loss.detach(), "accuracy": right}

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        found = self.predicted_values(batch)
        found = found[:, 0] if self.config.target == "number" else found.argmax(1)
        return {"found": found, "label": batch.targets[LABEL]}

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        """Return means over records with a label, and the number of records without one, if any."""
        sums = dict(sums)
        lacking = int(sums.pop(UNLABELLED, 0))
        found = super().report(sums, count, bytes_per_token)
        return {**found, UNLABELLED: lacking} if lacking else found

    def measure(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """Return F1, and for each class the numbers of its records and of its predictions."""
        found, label = results["found"].numpy(), results["label"].numpy()
        if self.config.target == "number":
            return {"pearson": pearson(found, label)}
        return class_metrics(found, label, self.names)

    def param_groups(self, weight_decay: float) -> list[Group]:
        """Return the groups of the model and of the layers after it."""
        own = [*self.output.parameters()]
        own += [] if self.pooler is None else self.pooler.parameters()
        return super().param_groups(weight_decay) + decay_groups(own, weight_decay)


def class_metrics(found: Array, label: Array, names: Sequence[str]) -> dict[str, float]:
    """Return F1 and counts by class.

    Args:
        found: (N,) integers, the predicted class of each record.
        label: (N,) integers, the right class.
        names: of the classes.

    Returns:
        `f1_macro`, the mean over the classes that occur in either; `f1`, with two classes the F1 of
        the second one, as in GLUE's MRPC, else the same mean. With at most `MOST_SHOWN` classes
        also `f1_NAME`, `count_NAME` (records of the class) and `found_NAME` (predicted records).
    """
    size = max(len(names), int(max(found.max(initial=0), label.max(initial=0))) + 1)
    right = np.bincount(label[found == label], minlength=size)
    of_label, of_found = np.bincount(label, minlength=size), np.bincount(found, minlength=size)
    total = of_label + of_found
    each = 2 * right / np.maximum(total, 1)
    macro = float(each[total > 0].mean()) if total.any() else 0.0
    metrics = {"f1": float(each[1]) if len(names) == 2 else macro, "f1_macro": macro}
    if len(names) <= MOST_SHOWN:
        for number, name in enumerate(names):
            metrics[f"f1_{name}"] = float(each[number])
            metrics[f"count_{name}"] = int(of_label[number])
            metrics[f"found_{name}"] = int(of_found[number])
    return metrics


def pearson(found: Array, label: Array) -> float:
    """Return the correlation of predicted and right numbers; 0 if one side is constant."""
    known = ~np.isnan(label)
    x, y = (side[known].astype(np.float64) for side in (found, label))
    if len(x) < 2:
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / norm if norm else 0.0
