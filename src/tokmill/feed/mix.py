"""Several stores as one feed: whose turn each slot is, and whether their columns agree.

A slot is the place of a row in the whole training: step · batch size + place in the batch. Slots
are dealt out by Beatty sequences, so that nothing is stored and every prefix has the right shares.
Of two sides the left one, with share w, has slot n if floor((n + 1) · w) > floor(n · w), as its
number floor(n · w). More than two are dealt out to two halves first, each of which does the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tokmill.errors import UsageError, nearest
from tokmill.feed.rows import Rows
from tokmill.store.schema import Array
from tokmill.store.store import Store

BITS = 32
"""A share is a whole number of 2^-32: exact, and one row off in 2^33 slots at most."""


class Mix:
    """Which source each slot is of, for sources with the given shares (above 0) of the slots.

    After any number n of slots, each of m sources has had n · share rows, less or more by fewer
    than 1 + log2(m), and by n / 2^32 from rounding shares.
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self.count = len(shares)
        self._left: dict[tuple[int, int], int] = {}
        self._weigh(shares, 0, self.count)

    def _weigh(self, shares: Sequence[Fraction], low: int, high: int) -> None:
        if high - low > 1:
            middle = (low + high) // 2
            left = round(sum(shares[low:middle]) / sum(shares[low:high]) * (1 << BITS))
            # However small, a share is not nothing.
            self._left[low, high] = min(max(left, 1), (1 << BITS) - 1)
            self._weigh(shares, low, middle)
            self._weigh(shares, middle, high)

    def split(self, start: int, stop: int) -> list[tuple[Array, int]]:
        """Return for each source (its slots of start … stop - 1, the number of the first of them).

        Slots (int64) count from `start`. The others of a source have the numbers that follow.
        """
        return list(self._split(0, self.count, np.arange(stop - start), start, stop))

    def _split(
        self, low: int, high: int, slots: Array, start: int, stop: int
    ) -> Iterator[tuple[Array, int]]:
        if high - low == 1:
            yield slots, start
            return
        left = self._left[low, high]
        # floor(n · left / 2^32) by halves of n: a product of 32 bits each fits into 64.
        n = np.arange(start, stop + 1, dtype=np.uint64)
        upper, lower, share = n >> np.uint64(BITS), n & np.uint64((1 << BITS) - 1), np.uint64(left)
        before = upper * share + (lower * share >> np.uint64(BITS))
        taken = before[1:] > before[:-1]
        first, last = int(before[0]), int(before[-1])
        middle = (low + high) // 2
        yield from self._split(low, middle, slots[taken], first, last)
        yield from self._split(middle, high, slots[~taken], start - first, stop - last)


def row_shares(rows: Sequence[Rows], weights: Sequence[float] = ()) -> list[Fraction]:
    """Return each source's rows for every token of the feed, from shares of the tokens.

    A source of long rows has fewer of them. `weights` are in proportion to the wanted shares of
    tokens; without them each store's share is in proportion to its size.
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
    """Return column → the largest dtype that a store has for it; None: all token columns.

    The dtype of a column with a width has that as its shape.

    Raises `UsageError` for a column that a store lacks, or that means something else in it.
    """
    dtypes: dict[str, np.dtype[Any]] = {}
    if names is None:
        names = list(dict.fromkeys(name for store in stores for name in store.token_columns))
    for name in names:
        for store in stores:
            if name not in store.token_columns:
                raise UsageError(
                    f"the store has no column {name!r} with a value a token",
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
