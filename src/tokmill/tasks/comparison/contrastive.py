"""Make vectors of similar records near to each other: triplet loss, circle loss, InfoNCE.

Shapes: B rows, T positions, N rows of a step, D width of the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional as F

from tokmill.base.recipe import AboveZero, check_types
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows
from tokmill.models.heads import Pool, of_sets, vector_of
from tokmill.models.model import Inputs, Model, Tensors
from tokmill.store.schema import Schema
from tokmill.store.store import Store
from tokmill.tasks.comparison.comparison_losses import (
    ANCHOR,
    RELATIONS,
    circle,
    entry_rows,
    in_batch,
    over_entries,
    query_entries,
    rank_metrics,
    reference_columns,
    relations,
    triplet,
    value_columns,
    with_relations,
)
from tokmill.tasks.measures import Measures
from tokmill.tasks.task import Task

MARGINS = {"triplet": 0.2, "circle": 0.25, "in_batch": 0.0}
"""The margin of each loss, if none is given: that of jTrans, that of Sun et al. 2020."""


Margin = Annotated[float, Meta(ge=0, le=2)]
"""A margin between two cosines."""


class SimilarityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which records are similar, and the loss of their vectors."""

    length: int = 128
    """Positions T of a row; longer records are cut off while training."""
    loss: Literal["in_batch", "triplet", "circle"] = "in_batch"
    """in_batch: a softmax over all records of the step (InfoNCE); triplet: cosine, with a margin;
    circle: Sun et al. 2020."""
    columns: tuple[str, ...] = ()
    """Columns that name the records of an entry in another store; the first is the anchor, those
    that begin with `negative` name negatives. Empty: anchor, positive and negative, or anchor and
    positive, or member, if the store has them."""
    group: str = ""
    """Record column of numbers: entries with the same number are no negatives of each other; or of
    as many numbers as an entry has records, one for each. Empty: `group`, if there is one."""
    negatives: Literal["auto", "own", "step"] = "auto"
    """own: negatives of the own entry, of which triplet takes the nearest; step: these and the
    records of other entries, of which triplet takes a semi-hard one; auto: own for triplet with a
    column of negatives, else step."""
    margin: Margin | None = None
    """Margin of triplet (0.2) or circle (0.25)."""
    gamma: AboveZero = 80.0
    """Scale of circle."""
    temperature: AboveZero = 0.1
    """Temperature of in_batch."""


RANKS = ("mrr", "recall_1", "recall_10")
LOSS_KEYS = {"in_batch": ("temperature",), "triplet": ("margin",), "circle": ("margin", "gamma")}


def decided_by(config: Any) -> tuple[str, ...]:
    """Return the keys of the loss, and of what records are compared with."""
    keys = ["loss", *LOSS_KEYS[config.loss], "columns", "group", "negatives"]
    # Where columns are named, no similar records are drawn.
    keys += [] if config.columns else ["same", "size"]
    others = () if config.negatives == "own" else ("data.batch",)
    return (*map("task.{}".format, keys), *others)


class ContrastiveConfig(SimilarityConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How vectors of records are learned."""

    kind: Literal["contrastive"] = "contrastive"
    """Which task this is."""
    same: tuple[str, ...] = ()
    """Without columns of references: records with equal values in these columns are similar.
    Empty: project, program, function and part, those that the store has."""
    size: int = 2
    """Without columns of references: similar records of an entry, drawn anew each epoch."""
    pool: Pool = "mean"
    """How the hidden states of a record become its vector, as `tokmill embed` does it; signature: a
    model of sets makes it itself."""


class Contrastive(Task):
    """Compares the records of a step; its evaluation ranks all of its records."""

    Config: ClassVar[type[msgspec.Struct]] = ContrastiveConfig
    compares = True
    collects = True

    def __init__(self, config: Any, model: Model, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        check_types(config, "task")
        self.margin = MARGINS[config.loss] if config.margin is None else config.margin
        if self.pool_of(config) == "signature":
            of_sets(model)

    @classmethod
    def measures(cls, config: Any, inputs: Inputs) -> Measures:
        unit = "nats an entry" if config.loss == "in_batch" else ""
        return Measures(loss=unit, higher=RANKS, decided_by=decided_by(config))

    @classmethod
    def pool_of(cls, config: Any) -> Pool:
        return config.pool

    @classmethod
    def token_store(cls, config: Any, store: Store) -> Store:
        """Return the store that the columns of references name, or the store itself."""
        names = reference_columns(store.schema, config.columns)
        return store.reference(names[0]) if names else store

    @classmethod
    def entry_rows(cls, config: Any) -> int:
        """Return the number of columns, or of the similar records of an entry."""
        return len(config.columns) or (3 if config.loss == "triplet" else config.size)

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """Return rows of one record; those of an entry are compared."""
        return entry_rows(store, self.row_length, self.config, shards, seed, self.own_columns)

    @property
    def own_columns(self) -> tuple[str, ...]:
        """Return the record columns that are read of each row's own record."""
        return ()

    @property
    def row_length(self) -> int:
        return self.length

    def extra_columns(self, schema: Schema) -> list[str]:
        return value_columns(schema, self.config.columns, self.config.group)

    @property
    def target_names(self) -> list[str]:
        """None: what rows are to each other lies in `Batch.values`."""
        return []

    def prepare(self, batch: Batch) -> Batch:
        values = with_relations(batch, self.config.columns, self.config.group)
        return dataclasses.replace(batch, values=values)

    def count(self, batch: Batch) -> int:
        """Return the number of entries with two similar rows."""
        return query_entries(batch.entry, batch.values)

    def example(self, rows: int) -> Tensors:
        batch = super().example(rows)
        number = torch.arange(rows)
        values = {"role": number * 0, "record": number, "group": number}
        return dataclasses.replace(batch, values=values)

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        """Return the vectors, of length 1, and what the rows are to each other."""
        vectors = vector_of(self.model, batch, self.pool_of(self.config))
        return {"vectors": F.normalize(vectors, dim=1), **self.relations_of(batch)}

    def relations_of(self, batch: Tensors) -> dict[str, Tensor]:
        return {name: batch.values[name] for name in RELATIONS}

    def compare(
        self, vectors: Tensor, results: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.similarity_loss(vectors, results)
        return loss, {"loss": loss.detach()}

    def similarity_loss(self, units: Tensor, results: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of vectors of length 1, summed over entries."""
        config, related, cosines = self.config, relations(results), units @ units.T
        if config.negatives == "own":
            related = related._replace(other=related.own)
        asks = related.positive.any(1)
        if config.loss == "in_batch":
            each = in_batch(cosines, related, config.temperature)
        elif config.loss == "circle":
            each = circle(cosines, related, self.margin, config.gamma)
        else:
            each = triplet(cosines, related, self.margin, config.negatives)
            # Only anchors ask for a triplet.
            asks = asks & (results["role"] == ANCHOR)
        return over_entries(each, asks, results["entry"])

    def measure(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """Return ranks of the nearest similar record among all negatives of the evaluation."""
        return rank_metrics(results["vectors"], results)
