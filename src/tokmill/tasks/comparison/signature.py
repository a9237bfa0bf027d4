"""Signatures of intervals: vectors of weighted sets of blocks, in which similar intervals are near.

Shapes: B rows, T blocks of an interval, W width of a block's vector, N rows of a step, D width of
the signature.

After SemanticBBV (arXiv 2512.10231): a loss of likeness, a Huber loss of the logarithm of the
cycles an instruction (CPI), and a loss of consistency, which is the distance of similar intervals
times the difference of their CPI.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tokmill.base.errors import UsageError, nearest
from tokmill.base.recipe import Amount
from tokmill.feed.entries import Vectors
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows, Whole
from tokmill.models.heads import Pool, of_sets
from tokmill.models.model import WEIGHT, Group, Inputs, Model, Tensors, decay_groups
from tokmill.models.transformers.layers import Linear
from tokmill.store.overlay import overlay_names
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store
from tokmill.tasks.comparison.comparison_losses import (
    has_positives,
    mean_where,
    over_entries,
    relations,
)
from tokmill.tasks.comparison.contrastive import (
    RANKS,
    Contrastive,
    Margin,
    SimilarityConfig,
    decided_by,
)
from tokmill.tasks.measures import Measures
from tokmill.tasks.task_inputs import Facts

VECTOR = "vector"
"""The input of the model that holds the vectors of the blocks."""
LOG_CPI = "log_cpi"
"""A value of each row, NaN where it is not known."""
IMPORTED = {"block": VECTOR, "count": "weight"}
"""Columns of blocks and weights → those of imported intervals (`tokmill build triplets`)."""


class SignatureConfig(SimilarityConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How signatures of intervals are learned."""

    kind: Literal["signature"] = "signature"
    """Which task this is."""
    length: int = 512
    """Blocks of an interval that the model sees while training: those with the largest weights."""
    most: int = 4096
    """Blocks of an interval that are read; what is beyond is cut off while training."""
    loss: Literal["in_batch", "triplet", "circle"] = "triplet"
    """How similar intervals are told from others."""
    margin: Margin | None = 0.45
    """Margin of triplet or circle."""
    block: str = "block"
    """Column of references, a value a token: the blocks of an interval; or of their vectors. Where
    there is no `block`, `vector` is taken, and `weight` where there is no `count`."""
    overlay: str = ""
    """Overlay of the store of blocks with their vectors; empty: the only one that has them."""
    vector: str = "embedding"
    """Column of that overlay."""
    weight: str = "count"
    """Column of numbers, a value a token: how often a block was executed, or for how many
    instructions; empty: all blocks weigh the same."""
    cpi: str = "cpi"
    """Record column: the CPI of an interval, NaN where it is not known; empty: none is learned."""
    same: tuple[str, ...] = ()
    """Without columns of references: intervals with equal values in these columns are similar."""
    size: int = 2
    """With `same`: similar intervals of an entry."""
    likeness_weight: Amount = 1.0
    """Weight of the loss of likeness; 0: signatures are learned from the CPI alone."""
    cpi_weight: Amount = 0.01
    """Weight of the Huber loss of log CPI."""
    consistency_weight: Amount = 0.01
    """Weight of the loss of consistency."""


class Signature(Contrastive):
    """Compares the signatures of intervals, and predicts their CPI."""

    Config: ClassVar[type[msgspec.Struct]] = SignatureConfig
    places_by_value = True

    def __init__(self, config: SignatureConfig, model: Model, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        of_sets(model)
        self.cpi_head: Linear | None = Linear(model.dim, 1) if config.cpi else None

    @classmethod
    def pool_of(cls, config: Any) -> Pool:
        return "signature"

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        return Inputs(vectors={**facts.vectors, **({WEIGHT: 1} if config.weight else {})})

    @classmethod
    def measures(cls, config: Any, inputs: Inputs) -> Measures:
        likeness = decided_by(config) if config.likeness_weight else ()
        cpi = ("task.cpi", "task.cpi_weight") if config.cpi else ("task.cpi",)
        weights = ("task.likeness_weight", *cpi, "task.consistency_weight")
        return Measures(higher=RANKS, decided_by=(*likeness, *weights))

    @classmethod
    def vectors(cls, config: Any, store: Store) -> dict[str, Vectors]:
        tokens = cls.token_store(config, store)
        block = column_in(config.block, tokens.schema)
        if block in tokens.schema and tokens.schema[block].width:
            return {VECTOR: Vectors(block, tokens, block)}
        return {
            VECTOR: Vectors(block, with_vectors(tokens.reference(block), config), config.vector)
        }

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        if has_positives(store.schema, self.config.columns, self.config.same):
            return super().rows(store, seed, shards)
        if self.config.likeness_weight:
            raise UsageError(
                "the similar intervals are unknown: there are no reference columns such "
                "as anchor, positive and negative",
                where=str(store.path),
                hint="`tokmill build mine` makes them; --set task.likeness_weight=0 learns the CPI "
                "alone",
            )
        return Whole(store, self.row_length, shards=shards, seed=seed)

    @property
    def own_columns(self) -> tuple[str, ...]:
        return (self.config.cpi,) if self.config.cpi else ()

    @property
    def row_length(self) -> int:
        return max(self.length, int(self.config.most))

    def evaluation_rows(self, store: Store) -> Rows:
        """Return the same; a store without columns of references is evaluated on its CPI alone."""
        has_relations = has_positives(store.schema, self.config.columns, self.config.same)
        return self.rows(store) if has_relations else Whole(store, self.row_length)

    def extra_columns(self, schema: Schema) -> list[str]:
        config = self.config
        keys = {"block": "token", "weight": "token", "cpi": "record"}
        names = {k: column_in(getattr(config, k), schema) for k in keys if getattr(config, k)}
        for key, name in names.items():
            column = schema.get(name)
            if column is None or column.per != keys[key] or column.dtype == "utf8":
                usable = [n for n, c in schema.items() if c.per == keys[key] and c.dtype != "utf8"]
                raise UsageError(
                    f"the store has no column {name!r} with a number for each "
                    + ("block" if keys[key] == "token" else "interval"),
                    where=f"task.{key}",
                    hint=nearest(name, usable, f"--set 'task.{key}=\"\"' does without"),
                )
        return [*super().extra_columns(schema), *names.values()]

    def as_inputs(self, columns: Mapping[str, Array], document: Array) -> dict[str, Array]:
        """Return the vectors and the weights of rows, as shares of each row."""
        inputs = {VECTOR: columns[VECTOR]}
        if self.config.weight:
            weight = columns[column_in(self.config.weight, columns)].astype(np.float64)
            weight[(document < 0) | ~(weight > 0)] = 0
            share = weight / np.maximum(weight.sum(1, keepdims=True), 1e-300)
            inputs[WEIGHT] = share.astype(np.float32)[..., None]
        return inputs

    def placed(self, batch: Batch) -> Batch:
        own = {name: value for name, value in batch.columns.items() if name != WEIGHT}
        inputs = self.as_inputs(batch.columns, batch.document)
        columns, document = heaviest({**own, **inputs}, batch.document, self.length)
        return dataclasses.replace(batch, columns=columns, document=document)

    def prepare(self, batch: Batch) -> Batch:
        """Take the heaviest blocks of each row, and add the CPI and what rows are to each other."""
        inputs = self.as_inputs(batch.columns, batch.document)
        columns, document = heaviest(inputs, batch.document, self.length)
        batch = super().prepare(dataclasses.replace(batch, columns=columns, document=document))
        values = dict(batch.values)
        if self.config.cpi:
            cpi = values.pop(self.config.cpi).astype(np.float64)
            measured = np.isfinite(cpi) & (cpi > 0)
            log = np.where(measured, np.log(np.where(measured, cpi, 1)), np.nan)
            values[LOG_CPI] = log.astype(np.float32)
        return dataclasses.replace(batch, values=values)

    def count(self, batch: Batch) -> int:
        return len(np.unique(batch.entry[batch.entry >= 0]))

    def example(self, rows: int) -> Tensors:
        batch = super().example(rows)
        values = {LOG_CPI: torch.zeros(rows)} if self.config.cpi else {}
        return dataclasses.replace(batch, values={**batch.values, **values})

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        """Return the signatures, of length 1, with the predicted log CPI behind each."""
        results = self.relations_of(batch)
        vectors = of_sets(self.model).signature(batch).float()
        units = F.normalize(vectors, dim=1)
        if self.cpi_head is not None:
            units = torch.cat([units, self.cpi_head(vectors).float()], 1)
            results[LOG_CPI] = batch.values[LOG_CPI]
        return {"vectors": units, **results}

    def compare(
        self, vectors: Tensor, results: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, units = self.config, vectors[:, : self.model.dim]
        parts = {"loss_likeness": (config.likeness_weight, self.similarity_loss(units, results))}
        if self.cpi_head is not None:
            entry, log_cpi = results["entry"], results[LOG_CPI]
            measured = ~log_cpi.isnan()
            log_cpi = log_cpi.nan_to_num()
            error = F.huber_loss(vectors[:, -1], log_cpi, reduction="none")
            parts["loss_cpi"] = config.cpi_weight, over_entries(error, measured, entry)
            positives = relations(results).positive & measured & measured[:, None]
            cpi = log_cpi.exp()
            apart = (1 - units @ units.T) * (cpi - cpi[:, None]).abs()
            apart_N = mean_where(apart, positives)
            consistency = over_entries(apart_N, positives.any(1), entry)
            parts["loss_consistency"] = config.consistency_weight, consistency
        loss = torch.stack([weight * part for weight, part in parts.values()]).sum()
        return loss, {
            "loss": loss.detach(),
            **{name: part.detach() for name, (_, part) in parts.items()},
        }

    def measure(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        vectors = results["vectors"]
        metrics = super().measure({**results, "vectors": vectors[:, : self.model.dim]})
        if self.cpi_head is None:
            return metrics
        log_cpi = results[LOG_CPI].double()
        measured = ~log_cpi.isnan()
        if not measured.any():
            return metrics
        cpi, predicted = log_cpi[measured].exp(), vectors[measured, -1].double().exp()
        return metrics | {
            "cpi_error": float(((predicted - cpi).abs() / cpi).mean()),
            "cpi_error_constant": float(((cpi.quantile(0.5) - cpi).abs() / cpi).mean()),
        }

    def param_groups(self, weight_decay: float) -> list[Group]:
        own = [] if self.cpi_head is None else self.cpi_head.parameters()
        return super().param_groups(weight_decay) + decay_groups(own, weight_decay)


def column_in(name: str, columns: Collection[str]) -> str:
    """Return a column, or that of imported intervals which takes its place."""
    other = IMPORTED.get(name, name)
    return name if name in columns or other not in columns else other


def heaviest(
    columns: Mapping[str, Array], document: Array, length: int
) -> tuple[dict[str, Array], Array]:
    """Return rows of their `length` heaviest positions, in falling order, or rows as they are.

    Without weights the first positions are taken.
    """
    if document.shape[1] <= length:
        return dict(columns), document
    weight = columns[WEIGHT][..., 0] if WEIGHT in columns else np.zeros(document.shape, np.float32)
    order = np.argsort(-np.where(document >= 0, weight, -1), axis=1, kind="stable")[:, :length]
    rows = np.arange(len(document))[:, None]
    return {name: value[rows, order] for name, value in columns.items()}, document[rows, order]


def with_vectors(blocks: Store, config: Any) -> Store:
    """Return a store of blocks with the overlay that holds their vectors."""
    names = [config.overlay] if config.overlay else overlay_names(blocks.path)
    stores = [one for name in names if config.vector in (one := Store(blocks.path, [name])).schema]
    if len(stores) == 1:
        return stores[0]
    if stores:
        several = ", ".join(name for one in stores for name in one.overlays)
        raise UsageError(
            f"several overlays of the store of blocks have a column {config.vector!r}: {several}",
            where=str(blocks.path),
            hint="--set task.overlay=NAME says which",
        )
    if config.overlay:
        what = f"the overlay {config.overlay!r} of the store of blocks has no"
    else:
        what = "no overlay of the store of blocks has a"
    raise UsageError(
        f"{what} column {config.vector!r}",
        where=str(blocks.path),
        hint="`tokmill embed RUN BLOCKS` makes the vectors of blocks",
    )
