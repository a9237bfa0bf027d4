"""Chooses the hidden tokens of a row and their replacements (Devlin et al. 2018).

All choices are hashes of a row's key and of positions in it. So they do not depend on the number of
processes and micro-batches, and they differ in every epoch.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec
import numpy as np

from tokmill.base.errors import UsageError
from tokmill.base.recipe import Natural, Share, check_types
from tokmill.feed.order import key
from tokmill.store.schema import Array
from tokmill.tasks.task_inputs import RowKind


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
        keys_B: uint64, of each row (`Batch.key`).
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
        keys_B: of the rows.
        column: number of the column. At a position all columns get their mask, or all a random id,
            or all stay as they are; each column draws its own random id.
        mask: the id of the mask token.
        size: number of ids.
        specials: ids that are never drawn as a random id.
        shares: the shares of hidden tokens that become `mask` and that become a random id; the
            others stay. Each token is drawn by itself.
    """
    row, place = np.nonzero(chosen_BT)
    keys, places = keys_B[row], place.astype(np.uint64)
    drawn = (key(keys, places, ACTION) >> np.uint64(11)) * 2.0**-53
    seen, here = ids_BT.copy(), ids_BT[row, place]
    others = sorted(one for one in set(specials) if one < size)
    count = size - len(others)
    if shares[1] and count > 0:
        random = drawn < shares[0] + shares[1]
        drawn_ids = key(keys, places, REPLACEMENT + column) % np.uint64(count)
        drawn_ids = drawn_ids.astype(np.int64)
        for special in others:
            drawn_ids += drawn_ids >= special
        here = np.where(random, drawn_ids, here)
    seen[row, place] = np.where(drawn < shares[0], mask, here)
    return seen
