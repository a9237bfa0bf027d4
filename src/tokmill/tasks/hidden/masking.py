"""Chooses the hidden tokens of a row and their replacements (Devlin et al. 2018).

All choices are hashes of a row's key and of positions in it. So they do not depend on the number of
processes and micro-batches, and they differ in every epoch.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tokmill.feed.order import key
from tokmill.store.schema import Array

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
