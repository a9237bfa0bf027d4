"""Copies of a store's tokens in rows, as batches need them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tokmill.store.schema import Array, has_phrases
from tokmill.store.store import Store


@dataclass(slots=True)
class Spans:
    """Spans in the order in which they fill their rows; all arrays int64, one value a span.

    `row`: row of the batch; `record`: record of the store; `document`: number of the document in
    its row; `start`, `stop`: token positions in the record.
    """

    row: Array
    record: Array
    document: Array
    start: Array
    stop: Array


Run = tuple[int, int, int, int, int]
"""Shard, record in the shard, first token (in the shard; with phrases: in the record), number of
tokens, target."""


class Gather:
    """Fills `size` rows of `length` tokens from the left with spans of a store.

    Spans of one row must be adjacent. Neighbouring records lie side by side on disk, so one copy
    fills a run of spans. Any row can be filled, by any thread, at any time.
    """

    def __init__(self, store: Store, spans: Spans, size: int, length: int) -> None:
        self.store, self.length = store, length
        self.phrases = has_phrases(store.schema)
        parts = [spans.row, spans.record, spans.document, spans.start, spans.stop]
        if (np.diff(spans.row) < 0).any():
            order = np.argsort(spans.row, kind="stable")
            parts = [part[order] for part in parts]
        row, record, document, start, stop = parts
        lengths = stop - start
        ends = np.concatenate([[0], np.cumsum(lengths)])
        first_span = np.searchsorted(row, np.arange(size + 1))
        begins = ends[first_span]
        # Each row gets a last entry for its padding (document -1), so that entries and lengths
        # describe every position.
        last = first_span[1:]
        self._document = np.insert(document, last, -1).astype(np.int32)
        self._length = np.insert(lengths, last, length - np.diff(begins))
        self._first_span = first_span + np.arange(size + 1)
        shard, local, token = store.places(record)
        if not self.phrases:
            start = token + start
        place = ends[:-1]
        new_run = np.ones(len(row), bool)
        if not self.phrases:
            new_run[1:] = (row[1:] != row[:-1]) | (shard[1:] != shard[:-1])
            new_run[1:] |= np.diff(start - place) != 0
        run = np.flatnonzero(new_run)
        self._first_run = np.searchsorted(row[run], np.arange(size + 1))
        self._row, self._place = row[run], place[run] - begins[row[run]]
        self._shard, self._record, self._start = shard[run], local[run], start[run]
        self._count = np.diff(place[run], append=ends[-1])

    def documents(self, first: int, last: int) -> Array:
        """Return the number of each token's document in the rows first … last - 1.

        Int32 (rows, length), -1 at padding.
        """
        here = slice(self._first_span[first], self._first_span[last])
        return np.repeat(self._document[here], self._length[here]).reshape(-1, self.length)

    def copy(self, first: int, last: int, columns: dict[str, Array], to: Array) -> None:
        """Copy the tokens of the rows first … last - 1 into rows `to` of arrays (rows, length)."""
        begin = int(self._first_run[first])
        # In the order of shards, so that each is looked up (and mapped) once.
        run = begin + np.argsort(self._shard[begin : self._first_run[last]], kind="stable")
        target = to[self._row[run] - first] * self.length + self._place[run]
        flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in columns.items()}
        runs = [part[run].tolist() for part in (self._shard, self._record, self._start)]
        runs += [self._count[run].tolist(), target.tolist()]
        copy = self._copy_phrases if self.phrases else self._copy_tokens
        copy(flat, zip(*runs, strict=True))

    def _copy_tokens(self, flat: dict[str, Array], runs: Iterable[Run]) -> None:
        last, pairs = -1, []
        for shard, _, start, count, to in runs:
            if shard != last:
                last, file = shard, self.store.shard(shard)
                pairs = [(array, file[name]) for name, array in flat.items()]
            for array, stored in pairs:
                array[to : to + count] = stored[start : start + count]

    def _copy_phrases(self, flat: dict[str, Array], runs: Iterable[Run]) -> None:
        coded = [name for name in flat if self.store.schema[name].phrase]
        for shard, record, start, count, to in runs:
            file = self.store.shard(shard)
            values = file.phrase_tokens(record, start, start + count, coded)
            for name, value in zip(coded, values, strict=True):
                flat[name][to : to + count] = value
            base = int(file["offsets"][record]) + start
            for name in flat.keys() - coded:
                flat[name][to : to + count] = file[name][base : base + count]
