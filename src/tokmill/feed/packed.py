"""Rows of whole documents side by side: every token once an epoch, almost no padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.feed.order import key, permute
from tokmill.feed.pack import Patterns, best_fit, pieces_of, rests
from tokmill.feed.rows import Rows
from tokmill.store.schema import Array
from tokmill.store.shards.gather import Spans
from tokmill.store.shards.strings import ranges
from tokmill.store.store import Store

PLANS = 8
"""Plans of groups that are cached; a batch needs one or two."""


@dataclass(frozen=True, slots=True)
class Packs:
    """The plan of a group, and where its pieces come from; all arrays int64.

    `begins`: the first pack of each pattern, and the number of packs. The others have a value for
    each entry of the patterns. `used`: pieces of its length in earlier patterns; `pieces`: pieces
    of its length; `first`: place of the first such piece among the documents of the store.
    """

    patterns: Patterns
    begins: Array
    used: Array
    pieces: Array
    first: Array


class Packed(Rows):
    """Documents packed into rows of `length` tokens by best fit; nothing is discarded.

    A document shorter than a row is a piece. A longer document gives full windows, each of them a
    row, and a rest, which is a piece. Two consecutive windows (and the rest) share `overlap`
    tokens, 0 or 1. With rows of T + 1 tokens and an overlap of 1, every token except a document's
    first is a target exactly once. Empty documents are in no row.

    `shards`: this many shards of the store make a group, drawn by `seed`, and each group is packed
    by itself; 0: one group of all. Rows are numbered group by group, in a group windows first. The
    plan is the same in every epoch; seed and epoch permute the pieces of equal length. Raises
    `UsageError` for impossible numbers.
    """

    def __init__(
        self, store: Store, length: int, *, overlap: int = 0, shards: int = 0, seed: int = 0
    ) -> None:
        if overlap not in (0, 1):
            raise UsageError(
                f"packed rows cannot share {overlap} tokens",
                hint="0, or 1 where the next token is learned",
            )
        if length <= overlap:
            raise UsageError(
                f"rows of {length} tokens that share {overlap} cannot be packed",
                hint=f"rows of at least {overlap + 1} tokens",
            )
        self.store, self.length, self.seed = store, length, seed
        self.tokens = store.tokens
        self.overlap, self.step = overlap, length - overlap
        self.pieces = pieces_of(store, length, overlap, shards, seed)
        # By class: the place of its first document, and the number of its first window.
        self._document_begins = _begins(self.pieces.count)
        self._window_begins = _begins(self.pieces.count * self.pieces.windows)
        # By group: the number of its first window, its windows, its first row.
        self._group_window = self._window_begins[self.pieces.classes]
        self._group_windows = np.diff(self._group_window)
        self.groups = self._group_windows + self.pieces.packs
        self._row_begins = _begins(self.groups)
        self._packs = lru_cache(maxsize=PLANS)(self._make_packs)

    def __len__(self) -> int:
        return int(self._row_begins[-1])

    def spans(self, rows: Array, epoch: int = 0) -> Spans:
        """Return the spans of the given rows."""
        group, number, is_window = self._find(rows)
        at = np.flatnonzero(is_window)
        place, window = self._window(number[at])
        start = window * self.step
        parts = [
            np.stack([at, self._records(place), np.zeros_like(at), start, start + self.length])
        ]
        for one in np.unique(group[~is_window]).tolist():
            at = np.flatnonzero((group == one) & ~is_window)
            parts.append(self._pack_spans(at, number[at], one, epoch))
        spans = np.concatenate(parts, axis=1)
        return Spans(*spans.take(np.argsort(spans[0], kind="stable"), axis=1))

    def shared(self, rows: Array) -> Array:
        """Return how many tokens at the beginning of each row an earlier row has too.

        Only windows that continue a document share tokens. A rest may stand anywhere in its row;
        the number of its document says that its first token is no target.
        """
        _, number, is_window = self._find(rows)
        shared = np.zeros(len(number), np.int64)
        _, window = self._window(number[is_window])
        shared[is_window] = np.where(window > 0, self.overlap, 0)
        return shared

    def _find(self, rows: Array) -> tuple[Array, Array, Array]:
        """Return (group, number of the window in the store or of the pack in the group, is it a
        window?).
        """
        rows = np.asarray(rows, np.int64)
        group = np.searchsorted(self._row_begins, rows, side="right") - 1
        number = rows - self._row_begins[group]
        is_window = number < self._group_windows[group]
        first = np.where(is_window, self._group_window[group], -self._group_windows[group])
        return group, number + first, is_window

    def _window(self, number: Array) -> tuple[Array, Array]:
        """Return (place of the document, number of the window in it) for windows of the store."""
        of = np.searchsorted(self._window_begins, number, side="right") - 1
        document, window = np.divmod(number - self._window_begins[of], self.pieces.windows[of])
        return self._document_begins[of] + document, window

    def _records(self, place: Array) -> Array:
        """Return the records of documents by their place in the order of the pieces."""
        records: Array = self.pieces.documents[place].astype(np.int64)
        return records

    def _pack_spans(self, at: Array, pack: Array, group: int, epoch: int) -> Array:
        """Return the spans (5, n), as the fields of `Spans`, of packs of a group for rows `at`."""
        packs = self._packs(group)
        patterns = packs.patterns
        pattern = np.searchsorted(packs.begins, pack, side="right") - 1
        entries = patterns.offsets[pattern]
        owner, number = _spread(patterns.offsets[pattern + 1] - entries)
        entry = entries[owner] + number
        count = patterns.counts[entry]
        used = packs.used[entry] + (pack - packs.begins[pattern])[owner] * count
        of_entry, number = _spread(count)
        piece, owner, entry = used[of_entry] + number, owner[of_entry], entry[of_entry]
        rest = patterns.lengths[entry]
        draw = key(self.seed, epoch, group, rest.astype(np.uint64))
        place = packs.first[entry] + permute(piece, packs.pieces[entry], draw)
        of_class = np.searchsorted(self._document_begins, place, side="right") - 1
        start = self.pieces.windows[of_class] * self.step
        begin = np.searchsorted(owner, owner)
        # A rest does not begin its document, so that a number is left out before it.
        later = np.cumsum((start > 0) & (begin < np.arange(len(owner))))
        document = np.arange(len(owner)) - begin + later - later[begin]
        return np.stack([at[owner], self._records(place), document, start, start + rest])

    def _make_packs(self, group: int) -> Packs:
        """Return the plan of a group."""
        first_class, end = self.pieces.classes[group : group + 2].tolist()
        own = slice(first_class, end)
        lengths, pieces, first = rests(self.pieces.rest[own], self.pieces.count[own])
        patterns = best_fit(lengths, pieces, self.length)
        of = np.searchsorted(lengths, patterns.lengths)
        first = first[of] + self._document_begins[first_class]
        return Packs(patterns, _begins(patterns.repeats), patterns.used(), pieces[of], first)


def _begins(counts: Array) -> Array:
    """Return where each of several runs begins, and the end of the last one (n + 1)."""
    return np.append(0, np.cumsum(counts))


def _spread(counts: Array) -> tuple[Array, Array]:
    """Return (owner, number within the owner) for `counts[i]` things of each owner i."""
    return np.repeat(np.arange(len(counts)), counts), ranges(0, counts)
