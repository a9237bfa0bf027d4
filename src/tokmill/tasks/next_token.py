"""Predict the next token of one column from all columns up to here.

Shapes: B rows, T positions, D width of the model, V ids of the column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec
import numpy as np
from torch import Tensor, nn

from tokmill.errors import UsageError, nearest
from tokmill.feed.feed import Batch
from tokmill.feed.packed import Packed
from tokmill.feed.rows import Rows, Stream, Whole, Windows
from tokmill.models.layers import linear, linear_cross_entropy
from tokmill.models.model import Group, Model, Tensors, decay_groups
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store
from tokmill.tasks.task import Task, perplexity

RowKind = Literal["windows", "stream", "packed", "whole"]
"""How a store is cut into rows."""


class NextTokenConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the next token is learned."""

    kind: Literal["next_token"] = "next_token"
    """Which task this is."""
    length: int = 128
    """Positions T of a row; a row reads one token more, as targets are one ahead."""
    rows: RowKind = "windows"
    """windows: of all records end to end; stream: that begin anywhere; packed: whole documents side
    by side; whole: one record a row."""
    step: int = 0
    """Tokens from one window to the next; 0: `length`. What two share is a target once."""
    column: str = ""
    """The column to predict; may be left out where the store has one."""
    tied: bool = True
    """Whether the head is the column's embedding."""


LOSS = "loss"
"""The column that says which tokens are learned: 0 for those that are only read."""


def targets_of(batch: Batch, column: str) -> Array:
    """Return the next token of each position, (B, T) int64, from rows of T + 1 tokens.

    It is -1 where there is nothing to learn: at padding; where a new document begins, as what is in
    front says nothing about it; where another row counts the token; and where `loss` is 0.
    """
    here, ahead = batch.document[:, :-1], batch.document[:, 1:]
    skipped = here != ahead
    # Rows are filled from the left: without padding at the end of a row there is none.
    if (ahead[:, -1] < 0).any():
        skipped |= ahead < 0
    if batch.shared.max(initial=0) > 1:
        skipped |= np.arange(1, batch.document.shape[1]) < batch.shared[:, None]
    if LOSS in batch.columns:
        skipped |= batch.columns[LOSS][:, 1:] == 0
    targets = batch.columns[column][:, 1:].astype(np.int64)
    targets[skipped] = -1
    return targets


def check_cut(kind: RowKind, length: int, step: int, where: str = "") -> None:
    """Refuse rows of `length` positions, every `step` tokens, that cannot be or lose tokens."""
    if kind not in get_args(RowKind):
        raise UsageError(
            f"rows cannot be cut as {kind!r}",
            where=f"{where}rows",
            hint=nearest(kind, get_args(RowKind)),
        )
    if length < 1:
        raise UsageError("a row needs at least one position", where=f"{where}length")
    if step and kind != "windows":
        raise UsageError(
            f"{kind} rows take no step", where=f"{where}step", hint='step is for rows = "windows"'
        )
    if not 0 <= step <= length:
        raise UsageError(
            f"windows of {length} targets cannot come every {step} tokens",
            where=f"{where}step",
            hint=f"1 to {length}: with more, tokens would never be learned",
        )


def cut_rows(
    store: Store, kind: RowKind, length: int, step: int = 0, seed: int = 0, shards: int = 0
) -> Rows:
    """Return rows of `length` tokens.

    What is cut shares one token with its neighbour (a `step` of 0 is `length` - 1): the last target
    of one is the next one's first input. `shards`: so many are mixed at a time; 0: all.
    """
    if kind == "stream":
        if shards:
            raise UsageError(
                "rows that begin anywhere cannot be mixed a few shards at a time",
                where="data.shards",
                hint='--set task.rows="windows", or --set data.shards=0',
            )
        return Stream(store, length, seed)
    if kind == "packed":
        return Packed(store, length, overlap=1, shards=shards, seed=seed)
    if kind == "whole":
        return Whole(store, length, shards=shards, seed=seed)
    return Windows(store, length, step or length - 1, shards=shards, seed=seed)


def choose_column(column: str, sizes: Mapping[str, int], where: str = "") -> str:
    """Return the column to predict: the one that is named, or the only one of `sizes`."""
    chosen = column or next(iter(sizes), "")
    if chosen not in sizes or (not column and len(sizes) > 1):
        raise UsageError(
            f"the column to predict is not clear: {column!r}",
            where=f"{where}column",
            hint=nearest(column, sizes),
        )
    return chosen


class NextToken(Task):
    """Causal language modelling; the model must not look ahead."""

    Config = NextTokenConfig

    def __init__(self, config: NextTokenConfig, model: Model, sizes: Mapping[str, int]) -> None:
        super().__init__(config, model, sizes)
        check_cut(config.rows, config.length, config.step, "task.")
        self.config = config
        self.column = choose_column(config.column, sizes, "task.")
        self.head: nn.Linear | None = None
        if not config.tied:
            self.head = nn.Linear(model.dim, sizes[self.column], bias=False)
            nn.init.normal_(self.head.weight, std=0.02)

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """Return rows of T + 1 tokens, as the recipe asks."""
        return cut_rows(store, self.config.rows, self.length + 1, self.config.step, seed, shards)

    def evaluation_rows(self, store: Store) -> Rows:
        """Return windows, so that losses can be compared however a run cut its rows."""
        return Windows(store, self.length + 1, self.config.step or self.length)

    def extra_columns(self, schema: Schema) -> list[str]:
        """Return the column `loss`, where a store has one: tokens with a 0 are no targets."""
        return [LOSS] if LOSS in schema and schema[LOSS].per == "token" else []

    def prepare(self, batch: Batch) -> Batch:
        """Cut rows of T + 1 tokens into inputs and targets, (B, T) each."""
        targets = targets_of(batch, self.column)
        columns = {name: batch.columns[name][:, :-1].astype(np.int64) for name in self.sizes}
        here = batch.document[:, :-1]
        return Batch(columns, here, batch.key, batch.values, {self.column: targets})

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return (…, V) from hidden states (…, D)."""
        return linear(hidden_BTD, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """The head (V, D)."""
        return self.model.embedding(self.column) if self.head is None else self.head.weight

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed cross-entropy in nats, as the loss and as a sum to report."""
        targets_BT = batch.targets[self.column]
        loss = linear_cross_entropy(self.model(batch), self.head_weight, targets_BT)
        return loss, {"loss": loss.detach()}

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        """Return loss (nats a token), perplexity, and bits a byte where bytes are known."""
        metrics = super().report(sums, count)
        metrics["perplexity"] = perplexity(metrics["loss"])
        if bytes_per_token > 0:
            metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / bytes_per_token
        return metrics

    def param_groups(self, weight_decay: float) -> list[Group]:
        """Return the groups of the model, and of the head where it is not tied."""
        groups = super().param_groups(weight_decay)
        return groups + (decay_groups(self.head.parameters(), weight_decay) if self.head else [])

    def flops_per_token(self, length: int) -> float:
        """Return those of the model, and 6 · D · V for the head."""
        return super().flops_per_token(length) + 6.0 * self.model.dim * self.sizes[self.column]
