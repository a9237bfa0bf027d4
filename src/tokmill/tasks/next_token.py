"""Predict the next token of one column, or of all, from the tokens of all columns so far.

Shapes: B rows, T positions, D width of the model, V ids of the column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokmill.base.errors import UsageError, nearest
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows, Windows
from tokmill.models.heads import Heads
from tokmill.models.model import Group, Model, Tensors
from tokmill.models.model_inputs import Inputs
from tokmill.models.transformers.layers import linear, linear_cross_entropy
from tokmill.store.mask import LOSS
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store
from tokmill.tasks.hidden.framing import affixes_of
from tokmill.tasks.measures import Measures
from tokmill.tasks.scores import BORDER, Scores, token_scores, whole_instructions
from tokmill.tasks.task import Task, perplexity
from tokmill.tasks.task_rows import RowKind, check_cut, cut_rows

END = "eot"
"""The role of the token that ends a document."""
Instruction = Literal["none", "border", "last"]
"""Which second objective predicts the next instruction."""


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
    instruction: Instruction = "none"
    """A second objective, for stores with borders. border: all tokens of the next instruction, from
    the state at its border. last: the tokens of a document's last instruction only, from as many
    states before it."""
    pull: float = 0.0
    """Adds this times the highest logit to its gradient, so that logits stay near 0; RWKV trains
    with 1e-4 (its L2Wrap)."""
    instruction_weight: float = 1.0
    """Weight of a token of the second objective."""


SOURCE, PLACE = "instruction_source", "instruction_place"
"""Targets of the second objective: the position of the state that predicts a token, and the
position of that token; -1: none."""


def targets_of(
    batch: Batch, columns: Iterable[str], skipped: Array, ignored: int = -1
) -> dict[str, Array]:
    """Return the next token of each position of rows of T + 1 tokens: column → (B, T) int64.

    Tokens that are no targets, `skipped` (`nothing_to_learn`), are `ignored`.
    """
    targets = {name: batch.columns[name][:, 1:].astype(np.int64) for name in columns}
    for values in targets.values():
        values[skipped] = ignored
    return targets


def ends_of(roles: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return column → the id that ends a document, of column → role → id."""
    return {name: known[END] for name, known in roles.items() if END in known}


def nothing_to_learn(batch: Batch, ends: Mapping[str, int]) -> Array:
    """Return (B, T) bool: which next tokens of rows of T + 1 tokens are no targets.

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


def instruction_targets(batch: Batch, skipped: Array, kind: Instruction) -> tuple[Array, Array]:
    """Return `SOURCE` and `PLACE`, (B, K) int64 each: K = T, or for "last" as many as a row needs.

    `skipped`: which next tokens are no targets. "border": a token is predicted from the last
    position before its instruction. "last": tokens 0 … n - 1 of a document's last instruction are
    predicted from the n positions before it. Both positions are in the same document.
    """
    document, length = batch.document, batch.document.shape[1]
    place = np.arange(length)
    begins = (batch.columns[BORDER] & 1).astype(bool)
    first = np.maximum.accumulate(np.where(begins, place, -1), axis=1)
    source = first - 1
    if kind == "last":
        new = np.ones(begins.shape, bool)
        new[:, 1:] = document[:, 1:] != document[:, :-1]
        # Where the document and the instruction of each token end.
        ends = [
            np.minimum.accumulate(np.where(mark, place, length)[:, ::-1], axis=1)[:, ::-1]
            for mark in (new, begins | new)
        ]
        of_document, of_instruction = (
            np.pad(end[:, 1:], ((0, 0), (0, 1)), constant_values=length) for end in ends
        )
        source = np.where(of_document == of_instruction, place - (of_instruction - first), -1)
    inside = (first >= 0) & (source >= 0)
    inside &= np.take_along_axis(document, source.clip(min=0), axis=1) == document
    inside = inside[:, 1:] & ~skipped
    place = np.where(inside, place[:-1], -1)
    source = np.where(inside, source[:, 1:], -1)
    if kind == "last":
        # A row has few targets: move them to the front, and cut off the rest.
        order = np.argsort(~inside, axis=1, kind="stable")[:, : max(1, inside.sum(1).max())]
        place, source = (np.take_along_axis(x, order, axis=1) for x in (place, source))
    return source.astype(np.int64), place.astype(np.int64)


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
        self.instruction_heads: Heads | None = None
        if config.instruction != "none":
            self.instruction_heads = Heads(model, self.columns, tied=False)

    @classmethod
    def measures(cls, config: NextTokenConfig, inputs: Inputs) -> Measures:
        """Return the unit of the loss, and whether rows can be continued."""
        count = 1 if config.column else len(inputs.ids)
        unit = "nats a token" if count == 1 else f"nats, sum over {count} columns"
        return Measures(
            loss=unit,
            higher=("accuracy",),
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
        """Return `loss`, if the store has it, and `border` for the second objective.

        Tokens whose `loss` is 0 are no targets.
        """
        extra = [LOSS] if LOSS in schema else []
        if self.instruction_heads is None:
            return extra
        if BORDER not in schema:
            raise UsageError(
                "the store does not say where instructions begin",
                where="task.instruction",
                hint='it is for stores of programs; --set task.instruction="none"',
            )
        return [*extra, BORDER]

    def predicts_first(self, store: Store) -> bool:
        """Say whether the end of the document before it predicts the first token of a record."""
        end = self.ends.get(self.column)
        return end is not None and affixes_of(store)[1][self.column][-1:] == [end]

    @property
    def target_names(self) -> list[str]:
        return [*self.columns, *([] if self.instruction_heads is None else [SOURCE, PLACE])]

    def prepare(self, batch: Batch) -> Batch:
        """Cut rows of T + 1 tokens into inputs and targets, (B, T) each."""
        skipped = nothing_to_learn(batch, self.ends)
        targets = targets_of(batch, self.columns, skipped)
        if self.instruction_heads is not None:
            kind = self.config.instruction
            targets[SOURCE], targets[PLACE] = instruction_targets(batch, skipped, kind)
        columns = {name: batch.columns[name][:, :-1].astype(np.int64) for name in self.sizes}
        return Batch(
            columns, batch.document[:, :-1], batch.key, batch.values, targets, entry=batch.entry
        )

    def count(self, batch: Batch) -> int:
        """Return the number of next tokens; a token of several columns counts once."""
        return int(np.count_nonzero(batch.targets[self.column] >= 0))

    def head(self, column: str) -> Tensor:
        """Return the head (V, D) of a column."""
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
            )
            for name in self.columns
        }
        return self.summed(parts, hidden_BTD, batch)

    def summed(
        self, parts: Mapping[str, Tensor], hidden_BTD: Tensor, batch: Tensors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and sums of `forward`, from the summed cross-entropy of each column."""
        loss = torch.stack(list(parts.values())).sum()
        sums = {f"loss_{name}": part.detach() for name, part in parts.items()}
        if len(parts) == 1:
            sums = {}
        if self.instruction_heads is not None:
            second = self.instruction_loss(hidden_BTD, batch, self.instruction_heads)
            sums["loss_instruction"] = second.detach()
            loss = loss + self.config.instruction_weight * second
        return loss, {"loss": loss.detach(), **sums}

    def scored(self, batch: Tensors) -> tuple[dict[str, Tensor], dict[str, Scores]]:
        """Return the sums of `forward`, and the scores of each column's next tokens."""
        hidden_BTD = self.model(batch)
        scores = {
            name: token_scores(hidden_BTD, self.heads.weight(self.model, name), batch.targets[name])
            for name in self.columns
        }
        parts = {name: score.loss.sum() for name, score in scores.items()}
        return self.summed(parts, hidden_BTD, batch)[1], scores

    def whole_units(self, raw: Batch, batch: Batch) -> Array | None:
        begins = (raw.columns[BORDER] & 1).astype(bool)
        return whole_instructions(raw, begins, batch.targets[self.column] >= 0)

    def instruction_loss(self, hidden_BTD: Tensor, batch: Tensors, heads: Heads) -> Tensor:
        """Return the summed cross-entropy of the second objective, from the same states."""
        source_BK, place_BK = batch.targets[SOURCE], batch.targets[PLACE].clamp(min=0)
        which = source_BK.clamp(min=0)[..., None].expand(-1, -1, hidden_BTD.shape[-1])
        states_BKD = hidden_BTD.gather(1, which)
        parts = []
        for name in self.columns:
            targets_BK = batch.targets[name].gather(1, place_BK).masked_fill(source_BK < 0, -1)
            weight = heads.weight(self.model, name)
            parts.append(linear_cross_entropy(states_BKD, weight, targets_BK))
        return torch.stack(parts).sum()

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        """Return the loss in nats per token, over all columns and the second objective.

        With one column and one objective also perplexity, and bits per byte if they are known.
        """
        metrics = super().report(sums, count)
        if len(metrics) == 1:
            metrics["perplexity"] = perplexity(metrics["loss"])
            if bytes_per_token > 0:
                metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / bytes_per_token
        return metrics

    def param_groups(self, weight_decay: float) -> list[Group]:
        """Return the groups of the model and of the heads that are not tied."""
        groups = super().param_groups(weight_decay) + self.heads.param_groups(weight_decay)
        if self.instruction_heads is not None:
            groups += self.instruction_heads.param_groups(weight_decay)
        return groups

    def flops_per_token(self, length: int) -> float:
        """Return the operations of the model, plus 6 · D · V for each head."""
        heads = 1 if self.instruction_heads is None else 2
        ids = heads * sum(self.columns.values())
        return super().flops_per_token(length) + 6.0 * self.model.dim * ids
