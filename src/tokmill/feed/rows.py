"""How a store is cut for a task: which spans of which records make row i.

A row is one span or several; a span never crosses a record. Rows are made when they are read:
nothing of this is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokmill.errors import TokmillError
from tokmill.feed.order import key
from tokmill.store.schema import Array
from tokmill.store.store import Store


@dataclass(slots=True)
class Spans:
    """Spans in the order in which they fill their rows; all arrays int64, one value a span.

    `row` is the position in the batch, `record` a record of the store, `document` the number of
    the document within its row, `start` and `stop` token positions within the record.
    """

    row: Array
    record: Array
    document: Array
    start: Array
    stop: Array


class Rows(Protocol):
    """What a store's rows are: `length` tokens each, numbered 0 … len - 1.

    `groups`: int64, the number of rows of each group, in the order of the rows. A feed draws from
    one group after the other, so that only a group's shards need be at hand.
    """

    store: Store
    length: int
    groups: Array

    def __len__(self) -> int:
        """Return the number of rows of one epoch."""
        ...

    def spans(self, rows: Array, epoch: int) -> Spans:
        """Return the spans of the given rows."""
        ...

    def shared(self, rows: Array) -> Array:
        """Return how many tokens at the beginning of each row an earlier row holds too (int64)."""
        ...


class Windows:
    """Windows of `length` tokens, each beginning `step` after the last.

    With `across=True` they run over the ribbon of all records end to end (the last one may be
    short); with `across=False` over each record alone, as sliding windows of a tokenization kit.
    """

    def __init__(
        self, store: Store, length: int, step: int | None = None, *, across: bool = True
    ) -> None:
        step = length if step is None else step
        if length < 1 or step < 1:
            raise TokmillError(f"windows of {length} tokens every {step} cannot be cut")
        self.store, self.length, self.step, self.across = store, length, step, across
        self.ends = store.ends()
        if across:
            self.count = int(_window_count(np.asarray([store.tokens]), length, step)[0])
        else:
            counts = _window_count(np.diff(self.ends, prepend=0), length, step)
            self.cumulative = np.cumsum(counts)
            self.count = int(self.cumulative[-1]) if len(counts) else 0
        self.groups = np.asarray([self.count], np.int64)

    def __len__(self) -> int:
        return self.count

    def spans(self, rows: Array, epoch: int = 0) -> Spans:
        """Return the spans of the given rows (the epoch does not matter)."""
        rows = np.asarray(rows, np.int64)
        if self.across:
            return ribbon_spans(self.ends, rows * self.step, self.length)
        record = np.searchsorted(self.cumulative, rows, side="right")
        first = np.where(record > 0, self.cumulative[record - 1], 0)
        starts = (rows - first) * self.step
        lengths = self.ends[record] - np.where(record > 0, self.ends[record - 1], 0)
        return Spans(
            row=np.arange(len(rows)),
            record=record,
            document=np.zeros(len(rows), np.int64),
            start=starts,
            stop=np.minimum(starts + self.length, lengths),
        )

    def shared(self, rows: Array) -> Array:
        """Return how many tokens at the beginning of each row the row before holds too."""
        rows = np.asarray(rows, np.int64)
        if self.across:
            first = rows == 0
        else:
            record = np.searchsorted(self.cumulative, rows, side="right")
            first = rows == np.where(record > 0, self.cumulative[record - 1], 0)
        return np.where(first, 0, max(0, self.length - self.step))


class Stream:
    """Windows that begin anywhere in the ribbon of all records, drawn anew every epoch.

    An epoch has as many rows as the store has whole windows; tokens may come twice or never.
    """

    def __init__(self, store: Store, length: int, seed: int = 0) -> None:
        if store.tokens < length:
            raise TokmillError(
                f"{store.tokens} tokens are fewer than one window of {length}",
                where=str(store.path),
                hint="take a shorter window or more text",
            )
        self.store, self.length, self.seed = store, length, seed
        self.ends = store.ends()
        self.groups = np.asarray([len(self)], np.int64)

    def __len__(self) -> int:
        return self.store.tokens // self.length

    def spans(self, rows: Array, epoch: int = 0) -> Spans:
        """Return the spans of the given rows."""
        places = self.store.tokens - self.length + 1
        starts = key(self.seed, epoch, np.asarray(rows, np.uint64)) % np.uint64(places)
        return ribbon_spans(self.ends, starts.astype(np.int64), self.length)

    def shared(self, rows: Array) -> Array:
        """Return 0 for each row: rows that begin anywhere count all their tokens."""
        return np.zeros(len(rows), np.int64)


def ribbon_spans(ends: Array, starts: Array, length: int) -> Spans:
    """Return the spans of windows over all records end to end.

    `ends` holds the cumulative token counts of the records, `starts` the windows' first tokens.
    """
    stops = np.minimum(starts + length, ends[-1] if len(ends) else 0)
    first = np.searchsorted(ends, starts, side="right")
    last = np.searchsorted(ends, stops, side="left")
    counts = np.maximum(last - first + 1, 0)
    row = np.repeat(np.arange(len(starts)), counts)
    document = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    record = first[row] + document
    begin = np.where(record > 0, ends[record - 1], 0)
    start = np.maximum(starts[row], begin) - begin
    stop = np.minimum(stops[row], ends[record]) - begin
    filled = stop > start
    if filled.all():
        return Spans(row, record, document, start, stop)
    # Empty records lie between: documents are numbered by the spans that hold tokens.
    row, record, start, stop = row[filled], record[filled], start[filled], stop[filled]
    new_row = np.diff(row, prepend=-1) > 0
    since = np.maximum.accumulate(np.where(new_row, np.arange(len(row)), 0))
    return Spans(row, record, np.arange(len(row)) - since, start, stop)


def _window_count(lengths: Array, length: int, step: int) -> Array:
    """Return how many windows cover so many tokens: the last one reaches the end, or near it.

    With gaps between windows the end may lie in a gap: no window is empty.
    """
    counts = np.where(lengths <= length, 1, -(-(lengths - length) // step) + 1)
    return np.where(lengths <= 0, 0, np.minimum(counts, -(-lengths // step)))
