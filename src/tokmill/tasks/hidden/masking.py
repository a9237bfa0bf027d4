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


def choose(keys_B: Array, maskable_BT: Array, count_B: Array, begins_BT: Array | None) -> Array:
    """Return which tokens are hidden, (B, T) bool.

    Args:
        keys_B: uint64, of each row (`Batch.key`).
        maskable_BT: bool, which tokens may be hidden.
        count_B: the number of tokens to hide in each row (`wanted`).
        begins_BT: bool, where a unit (a word or an instruction) begins, which is hidden as a whole;
            None: tokens are hidden one by one.

    Units are tried in a random order, and each that fits into the rest of the count is hidden. If
    none fits, the first of the order is hidden.
    """
    places = np.arange(maskable_BT.shape[1], dtype=np.uint64)
    scores = key(keys_B[:, None], places, CHOICE)
    if begins_BT is None:
        order = np.argsort(np.where(maskable_BT, scores, LAST), axis=1, kind="stable")
        first = np.arange(maskable_BT.shape[1]) < count_B[:, None]
        chosen = np.zeros(maskable_BT.shape, bool)
        np.put_along_axis(chosen, order, first, axis=1)
        return chosen & maskable_BT
    number = units(begins_BT)
    sizes = unit_sums(number, maskable_BT)
    ranks = np.full(sizes.shape, LAST)
    row, place = np.nonzero(np.diff(number, axis=1, prepend=-1))
    ranks[row, number[row, place]] = scores[row, place]
    ranks[sizes == 0] = LAST
    order = np.argsort(ranks, axis=1, kind="stable")
    taken = _fitting(np.take_along_axis(sizes, order, axis=1), count_B)
    units_taken = np.zeros(sizes.shape, bool)
    np.put_along_axis(units_taken, order, taken, axis=1)
    return np.take_along_axis(units_taken, number, axis=1) & maskable_BT


def units(begins_BT: Array) -> Array:
    """Return for each position the number of its unit in the row, (B, T) int64.

    The first position of a row begins a unit.
    """
    begins = begins_BT.copy()
    begins[:, 0] = True
    number: Array = np.cumsum(begins, axis=1) - 1
    return number


def unit_sums(number_BT: Array, values_BT: Array) -> Array:
    """Return the sum of whole numbers or bools in each unit of each row, (B, units) int64."""
    rows, most = len(number_BT), int(number_BT.max(initial=0)) + 1
    flat = number_BT + np.arange(rows)[:, None] * most
    sums = np.bincount(flat.ravel(), weights=values_BT.ravel(), minlength=rows * most)
    return sums.astype(np.int64).reshape(rows, most)


def _fitting(sizes_BU: Array, count_B: Array) -> Array:
    """Return which units are hidden, from their sizes in the order in which they are tried."""
    taken, left = np.zeros(sizes_BU.shape, bool), count_B.copy()
    for place in range(sizes_BU.shape[1]):
        size = sizes_BU[:, place]
        fits = (size > 0) & (size <= left)
        taken[:, place] = fits
        left -= size * fits
        if not left.any():
            break
    taken[:, 0] |= ~taken.any(1) & (count_B > 0)
    return taken


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
            others stay. Each token is drawn by itself, also in a hidden word.
    """
    row, place = np.nonzero(chosen_BT)
    keys, places = keys_B[row], place.astype(np.uint64)
    drawn = (key(keys, places, ACTION) >> np.uint64(11)) * 2.0**-53
    seen, here = ids_BT.copy(), ids_BT[row, place]
    others = sorted(one for one in set(specials) if one < size)
    count = size - len(others)
    if shares[1] and count > 0:
        random = drawn < shares[0] + shares[1]
        found = key(keys, places, REPLACEMENT + column) % np.uint64(count)
        found = found.astype(np.int64)
        for special in others:
            found += found >= special
        here = np.where(random, found, here)
    seen[row, place] = np.where(drawn < shares[0], mask, here)
    return seen
