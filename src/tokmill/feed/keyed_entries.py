"""Entries of alike records, which have equal keys, such as a function at several levels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.feed.halves import codes
from tokmill.feed.order import key, shard_groups
from tokmill.feed.rows import Numbering, Rows
from tokmill.store.checks.hashes import first_of_equals, linked, store_digests
from tokmill.store.schema import Array
from tokmill.store.shards.gather import Spans
from tokmill.store.store import Store


class KeyedEntries(Rows):
    """Entries of several rows: records that are equal in all columns `same`, a record per row.

    An entry is one key. Of its records, `size` are drawn anew each epoch, or all if they are fewer;
    seed and epoch decide which, so any process can make any entry.

    Args:
        store: with the key columns.
        length: tokens of a row; longer records are cut off at the end.
        same: columns with one value per record.
        size: records of an entry, at least 2.
        shards: number of shards that are mixed at a time, drawn by `seed`; 0: all. An entry belongs
            to the shard of its first record.
        seed: of this draw, and of the records.

    `alone`: number of records that are in no entry, as no other one has their key, or as they are
    empty.

    Raises `UsageError` if there is no such column, or if no two records are alike.
    """

    def __init__(
        self,
        store: Store,
        length: int,
        same: Sequence[str],
        *,
        size: int = 2,
        shards: int = 0,
        seed: int = 0,
    ) -> None:
        if length < 1 or size < 2 or not same:
            raise UsageError(
                f"entries of {size} rows of {length} tokens that are equal in {len(same)} columns "
                "cannot be made",
                hint="at least 2 rows, 1 token and 1 column",
            )
        self.store, self.length, self.size, self.seed = store, length, size, seed
        lengths = np.diff(store.offsets())
        filled = np.flatnonzero(lengths > 0)
        keys = np.stack([codes(store, name)[filled] for name in same], axis=1)
        number, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)[1:]
        together = counts[number.reshape(-1)] > 1
        records, number = filled[together], number.reshape(-1)[together]
        if not len(records):
            raise UsageError(
                f"no two records are equal in {', '.join(same)}",
                where=str(store.path),
                hint="--set 'task.same=[\"COLUMN\"]' names other columns; for programs of several "
                "compilers and levels build the store with --layout",
            )
        # Entries stand in the order of their first records, the records of each in their order.
        first = np.full(len(counts), len(lengths), np.int64)
        np.minimum.at(first, number, records)
        order = np.lexsort((records, first[number]))
        self.members = records[order]
        begins = first[number[order]]
        self._begin = np.append(np.flatnonzero(np.diff(begins, prepend=-1)), len(records))
        self.alone = len(lengths) - len(records)
        ends = np.cumsum([0, *(part.records for part in store.shards)])
        borders = np.searchsorted(begins[self._begin[:-1]], ends)
        self._numbering = Numbering(borders, shard_groups(len(store.shards), shards, seed))
        self.groups = self._numbering.groups
        # What an epoch reads if all records of a key are equally long.
        kept = np.minimum(lengths[self.members], length)
        share = np.minimum(size / np.diff(self._begin), 1)
        self.tokens = int((np.add.reduceat(kept, self._begin[:-1]) * share).sum())

    def __len__(self) -> int:
        return len(self._begin) - 1

    def sizes(self, entries: Array) -> Array:
        entry = self._numbering.in_store_order(np.asarray(entries, np.int64))
        sizes: Array = np.minimum(self._begin[entry + 1] - self._begin[entry], self.size)
        return sizes

    def spans(self, rows: Array, epoch: int = 0) -> Spans:
        (drawn,) = self.value_records(rows, epoch)
        offsets = self.store.offsets()
        nothing = np.zeros(len(drawn), np.int64)
        stop = np.minimum(offsets[drawn + 1] - offsets[drawn], self.length)
        return Spans(np.arange(len(drawn)), drawn, nothing, nothing, stop)

    @property
    def value_stores(self) -> Sequence[Store]:
        return (self.store,)

    def value_records(self, entries: Array, epoch: int = 0) -> Sequence[Array]:
        entry = self._numbering.in_store_order(np.asarray(entries, np.int64))
        counts = self._begin[entry + 1] - self._begin[entry]
        place = np.repeat(np.arange(len(entry)), counts)
        within = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        record = self.members[self._begin[entry][place] + within]
        order = np.lexsort((key(self.seed, epoch, record.astype(np.uint64)), place))
        return (record[order][within < self.size],)

    def families(self) -> Array:
        """Return families of records with equal keys or equal tokens."""
        first = np.repeat(self.members[self._begin[:-1]], np.diff(self._begin))
        equal = first_of_equals(store_digests(self.store))
        count = len(self.store)
        return linked(count, (self.members, first), (np.arange(count), equal))

    def shared(self, rows: Array) -> Array:
        """Return 0 for each entry: rows count all their tokens."""
        return np.zeros(len(rows), np.int64)
