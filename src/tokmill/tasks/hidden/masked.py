"""Predict hidden tokens from both sides: masked language modelling (Devlin et al. 2018, BERT).

The first part draws what is hidden; the task follows.

Shapes: B rows, T positions, M positions that are predicted in the row that has most of them, D
width of the model, V ids of a column.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokmill.base.errors import UsageError
from tokmill.base.recipe import Natural, Share, check_types
from tokmill.feed.feed import Batch
from tokmill.feed.order import key
from tokmill.feed.rows import Rows, Whole, Windows
from tokmill.models.heads import Heads, Transform
from tokmill.models.model import Group, Inputs, Model, Tensors, predicted
from tokmill.models.transformers.layers import Scores, token_scores
from tokmill.store.overlay import LOSS
from tokmill.store.schema import Array, Schema
from tokmill.store.store import Store
from tokmill.tasks.measures import Measures
from tokmill.tasks.next_token import UNKNOWN, choose_column
from tokmill.tasks.task import Task, perplexity
from tokmill.tasks.task_inputs import (
    Facts,
    Frame,
    RowKind,
    check_cut,
    check_room,
    cut_rows,
    frame_of,
    framed,
    is_framed,
    store_inputs,
)


class HiddenConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which tokens are hidden, and which columns of them are predicted."""

    length: int = 128
    """Positions T of a row, including special tokens."""
    columns: tuple[str, ...] = ()
    """The columns to predict; empty: all that the model reads. All are hidden together."""
    share: Share = 0.15
    """Share of the tokens that are hidden; rounded in each row, at least one token."""
    most: Natural = 0
    """Most hidden tokens of a row; 0: no limit."""
    mask_share: Share = 0.8
    """Share of the hidden tokens that become [MASK]."""
    random_share: Share = 0.1
    """Share of the hidden tokens that become a random token; the others stay as they are."""
    tied: bool = True
    """Whether the head of a column is its embedding."""


HIDES = ("task.columns", "task.share", "task.most", "task.mask_share", "task.random_share")
"""Keys that decide which tokens are predicted, and what the model sees of them."""


class MaskedConfig(HiddenConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How hidden tokens are learned."""

    kind: Literal["masked"] = "masked"
    """Which task this is."""
    rows: RowKind = "windows"
    """windows: of all records end to end; stream: that begin anywhere; packed: whole documents side
    by side; whole: one record per row, between [CLS] and [SEP] where the vocabulary has them."""
    step: int = 0
    """Tokens from one window to the next; 0: `length`."""
    segment: bool | Literal["always"] = True
    """Whether the model reads the segment of each token, if the store has it; always: if it has
    none too, and then all tokens are in the first segment."""


def check_shares(config: HiddenConfig) -> None:
    """Refuse shares that hide nothing or are not from 0 to 1."""
    check_types(config, "task")
    if not config.share:
        raise UsageError(
            "no token is hidden, so there is nothing to learn",
            where="task.share",
            hint="--set task.share=0.15",
        )
    shown = config.mask_share + config.random_share
    if not shown or shown > 1 + 1e-9:
        raise UsageError(
            f"{config.mask_share} and {config.random_share} are more than all hidden tokens"
            if shown
            else "all hidden tokens stay as they are, so the model sees what it has to predict",
            where="task.mask_share",
            hint="--set task.mask_share=0.8 --set task.random_share=0.1",
        )


CHOICE, ACTION, REPLACEMENT = 0, 1, 2
"""What a hash decides: which tokens are hidden, how they are replaced, and by which random token.
"""
LAST = np.iinfo(np.uint64).max


def wanted(maskable_BT: Array, share: float, most: int = 0) -> Array:
    """Return the number of hidden tokens of each row, (B,) int64.

    It is `share` of the maskable tokens, rounded (a half to the even number), at least 1, and at
    most `most` unless that is 0; it is 0 in a row without maskable tokens. BERT rounds in the same
    way, but takes the share of all tokens with special ones. The number is exact: tokens are not
    drawn one by one.
    """
    there = maskable_BT.sum(1)
    count = np.maximum(np.rint(share * there), 1).astype(np.int64)
    if most:
        count = np.minimum(count, most)
    return np.where(there > 0, np.minimum(count, there), 0)


def choose(keys_B: Array, maskable_BT: Array, count_B: Array) -> Array:
    """Return which tokens are hidden, (B, T) bool.

    Args:
        maskable_BT: bool, which tokens may be hidden.
        count_B: the number of tokens to hide in each row (`wanted`).
    """
    places = np.arange(maskable_BT.shape[1], dtype=np.uint64)
    scores = key(keys_B[:, None], places, CHOICE)
    order = np.argsort(np.where(maskable_BT, scores, LAST), axis=1, kind="stable")
    first = np.arange(maskable_BT.shape[1]) < count_B[:, None]
    chosen = np.zeros(maskable_BT.shape, bool)
    np.put_along_axis(chosen, order, first, axis=1)
    return chosen & maskable_BT


def replaced(
    ids_BT: Array,
    chosen_BT: Array,
    keys_B: Array,
    *,
    column: int,
    mask: int,
    size: int,
    specials: Collection[int],
    shares: tuple[float, float],
) -> Array:
    """Return the ids that the model sees, (B, T) int64.

    Args:
        ids_BT: the ids of a column, int64.
        chosen_BT: which tokens are hidden.
        column: number of the column. At a position all columns get their mask, or all a random id,
            or all stay as they are; each column draws its own random id.
        specials: ids that are never drawn as a random id.
        shares: the shares of hidden tokens that become `mask` and that become a random id; the
            others stay. Each token is drawn by itself.
    """
    row, place = np.nonzero(chosen_BT)
    keys, places = keys_B[row], place.astype(np.uint64)
    drawn = (key(keys, places, ACTION) >> np.uint64(11)) * 2.0**-53
    seen, here = ids_BT.copy(), ids_BT[row, place]
    excluded = sorted(one for one in set(specials) if one < size)
    count = size - len(excluded)
    if shares[1] and count > 0:
        random = drawn < shares[0] + shares[1]
        drawn_ids = key(keys, places, REPLACEMENT + column) % np.uint64(count)
        drawn_ids = drawn_ids.astype(np.int64)
        for special in excluded:
            drawn_ids += drawn_ids >= special
        here = np.where(random, drawn_ids, here)
    seen[row, place] = np.where(drawn < shares[0], mask, here)
    return seen


PLACES = "places"
"""Among targets: the positions that are predicted (`models.predicted`); no column is called so."""


class Masked(Task):
    """Masked language modelling. Special tokens, found by role, are never hidden or predicted."""

    Config: ClassVar[type[msgspec.Struct]] = MaskedConfig
    predicts_tokens = True
    predicted = "hidden_token"

    def __init__(self, config: Any, model: Model, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        check_shares(config)
        for name in config.columns:
            choose_column(name, self.sizes, "task.")
        self.columns = {n: self.sizes[n] for n in config.columns or self.sizes}
        """The columns that are predicted, and the number of their ids."""
        self.masks = {name: inputs.role(name, "mask") for name in self.sizes}
        self.specials = {n: sorted(inputs.roles.get(n, {}).values()) for n in self.sizes}
        transform = Transform.of(model)
        self.heads = Heads(model, self.columns, config.tied, bias=True, transform=transform)

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        return store_inputs(facts, config.segment)

    @classmethod
    def measures(cls, config: Any, inputs: Inputs) -> Measures:
        count = len(config.columns or inputs.ids)
        unit = "nats a hidden token" if count == 1 else f"nats, sum over {count} columns"
        return Measures(loss=unit, higher=("accuracy",), decided_by=HIDES)

    def check_rows(self) -> None:
        """Refuse rows that cannot be cut."""
        check_cut(self.config.rows, self.length, self.config.step, "task.")

    @property
    def frame(self) -> Frame:
        """`[CLS]` and `[SEP]`, where a row is one record and the vocabularies have them."""
        return frame_of(self.reads) if self.config.rows == "whole" else {}

    def rows(self, store: Store, seed: int = 0, shards: int = 0) -> Rows:
        """Return rows as the recipe asks; those that get a frame are two tokens shorter."""
        config = self.config
        self._check_store(store)
        length = self._own_length(store)
        return cut_rows(store, config.rows, length, config.step, seed, shards, overlap=0)

    def evaluation_rows(self, store: Store) -> Rows:
        """Return records where the run reads such, else windows."""
        self._check_store(store)
        if self.config.rows == "whole":
            return Whole(store, self._own_length(store))
        return Windows(store, self.length, self.config.step or self.length)

    def _own_length(self, store: Store) -> int:
        """Return the tokens of a row that are the store's own."""
        short = 2 if self.frame and not is_framed(store, self.frame) else 0
        check_room(self.length, short + 1, "between [CLS] and [SEP]")
        return self.length - short

    def _check_store(self, store: Store) -> None:
        self.check_rows()
        for name in self.columns:
            low, high = store.manifest.ranges.get(name, (0, 1 << 32))
            special = set(self.specials[name])
            if high - low < len(special) and set(range(int(low), int(high) + 1)) <= special:
                raise UsageError(
                    f"the column {name!r} holds special tokens alone, and these are never hidden",
                    where=str(store.path),
                    hint="`tokmill inspect STORE` shows them; --set task.columns names others",
                )

    def extra_columns(self, schema: Schema) -> list[str]:
        """Return `loss`, whose 0 is never hidden, and the segment, where they are."""
        wanted = [LOSS, *self.reads.made]
        return [name for name in wanted if name in schema and schema[name].per == "token"]

    @property
    def target_names(self) -> list[str]:
        return [PLACES, *self.columns]

    def prepare(self, batch: Batch) -> Batch:
        """Hide tokens; targets are those of the hidden positions alone, (B, M)."""
        batch = self.placed(batch)
        ids = {name: batch.columns[name].astype(np.int64) for name in self.sizes}
        maskable = self.maskable(batch, ids)
        count = wanted(maskable, self.config.share, self.config.most)
        chosen = choose(batch.key, maskable, count)
        targets = {}
        for name in self.columns:
            targets[name] = np.where(chosen, ids[name], -1)
            if UNKNOWN in self.reads.roles.get(name, {}):
                targets[name][ids[name] == self.reads.roles[name][UNKNOWN]] = -1
        shares = (self.config.mask_share, self.config.random_share)
        columns = {
            name: replaced(
                column,
                chosen,
                batch.key,
                column=number,
                mask=self.masks[name],
                size=self.sizes[name],
                specials=self.specials[name],
                shares=shares,
            )
            for number, (name, column) in enumerate(ids.items())
        }
        for name in self.reads.made:
            columns[name] = batch.columns.get(name, batch.document * 0).astype(np.int64)
        places, targets = predicted(targets)
        return dataclasses.replace(
            batch, columns=columns, targets={**batch.targets, PLACES: places, **targets}
        )

    def placed(self, batch: Batch) -> Batch:
        """Return rows with their special tokens; those of a store that has them are as they are."""
        if batch.document.shape[1] == self.length or not self.frame:
            return batch
        return framed(batch, self.frame, self.length)

    def maskable(self, batch: Batch, ids: Mapping[str, Array]) -> Array:
        """Return which tokens may be hidden, (B, T) bool.

        Not those that are special in any column, unless they are but unknown: such a one is hidden
        where another column of it is to be predicted.
        """
        able = batch.document >= 0
        if LOSS in batch.columns:
            able &= batch.columns[LOSS] != 0
        predictable = np.zeros(able.shape, bool)
        for name, column in ids.items():
            roles = self.reads.roles.get(name, {})
            for role, number in roles.items():
                if role != UNKNOWN:
                    able &= column != number
            if name in self.columns:
                predictable |= column != roles.get(UNKNOWN, -1)
        return able & predictable

    def count(self, batch: Batch) -> int:
        """Return the number of positions that are predicted; one of several columns counts once."""
        return int(np.count_nonzero(batch.targets[PLACES] >= 0))

    def example(self, rows: int) -> Tensors:
        batch = super().example(rows)
        few = max(1, round(self.length * self.config.share))
        if self.config.most:
            few = min(few, self.config.most)
        targets = dict.fromkeys(self.target_names, torch.zeros(rows, few, dtype=torch.int64))
        return dataclasses.replace(batch, targets={**batch.targets, **targets})

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed cross-entropy in nats; while evaluating, also what was right."""
        if not self.training:
            sums, _ = self.scored(batch)
            return sums["loss"], sums
        states = self.model(batch, batch.targets[PLACES])
        targets = {name: batch.targets[name] for name in self.columns}
        parts = self.heads.losses(self.model, states, targets)
        loss = torch.stack(list(parts.values())).sum()
        return loss, {"loss": loss.detach(), **self.by_column(parts)}

    def by_column(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the losses of several columns as sums to report."""
        if len(parts) == 1:
            return {}
        return {f"loss_{name}": part.detach() for name, part in parts.items()}

    def scored(self, batch: Tensors) -> tuple[dict[str, Tensor], dict[str, Scores]]:
        """Return sums, and the scores of each column at the places that are predicted, (B, M)."""
        states = self.heads.states(self.model(batch, batch.targets[PLACES]))
        return self.scored_states(states, batch)

    def scored_states(
        self, states: Tensor, batch: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Scores]]:
        """Return what `scored` does, from what the heads are multiplied with, (B, M, D)."""
        scores = {
            name: token_scores(
                states,
                self.heads.weight(self.model, name),
                batch.targets[name],
                self.heads.bias(name),
            )
            for name in self.columns
        }
        parts = {name: score.loss.sum() for name, score in scores.items()}
        sums = {"loss": torch.stack(list(parts.values())).sum(), **self.by_column(parts)}
        for name, score in scores.items():
            sums[f"right_{name}"] = score.right.sum()
            sums[f"known_{name}"] = (batch.targets[name] >= 0).sum()
        return sums, scores

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        """Return the loss in nats a hidden position, and the share of each column that was right.

        Of one column also `pseudo_perplexity`, e to the loss.
        """
        right = {k.removeprefix("right_"): v for k, v in sums.items() if k.startswith("right_")}
        counts = {k.removeprefix("known_"): v for k, v in sums.items() if k.startswith("known_")}
        rest = {k: v for k, v in sums.items() if not k.startswith(("right_", "known_"))}
        metrics = super().report(rest, count)
        for name, number in right.items():
            key = "accuracy" if len(right) == 1 else f"accuracy_{name}"
            metrics[key] = number / max(counts[name], 1)
        if len(self.columns) == 1:
            metrics["pseudo_perplexity"] = perplexity(metrics["loss"])
        return metrics

    def at_targets(self, batch: Batch, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return values per position as values per predicted place."""
        places = batch.targets[PLACES].clip(min=0)
        return {name: np.take_along_axis(value, places, 1) for name, value in values.items()}

    def param_groups(self, weight_decay: float) -> list[Group]:
        return super().param_groups(weight_decay) + self.heads.param_groups(weight_decay)

    def flops_per_token(self, length: int) -> float:
        """Return those of the model, and for the hidden tokens 6 · D · (V + D)."""
        ids = sum(self.columns.values()) + self.model.dim
        share: float = self.config.share
        return super().flops_per_token(length) + 6.0 * share * self.model.dim * ids
