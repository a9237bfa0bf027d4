"""Predict the class of a record: fine-tuning (Devlin et al. 2018).

Shapes: B rows, T positions, D width of the model, C classes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import read_file
from tokmill.base.headers import loads_json
from tokmill.base.recipe import Part, check_types
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows, Whole
from tokmill.models.heads import Classes, Pooler
from tokmill.models.model import Group, Inputs, Model, Tensors, decay_groups
from tokmill.store.schema import Array, Column, Schema
from tokmill.store.store import Store
from tokmill.tasks.measures import Measures
from tokmill.tasks.task import Task, check_classes
from tokmill.tasks.task_inputs import (
    MOST_CLASSES,
    SEGMENT,
    Facts,
    Frame,
    check_room,
    frame_of,
    framed,
    is_framed,
    store_inputs,
)


def label_column(store: Store, name: str) -> Column:
    """Return a label column: one number for each record, in the store or one of its overlays."""
    column = store.schema.get(name)
    names = [
        n
        for n, c in store.schema.items()
        if c.per == "record" and c.dtype != "utf8" and not c.width
    ]
    if column is None or name not in names:
        what = "does not have one number for each record" if column else "is not there"
        hint = nearest(
            name,
            names,
            "--set task.column=NAME; of an overlay: --set 'data.overlays=[\"NAME\"]'",
        )
        if column is not None and column.dtype == "utf8":
            hint = "of texts make an overlay with a number for each: docs/bert.md, classify"
        raise UsageError(
            f"the label column {name!r} {what}",
            where=str(store.path),
            hint=hint,
        )
    return column


def classes_of(store: Store, name: str) -> tuple[str, ...]:
    """Return the names of the classes of a column, by number.

    They are in the column's vocabulary. Without a vocabulary, the classes are the whole numbers
    from 0 to the largest in the column. Raises `UsageError` for a column that holds no classes.
    """
    column = label_column(store, name)
    if column.dtype.startswith("f"):
        raise UsageError(
            f"the column {name!r} holds fractions, not classes",
            where=str(store.path),
            hint="number the classes from 0",
        )
    if column.vocab in store.vocabularies:
        return _names(store, column.vocab)
    low, high = store.manifest.ranges.get(name, (0, 0))
    if low < 0 or high >= MOST_CLASSES:
        raise UsageError(
            f"the column {name!r} holds numbers from {low:g} to {high:g}; classes are 0 to at most "
            f"{MOST_CLASSES - 1:,}",
            where=str(store.path),
            hint="number the classes from 0",
        )
    return tuple(str(number) for number in range(int(high) + 1))


def _names(store: Store, vocabulary: str) -> tuple[str, ...]:
    path = store.vocabulary_file(vocabulary)
    try:
        names = loads_json(read_file(path))["tokens"]
        if not all(isinstance(name, str) for name in names) or not names:
            raise ValueError("its tokens are not names")
    except (ValueError, TypeError, KeyError) as error:
        raise TokmillError(
            f"this is not a list of classes: {error}",
            where=str(path),
            hint="the same `tokmill build` makes it again",
        ) from None
    return tuple(names)


LABEL = "label"
"""The name of the targets."""
MOST_SHOWN = 20
"""With more classes, metrics of single classes are left out."""
LARGEST_TABLE, MOST_PAIRS = 12, 20
"""Classes of a confusion matrix at most; with more, pairs of classes that are listed."""


class ClassifyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the labels of records are learned."""

    kind: Literal["classify"] = "classify"
    """Which task this is."""
    length: int = 128
    """Positions T of a row, including special tokens; longer records are cut off."""
    column: str = "label"
    """The label column, with the number of a class for each record, in the store or an overlay."""
    pool: Literal["first", "mean", "last"] = "first"
    """The hidden state to predict from: of the first token ([CLS]), the mean, of the last token."""
    pooler: Literal["tanh", "none"] = "tanh"
    """Layer after this state: linear and tanh, as in BERT."""
    dropout: Part = 0.1
    """Dropout before the last linear map, in training."""
    segment: bool | Literal["always"] = True
    """Whether the model reads the segment of each token, if the store has it; always: if it has
    none too, and then all tokens are in the first segment."""


class Classify(Task):
    """Predicts a class for each record. Its evaluation sees all rows at once."""

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
        check_types(config, "task")
        self.names = tuple(inputs.classes.get(config.column, ()))
        """Names of the classes, by number."""
        self.pooler = None if config.pooler == "none" else Pooler(model.dim)
        self.output = Classes(model.dim, max(2, len(self.names)), config.dropout)

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        return dataclasses.replace(store_inputs(facts, config.segment), classes=facts.classes)

    @classmethod
    def label_classes(cls, config: Any, store: Store) -> dict[str, tuple[str, ...]]:
        return {config.column: classes_of(store, config.column)}

    @classmethod
    def measures(cls, config: Any, inputs: Inputs) -> Measures:
        names = inputs.classes.get(config.column, ())
        each = [f"f1_{name}" for name in names]
        higher = ("accuracy", "f1", "f1_macro", *each)
        return Measures(loss="nats per record", higher=higher, decided_by=("task.column",))

    @property
    def frame(self) -> Frame:
        return frame_of(self.reads)

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        classes = self.label_classes(self.config, store).get(self.config.column, ())
        check_classes(store, classes, self.names, "the run has learned")
        return self.records(store, seed, shards)

    def records(self, store: Store, seed: int = 0, shards: int = 0) -> Whole:
        short = 0 if not self.frame or is_framed(store, self.frame) else 2
        check_room(self.length, short + 2, "for tokens")
        return Whole(store, self.length - short, shards=shards, seed=seed)

    def extra_columns(self, schema: Schema) -> list[str]:
        segment = self.reads.made if SEGMENT in schema else ()
        return [self.config.column, *segment]

    @property
    def target_names(self) -> list[str]:
        """None: `example` adds the labels."""
        return []

    def placed(self, batch: Batch) -> Batch:
        if batch.document.shape[1] < self.length and self.frame:
            return framed(batch, self.frame, self.length)
        return batch

    def prepare(self, batch: Batch) -> Batch:
        """Put special tokens around records without them, and add the labels as targets."""
        values = dict(batch.values)
        targets = values.pop(self.config.column).astype(np.int64)
        wrong = targets[(targets < 0) | (targets >= len(self.names))]
        if len(wrong):
            raise TokmillError(
                f"a record has the label {wrong[0]}, but the classes are 0 to "
                f"{len(self.names) - 1}",
                where=f"column {self.config.column!r}",
                hint="`tokmill store validate STORE` shows whether it is damaged",
            )
        batch = self.placed(batch)
        columns = {
            name: batch.columns.get(name, batch.document * 0).astype(np.int64)
            for name in self.reads.embedded
        }
        return dataclasses.replace(batch, columns=columns, values=values, targets={LABEL: targets})

    def count(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch.entry >= 0))

    def example(self, rows: int) -> Tensors:
        batch = super().example(rows)
        return dataclasses.replace(batch, targets={LABEL: torch.zeros(rows, dtype=torch.int64)})

    def predicted_values(self, batch: Tensors) -> Tensor:
        """Return the output of the last linear map for each row, (B, C)."""
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
        return self.output(vectors).float()

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        values, label = self.predicted_values(batch), batch.targets[LABEL]
        loss = torch.nn.functional.cross_entropy(values, label, ignore_index=-1, reduction="sum")
        right = (values.argmax(1) == label).sum()
        return loss, {"loss": loss.detach(), "accuracy": right}

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        return {"found": self.predicted_values(batch).argmax(1), "label": batch.targets[LABEL]}

    def measure(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """Return F1, and for each class the numbers of its records and of its predictions."""
        return class_metrics(results["found"].numpy(), results["label"].numpy(), self.names)

    def tables(self, results: Mapping[str, Tensor]) -> dict[str, Any]:
        return class_tables(results["found"].numpy(), results["label"].numpy(), self.names)

    def param_groups(self, weight_decay: float) -> list[Group]:
        own = [*self.output.parameters()]
        own += [] if self.pooler is None else self.pooler.parameters()
        return super().param_groups(weight_decay) + decay_groups(own, weight_decay)


def class_metrics(predicted: Array, label: Array, names: Sequence[str]) -> dict[str, float]:
    """Return F1 and counts by class.

    Returns:
        `f1_macro`, the mean over the classes that occur in either; `f1`, with two classes the F1 of
        the second one, as in GLUE's MRPC, else the same mean. With at most `MOST_SHOWN` classes
        also `f1_NAME`, `count_NAME` (records of the class) and `found_NAME` (predicted records).
    """
    classes = class_tables(predicted, label, names)["classes"]
    there = [one["f1"] for one in classes if one["records"] or one["predicted"]]
    macro = float(np.mean(there)) if there else 0.0
    metrics = {"f1": classes[1]["f1"] if len(names) == 2 else macro, "f1_macro": macro}
    for name, one in zip(names, classes, strict=False) if len(names) <= MOST_SHOWN else ():
        # A class may be called macro.
        metrics.setdefault(f"f1_{name}", one["f1"])
        metrics[f"count_{name}"] = one["records"]
        metrics[f"found_{name}"] = one["predicted"]
    return metrics


def class_tables(predicted: Array, label: Array, names: Sequence[str]) -> dict[str, Any]:
    """Return tables of what was predicted, from the arguments of `class_metrics`.

    Returns:
        `majority`, the share of the most frequent class; `classes`, with `precision`, `recall` and
        `f1` of each (0 where nothing was predicted, or is there); `confusion`, records by class
        (row) and predicted class (column), or of more than `LARGEST_TABLE` classes `confused`, the
        pairs of classes that were confused most often.
    """
    # A run that has learned one class has two outputs.
    names = [*names, *["(no class)"] * (2 - len(names))]
    size = len(names)
    pairs, counts = np.unique(label * size + predicted, return_counts=True)
    true, guess = np.divmod(pairs, size)
    records, predictions, right = (
        np.bincount(which, weights, size).astype(int)
        for which, weights in ((true, counts), (guess, counts), (true, counts * (true == guess)))
    )
    shares = (
        right / np.maximum(n, 0.5) for n in (predictions, records, (predictions + records) / 2)
    )
    columns = (column.tolist() for column in (records, predictions, *shares))
    keys = ("class", "records", "predicted", "precision", "recall", "f1")
    rows = [dict(zip(keys, row, strict=True)) for row in zip(names, *columns, strict=True)]
    tables = {"majority": float(records.max() / max(len(label), 1)), "classes": rows}
    if size <= LARGEST_TABLE:
        matrix = np.bincount(pairs, counts, size * size).astype(int).reshape(size, size)
        return tables | {"confusion": matrix.tolist()}
    wrong = np.flatnonzero(true != guess)
    most = wrong[np.argsort(-counts[wrong], kind="stable")][:MOST_PAIRS]
    confused = zip(*(column[most].tolist() for column in (true, guess, counts)), strict=True)
    return tables | {
        "confused": [
            {"class": names[a], "predicted_as": names[b], "records": n} for a, b, n in confused
        ]
    }
