"""Ways to cut a store into rows (the spans of records that make row i), and to mix stores.

A row has one or more spans; a span never crosses a record. Rows are made when they are read, and
never stored. Rows that belong together are one entry (`feed/entries.py`). A feed numbers and draws
entries; here each entry is one row.

A slot is the place of a row in the whole training: step · batch size + place in the batch. The
slots of several stores are assigned by Beatty sequences: nothing is stored, and every prefix has
the right shares. Of two stores, the left one with share w gets slot n if floor((n + 1) · w) >
floor(n · w); it is then its row number floor(n · w). More than two stores are divided into two
halves recursively.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.feed.order import key, shard_groups
from tokmill.store.gather import Spans
from tokmill.store.schema import Array
from tokmill.store.shards.column_buffers import mapped
from tokmill.store.store import Store

AT_ONCE = 1 << 16
"""Entries among which records are looked for, or records that are counted, at a time."""


class Rows(Protocol):
    """The rows of a store, `length` tokens each, in entries that are numbered 0 … len - 1.

    `store`: the store of the tokens. Each row is an entry, unless `sizes` returns otherwise.
    `groups`: int64, the number of entries of each group, in the order of the entries; a feed reads
    one group after the other, so only the shards of one group are needed at a time.
    `tokens`: number of tokens in the rows of an epoch; tokens that rows share count once.
    """

    store: Store
    length: int
    groups: Array
    tokens: int
    of_rows: Collection[str] = ()
    """Columns that are read from the last of `value_stores` that has them, and not the first."""

    def __len__(self) -> int:
        """Return the number of rows of one epoch."""
        ...

    def spans(self, rows: Array, epoch: int) -> Spans:
        """Return the spans of the given rows."""
        ...

    def shared(self, rows: Array) -> Array:
        """Return how many tokens at the beginning of each row an earlier row has too (int64).

        One value an entry; rows of entries with several rows share no tokens. By default all tokens
        of a row count, even if rows overlap.
        """
        return np.zeros(len(rows), np.int64)

    def sizes(self, entries: Array) -> Array | None:
        """Return how many rows each of some entries has (int64); None: one each."""
        return None

    def holding(self, records: Array, epoch: int) -> Array:
        """Return the entries with tokens of some records (int64, each once); by a look at all."""
        parts = [np.zeros(0, np.int64)]
        for start in range(0, len(self), AT_ONCE):
            entries = np.arange(start, min(start + AT_ONCE, len(self)))
            sizes, spans = self.sizes(entries), self.spans(entries, epoch)
            rows = entries if sizes is None else np.repeat(entries, sizes)
            parts.append(np.unique(rows[spans.row[np.isin(spans.record, records)]]))
        return np.concatenate(parts)

    @property
    def value_stores(self) -> Sequence[Store]:
        """The stores that have a record for each row, to read columns with a value per record.

        The first store with a column wins (`of_rows`: the last). Empty if a row may hold parts of
        several records.
        """
        return ()

    def value_records(self, entries: Array, epoch: int = 0) -> Sequence[Array]:
        """Return for each of `value_stores` the record of each row of some entries (int64)."""
        return ()

    def families(self) -> Array:
        """Return the family of each record of `store`; int64. By default each has its own.

        Records of one family are known to be similar: the number is that of the first of them.
        """
        return np.arange(len(self.store))


class Windows(Rows):
    """Windows of `length` tokens, each beginning `step` after the last.

    With `across=True` they run over all records end to end (the last window may be short); with
    `across=False` over each record by itself, like the sliding windows of a tokenization kit.
    `shards` above 0 makes groups of the rows of this many shards, drawn by `seed`; a window belongs
    to the shard of its first token.
    """

    def __init__(
        self,
        store: Store,
        length: int,
        step: int | None = None,
        *,
        across: bool = True,
        shards: int = 0,
        seed: int = 0,
    ) -> None:
        step = length if step is None else step
        if length < 1 or step < 1:
            raise TokmillError(
                f"windows of {length} tokens every {step} cannot be cut",
                hint="length and step are at least 1",
            )
        self.store, self.length, self.step, self.across = store, length, step, across
        self.offsets, self.tokens = store.offsets(), 0
        self.firsts = mapped(store.path, 2 if across else store.records + 1, self._each_firsts)
        ends = np.cumsum([0, *(part.tokens if across else part.records for part in store.shards)])
        borders = np.minimum(-(-ends // step), len(self)) if across else self.firsts[ends]
        self._numbering = Numbering(borders, shard_groups(len(store.shards), shards, seed))
        self.groups = self._numbering.groups

    def _each_firsts(self) -> Iterator[Array]:
        self.tokens = before = 0
        yield np.zeros(1, np.int64)
        for lengths in self._lengths():
            counts = _window_count(lengths, self.length, self.step)
            self.tokens += int(_covered(lengths, counts, self.length, self.step).sum())
            yield before + np.cumsum(counts)
            before += int(counts.sum())

    def _lengths(self) -> Iterator[Array]:
        """Yield the lengths of what windows are cut from, some at a time."""
        ends = self.offsets[[0, -1]] if self.across else self.offsets
        for start in range(0, len(ends) - 1, AT_ONCE):
            yield np.diff(ends[start : start + AT_ONCE + 1])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def spans(self, rows: Array, epoch: int = 0) -> Spans:
        windows = self._numbering.in_store_order(np.asarray(rows, np.int64))
        if self.across:
            return ribbon_spans(self.offsets, windows * self.step, self.length)
        record = np.searchsorted(self.firsts[1:], windows, side="right")
        starts = (windows - self.firsts[record]) * self.step
        lengths = self.offsets[record + 1] - self.offsets[record]
        return Spans(
            row=np.arange(len(windows)),
            record=record,
            document=np.zeros(len(windows), np.int64),
            start=starts,
            stop=np.minimum(starts + self.length, lengths),
        )

    @property
    def value_stores(self) -> Sequence[Store]:
        """The store, if a window is of one record."""
        return () if self.across else (self.store,)

    def value_records(self, entries: Array, epoch: int = 0) -> Sequence[Array]:
        """Return the record of each window."""
        if self.across:
            return ()
        windows = self._numbering.in_store_order(np.asarray(entries, np.int64))
        return (np.searchsorted(self.firsts[1:], windows, side="right"),)

    def shared(self, rows: Array) -> Array:
        """Return how many tokens at the beginning of each row the window before holds too."""
        if self.step >= self.length:
            return np.zeros(len(rows), np.int64)
        windows = self._numbering.in_store_order(np.asarray(rows, np.int64))
        # The first window (of all records, or of its record) has none before it.
        part = np.searchsorted(self.firsts[1:], windows, side="right")
        return np.where(windows == self.firsts[part], 0, self.length - self.step)


class Whole(Windows):
    """One record a row, cut off at `length` tokens.

    `cut_records` and `cut_tokens`: number of records that are cut, and of tokens cut off. An empty
    record gives no row.
    """

    def __init__(self, store: Store, length: int, *, shards: int = 0, seed: int = 0) -> None:
        # With this step no record has a second window.
        step = max(length, store.tokens)
        super().__init__(store, length, step, across=False, shards=shards, seed=seed)
        self.cut_records = sum(int(np.count_nonzero(some > length)) for some in self._lengths())
        self.cut_tokens = store.tokens - self.tokens


class Stream(Rows):
    """Windows that begin anywhere in all records end to end, drawn anew every epoch.

    An epoch has as many rows as the store has whole windows; a token may occur twice or never.
    """

    def __init__(self, store: Store, length: int, seed: int = 0) -> None:
        if not 1 <= length <= store.tokens:
            raise TokmillError(
                f"{store.tokens} tokens have no window of {length}",
                where=str(store.path),
                hint="a window has at least 1 token, and no more than the store",
            )
        self.store, self.length, self.seed = store, length, seed
        self.offsets = store.offsets()
        self.groups = np.asarray([len(self)], np.int64)
        self.tokens = len(self) * length

    def __len__(self) -> int:
        return self.store.tokens // self.length

    def spans(self, rows: Array, epoch: int = 0) -> Spans:
        places = self.store.tokens - self.length + 1
        starts = key(self.seed, epoch, np.asarray(rows, np.uint64)) % np.uint64(places)
        return ribbon_spans(self.offsets, starts.astype(np.int64), self.length)


class Numbering:
    """Numbers of rows, group by group, for rows that have an order in the store.

    `borders`: number of rows before each shard, and of all, in the order of the store; `grouping`:
    the shards of each group. `groups`: the number of rows of each group.
    """

    def __init__(self, borders: Array, grouping: list[Array]) -> None:
        order = np.concatenate(grouping)
        counts = np.diff(borders)[order]
        self.ends = np.cumsum(counts)
        self.shift = borders[order] - (self.ends - counts)
        last = np.cumsum([len(shards) for shards in grouping])
        self.groups = np.diff(np.concatenate([[0], self.ends])[last], prepend=0)

    def in_store_order(self, rows: Array) -> Array:
        if len(self.groups) == 1:
            return rows
        return rows + self.shift[np.searchsorted(self.ends, rows, side="right")]


def ribbon_spans(offsets: Array, starts: Array, length: int) -> Spans:
    """Return the spans of windows over all records end to end.

    `offsets`: the number of tokens before each record and in all; `starts`: the windows' first
    tokens, each of them within the ribbon.
    """
    ends = offsets[1:]
    stops = np.minimum(starts + length, offsets[-1])
    first = np.searchsorted(ends, starts, side="right")
    counts = np.searchsorted(ends, stops, side="left") - first + 1
    row = np.repeat(np.arange(len(starts)), counts)
    document = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    record = first[row] + document
    begin = offsets[record]
    start = np.maximum(starts[row] - begin, 0)
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
    """Return the number of windows for numbers of tokens: the last window reaches the end.

    With gaps between windows (step > length) the end may lie in a gap; no window is empty.
    """
    counts = np.where(lengths <= length, 1, -(-(lengths - length) // step) + 1)
    return np.where(lengths <= 0, 0, np.minimum(counts, -(-lengths // step)))


def _covered(lengths: Array, counts: Array, length: int, step: int) -> Array:
    """Return how many tokens are in some window: all, except those in gaps."""
    last = np.minimum(length, lengths - (counts - 1) * step)
    return np.where(counts > 0, (counts - 1) * min(length, step) + last, 0)


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

    def slots(self, source: int, rows: Sequence[int]) -> list[int]:
        """Return the slots that rows of a source have: the inverse of `split`."""
        low, high, path, slots = 0, self.count, [], list(rows)
        while high - low > 1:
            middle, share = (low + high) // 2, self._left[low, high]
            path.append((source < middle, share))
            low, high = (low, middle) if source < middle else (middle, high)
        for is_left, share in reversed(path):
            # The first slot n with floor((n + 1) · share) > row, or with n + 1 minus it.
            if is_left:
                slots = [-(-((row + 1) << BITS) // share) - 1 for row in slots]
            else:
                slots = [(row << BITS) // ((1 << BITS) - share) for row in slots]
        return slots

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


def codes(store: Store, name: str) -> Array:
    """Return a number for the value that each record has in a column, (records,) int64.

    Equal values have equal numbers. Raises `UsageError` where there is no such column.
    """
    column = store.schema.get(name)
    if column is None or column.per != "record" or column.width:
        names = [key for key, c in store.schema.items() if c.per == "record" and not c.width]
        raise UsageError(
            f"the store has no column {name!r} with one value per record",
            where=str(store.path),
            hint=nearest(name, names),
        )
    if column.dtype != "utf8":
        return np.unique(store.column(name), return_inverse=True)[1].reshape(-1).astype(np.int64)
    numbers: dict[bytes, int] = {}
    parts = [np.zeros(0, np.int64)]
    for number, entry in enumerate(store.shards):
        rows, place = store.shard(number).text(name, 0, entry.records).distinct()
        table = np.asarray([numbers.setdefault(row, len(numbers)) for row in rows], np.int64)
        parts.append(table[place] if len(table) else np.zeros(0, np.int64))
    return np.concatenate(parts)
