"""Predict the next token of one column, or of all, from the tokens of all columns so far.

Shapes: B rows, T positions, D width of the model, V ids of the column.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokmill.base.errors import UsageError, nearest
from tokmill.base.recipe import Amount
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows, Windows
from tokmill.models.heads import Heads
from tokmill.models.model import Group, Inputs, Model, Tensors
from tokmill.models.transformers.layers import Scores, linear, linear_cross_entropy, token_scores
from tokmill.store.overlay import LOSS
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store
from tokmill.tasks.measures import Measures
from tokmill.tasks.task import Task, perplexity
from tokmill.tasks.task_inputs import RowKind, affixes_of, check_cut, cut_rows, lossy_step_of

END, UNKNOWN = "eot", "unk"
"""The roles of the token that ends a document, and of the one for what a vocabulary lacks."""


class NextTokenConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the next token is learned."""

    kind: Literal["next_token"] = "next_token"
    """Which task this is."""
    length: int = 128
    """Positions T of a row; a row reads one token more, as targets are one ahead."""
    rows: RowKind = "windows"
    """windows: of all records end to end; stream: that begin anywhere; packed: whole documents side
    by side; whole: one record per row."""
    step: int = 0
    """Tokens from one window to the next; 0: `length`. A token in two windows is a target once."""
    column: str = ""
    """The column to predict; empty: all that the model reads, each with its own head."""
    tied: bool = True
    """Whether the head of a column is its embedding."""
    pull: Amount = 0.0
    """Adds this times the highest logit to its gradient, so that logits stay near 0; RWKV trains
    with 1e-4 (its L2Wrap)."""


def targets_of(
    batch: Batch, columns: Iterable[str], skipped: Array, ignored: int = -1
) -> dict[str, Array]:
    """Return the next token of each position of rows of T + 1 tokens: column → (B, T) int64.

    Tokens that are not targets, `skipped` (`nothing_to_learn`), are `ignored`.
    """
    targets = {name: batch.columns[name][:, 1:].astype(np.int64) for name in columns}
    for values in targets.values():
        values[skipped] = ignored
    return targets


def ends_of(roles: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return column → the id that ends a document, of column → role → id."""
    return {name: ids[END] for name, ids in roles.items() if END in ids}


def nothing_to_learn(batch: Batch, ends: Mapping[str, int]) -> Array:
    """Return (B, T) bool: which next tokens of rows of T + 1 tokens are not targets.

    These are padding; the first token of a new document, unless the token before it ends a
    document (`ends`: column → id), which is all that predicts it; the first token of the rest of a
    document; tokens that are targets of another row; and tokens whose `loss` is 0.
    """
    here, ahead = batch.document[:, :-1], batch.document[:, 1:]
    skipped: Array = here != ahead
    for name, end in ends.items():
        skipped &= (batch.columns[name][:, :-1] != end) | (ahead > here + 1)
    # Rows are filled from the left: a row without padding at its end has none.
    if (ahead[:, -1] < 0).any():
        skipped |= ahead < 0
    if batch.shared.max(initial=0) > 1:
        skipped |= np.arange(1, batch.document.shape[1]) < batch.shared[:, None]
    if LOSS in batch.columns:
        skipped |= batch.columns[LOSS][:, 1:] == 0
    return skipped


def choose_column(column: str, sizes: Mapping[str, int], where: str = "") -> str:
    """Return the column to predict: the named one, or the only one of `sizes`."""
    if column and column not in sizes:
        raise UsageError(
            f"the store has no token column {column!r}",
            where=f"{where}column",
            hint=nearest(
                column,
                sizes,
                f"it has {', '.join(sizes)}: is the recipe for another kind of store?",
            ),
        )
    if not column and len(sizes) != 1:
        raise UsageError(
            "the column to predict is not clear", where=f"{where}column", hint=nearest("", sizes)
        )
    return column or next(iter(sizes))


class NextToken(Task):
    """Causal language modelling; the model must not look ahead."""

    Config = NextTokenConfig
    predicts_tokens = True

    def __init__(self, config: NextTokenConfig, model: Model, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        sizes = self.sizes
        if not model.causal:
            raise UsageError(
                "a model that looks ahead sees the token that it has to predict",
                where="model.kind",
                hint="the task next_token takes causal models, such as decoder and rwkv7",
            )
        check_cut(config.rows, config.length, config.step, "task.")
        self.config: NextTokenConfig = config
        if config.column:
            choose_column(config.column, sizes, "task.")
        self.columns = {config.column: sizes[config.column]} if config.column else dict(sizes)
        """The predicted columns → the number of their ids."""
        self.ends = {n: end for n, end in ends_of(inputs.roles).items() if n == self.column}
        self.heads = Heads(model, self.columns, config.tied)

    @classmethod
    def measures(cls, config: NextTokenConfig, inputs: Inputs) -> Measures:
        count = 1 if config.column else len(inputs.ids)
        unit = "nats per token" if count == 1 else f"nats, sum over {count} columns"
        return Measures(
            loss=unit,
            higher=("accuracy",),
            decided_by=("task.column",),
            continues=not config.column or list(inputs.ids) == [config.column],
        )

    @property
    def column(self) -> str:
        """The predicted column; of several the first."""
        return next(iter(self.columns))

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """Return rows of T + 1 tokens, cut as the recipe says."""
        return cut_rows(store, self.config.rows, self.length + 1, self.config.step, seed, shards)

    def evaluation_rows(self, store: Store) -> Rows:
        return Windows(store, self.length + 1, self.config.step or self.length)

    def extra_columns(self, schema: Schema) -> list[str]:
        """Return `loss`, if the store has it: tokens whose `loss` is 0 are not targets."""
        return [LOSS] if LOSS in schema else []

    def predicts_first(self, store: Store) -> bool:
        """Say whether the end of the document before it predicts the first token of a record."""
        end = self.ends.get(self.column)
        return end is not None and affixes_of(store)[1][self.column][-1:] == [end]

    def loses_text(self, store: Store) -> str:
        unknown = self.reads.roles.get(self.column, {}).get(UNKNOWN)
        if unknown is not None and store.has_value(self.column, unknown):
            return "words that the vocabulary lacks are one token"
        step = lossy_step_of(store, self.column)
        return f"different texts have the same tokens (the tokenizer's step {step})" if step else ""

    @property
    def target_names(self) -> list[str]:
        return list(self.columns)

    def prepare(self, batch: Batch) -> Batch:
        """Cut rows of T + 1 tokens into inputs and targets, (B, T) each."""
        skipped = nothing_to_learn(batch, self.ends)
        targets = targets_of(batch, self.columns, skipped)
        columns = {name: batch.columns[name][:, :-1].astype(np.int64) for name in self.sizes}
        return Batch(
            columns, batch.document[:, :-1], batch.key, batch.values, targets, entry=batch.entry
        )

    def count(self, batch: Batch) -> int:
        """Return the number of next tokens; a token of several columns counts once."""
        return int(np.count_nonzero(batch.targets[self.column] >= 0))

    def head(self, column: str) -> Tensor:
        return self.heads.weight(self.model, column)

    def logits(self, hidden_BTD: Tensor, column: str = "") -> Tensor:
        """Return (…, V) of a column (the first one) from hidden states (…, D)."""
        return linear(hidden_BTD, self.heads.weight(self.model, column or self.column))

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed cross-entropy in nats, as the loss and as sums to report."""
        hidden_BTD = self.model(batch)
        parts = {
            name: linear_cross_entropy(
                hidden_BTD,
                self.heads.weight(self.model, name),
                batch.targets[name],
                self.config.pull,
                compiled=self.model.compiled,
            )
            for name in self.columns
        }
        return self.summed(parts)

    def summed(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and sums of `forward`, from the summed cross-entropy of each column."""
        loss = torch.stack(list(parts.values())).sum()
        sums = {"loss": loss.detach()}
        if len(parts) > 1:
            sums |= {f"loss_{name}": part.detach() for name, part in parts.items()}
        return loss, sums

    def scored(self, batch: Tensors) -> tuple[dict[str, Tensor], dict[str, Scores]]:
        """Return the sums of `forward`, and the scores of each column's next tokens."""
        hidden_BTD = self.model(batch)
        scores = {
            name: token_scores(hidden_BTD, self.heads.weight(self.model, name), batch.targets[name])
            for name in self.columns
        }
        parts = {name: score.loss.sum() for name, score in scores.items()}
        return self.summed(parts)[1], scores

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        """Return the loss in nats per token, over all columns.

        With one column also perplexity, and bits per byte if they are known.
        """
        metrics = super().report(sums, count)
        if len(metrics) == 1:
            metrics["perplexity"] = perplexity(metrics["loss"])
            if bytes_per_token > 0:
                metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / bytes_per_token
        return metrics

    def param_groups(self, weight_decay: float) -> list[Group]:
        return super().param_groups(weight_decay) + self.heads.param_groups(weight_decay)

    def flops_per_token(self, length: int) -> float:
        """Return the operations of the model, plus 6 · D · V for each head."""
        return super().flops_per_token(length) + 6.0 * self.model.dim * sum(self.columns.values())
