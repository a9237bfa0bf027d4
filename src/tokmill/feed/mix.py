"""Mix several stores in one feed: the store of each slot, and checks of their columns.

A slot is the place of a row in the whole training: step · batch size + place in the batch. Slots
are assigned by Beatty sequences: nothing is stored, and every prefix has the right shares. Of two
stores, the left one with share w gets slot n if floor((n + 1) · w) > floor(n · w); it is then its
row number floor(n · w). More than two stores are divided into two halves recursively.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tokmill.base.errors import UsageError, nearest
from tokmill.feed.rows import Rows
from tokmill.store.schema import Array
from tokmill.store.store import Store

BITS = 32
"""A share is a multiple of 2^-32, so it is at most one row off in 2^33 slots."""


class Mix:
    """Assigns slots to sources, which have the given shares (above 0) of the slots.

    After any number n of slots, each of m sources has had n · share rows, up to an error of less
    than 1 + log2(m), and of n / 2^32 from rounding shares.
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self.count = len(shares)
        self._left: dict[tuple[int, int], int] = {}
        self._weigh(shares, 0, self.count)

    def _weigh(self, shares: Sequence[Fraction], low: int, high: int) -> None:
        if high - low > 1:
            middle = (low + high) // 2
            left = round(sum(shares[low:middle]) / sum(shares[low:high]) * (1 << BITS))
            # Even the smallest share is above 0.
            self._left[low, high] = min(max(left, 1), (1 << BITS) - 1)
            self._weigh(shares, low, middle)
            self._weigh(shares, middle, high)

    def split(self, start: int, stop: int) -> list[tuple[Array, int]]:
        """Return for each source (its slots among start … stop - 1, row number of the first one).

        Slots (int64) count from `start`. A source's rows have consecutive numbers.
        """
        return list(self._split(0, self.count, np.arange(stop - start), start, stop))

    def _split(
        self, low: int, high: int, slots: Array, start: int, stop: int
    ) -> Iterator[tuple[Array, int]]:
        if high - low == 1:
            yield slots, start
            return
        left = self._left[low, high]
        # floor(n · left / 2^32), by halves of n, as a product of two 32-bit numbers fits 64 bits.
        n = np.arange(start, stop + 1, dtype=np.uint64)
        upper, lower, share = n >> np.uint64(BITS), n & np.uint64((1 << BITS) - 1), np.uint64(left)
        before = upper * share + (lower * share >> np.uint64(BITS))
        taken = before[1:] > before[:-1]
        first, last = int(before[0]), int(before[-1])
        middle = (low + high) // 2
        yield from self._split(low, middle, slots[taken], first, last)
        yield from self._split(middle, high, slots[~taken], start - first, stop - last)


def row_shares(rows: Sequence[Rows], weights: Sequence[float] = ()) -> list[Fraction]:
    """Return each source's number of rows for each token of the feed, from shares of the tokens.

    A source with longer rows has fewer of them. `weights`: relative shares of the tokens; without
    weights, in proportion to the sizes of the stores.
    """
    if weights and len(weights) != len(rows):
        raise UsageError(
            f"{len(weights)} weights cannot be shared among {len(rows)} stores",
            where="weights",
            hint="give one for each store, in their order",
        )
    for number, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            raise UsageError(
                f"the weight of store {number + 1} is {weight}",
                where="weights",
                hint="weights are above 0; leave out a store that is not to be read",
            )
    parts = [Fraction(value) for value in weights or [source.tokens for source in rows]]
    return [
        part / sum(parts) * Fraction(len(source), source.tokens)
        for part, source in zip(parts, rows, strict=True)
    ]


def column_dtypes(stores: Sequence[Store], names: Sequence[str] | None) -> dict[str, np.dtype[Any]]:
    """Return column → its largest dtype in all stores; `names` None: all token columns.

    The dtype of a column with a width has the width as its shape.

    Raises `UsageError` for a column that a store lacks, or that has another meaning in it.
    """
    dtypes: dict[str, np.dtype[Any]] = {}
    if names is None:
        names = list(dict.fromkeys(name for store in stores for name in store.token_columns))
    for name in names:
        for store in stores:
            if name not in store.token_columns:
                raise UsageError(
                    f"the store has no column {name!r} with a value per token",
                    where=str(store.path),
                    hint=nearest(name, store.token_columns),
                )
            if _kind(store, name) != _kind(stores[0], name):
                raise UsageError(
                    f"the column {name!r} has {_describe(store, name)}, "
                    f"but {_describe(stores[0], name)} in {stores[0].path}",
                    where=str(store.path),
                    hint="stores that are mixed need columns of one kind and one vocabulary",
                )
        largest = max((store.schema[name].numpy() for store in stores), key=lambda d: d.itemsize)
        width = stores[0].schema[name].width
        dtypes[name] = np.dtype((largest, (width,))) if width else largest
    return dtypes


def _kind(store: Store, name: str) -> tuple[str, int, str]:
    column = store.schema[name]
    vocabulary = store.vocabularies.get(column.vocab or "")
    return column.numpy().kind, column.width, vocabulary.sha256 if vocabulary else ""


def _describe(store: Store, name: str) -> str:
    column = store.schema[name]
    vocabulary = store.vocabularies.get(column.vocab or "")
    of = f"the vocabulary {vocabulary.sha256[:12]}" if vocabulary else "no vocabulary"
    return f"values {column.dtype}{f' of width {column.width}' if column.width else ''}, {of}"
