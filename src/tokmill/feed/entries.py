"""Entries of several records: rows that belong together.

The records of an entry are named by columns of references, or follow from the order of the store.
An entry is a record of the store with these columns; its tokens come from the referred store.
Keyed entries are records with equal keys, such as a function at several levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.feed.order import key, shard_groups
from tokmill.feed.rows import Numbering, Rows, codes
from tokmill.store.checks.hashes import first_of_equals, linked, store_digests
from tokmill.store.gather import Spans
from tokmill.store.manifest import Overlay
from tokmill.store.schema import Array, has_entries
from tokmill.store.store import Store

FAMILY = "(family)"


def value_columns(store: Store) -> list[str]:
    return [n for n, c in store.schema.items() if c.per == "record" and c.dtype != "utf8"]


def is_number(store: Store, name: str) -> bool:
    """Say whether a column holds a whole number per record."""
    column = store.schema.get(name)
    return column is not None and column.per == "record" and column.is_whole and not column.width


class Values:
    """Columns with a value per record, for the rows of several sources.

    `dtypes`: name → dtype, with the width as its shape. Raises `UsageError` for a column that a
    source does not have, that holds strings, or if rows may have several records. `FAMILY` is no
    column, but the family of each row's own record (`Rows.families`).
    """

    def __init__(self, sources: Sequence[Rows], names: Sequence[str]) -> None:
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self._families: list[Array] = []
        if FAMILY in names:
            # No record of another source has the same number.
            first = np.cumsum([0, *(len(rows.store) for rows in sources)]).tolist()
            self._families = [rows.families() + n for n, rows in zip(first, sources, strict=False)]
            self.dtypes[FAMILY] = np.dtype(np.int64)
        names = [name for name in names if name != FAMILY]
        self._from: list[dict[str, int]] = []
        """For each source: name → number of the store among its `value_stores`."""
        for rows in sources:
            self._from.append({name: _store_of(rows, name) for name in names})
        for name in names:
            columns = [
                rows.value_stores[number[name]].schema[name]
                for rows, number in zip(sources, self._from, strict=True)
            ]
            widths = {column.width for column in columns}
            if len(widths) > 1:
                raise UsageError(
                    f"the column {name!r} has the widths {', '.join(map(str, sorted(widths)))}",
                    where=str(sources[-1].store.path),
                    hint="stores that are mixed need columns of one kind",
                )
            kind = np.result_type(*(column.numpy() for column in columns))
            if kind.kind == "f" and all(column.is_whole for column in columns):
                raise UsageError(
                    f"the column {name!r} has the types {', '.join(c.dtype for c in columns)}, and "
                    "no type holds the numbers of all",
                    where=str(sources[-1].store.path),
                    hint="stores that are mixed need columns of one kind",
                )
            self.dtypes[name] = np.dtype((kind, tuple(widths - {0})))

    def read(self, source: int, rows: Rows, records: Sequence[Array]) -> dict[str, Array]:
        """Return name → values of rows of a source, from `records` of each of its value stores."""
        values = {
            name: rows.value_stores[number].values(name, records[number])
            for name, number in self._from[source].items()
        }
        if self._families:
            values[FAMILY] = self._families[source][records[-1]]
        return values


def _store_of(rows: Rows, name: str) -> int:
    numbers = [n for n, store in enumerate(rows.value_stores) if name in value_columns(store)]
    if numbers:
        return numbers[-1 if name in rows.of_rows else 0]
    if not rows.value_stores:
        raise UsageError(
            f"the column {name!r} has a value per record, and a row may hold several records",
            where=str(rows.store.path),
            hint='take one record per row: --set task.rows="whole"',
        )
    names = [name for store in rows.value_stores for name in value_columns(store)]
    strings = [store for store in rows.value_stores if name in store.schema]
    raise UsageError(
        f"the column {name!r} holds strings, not numbers"
        if strings
        else f"the store has no column {name!r} with a value per token or a record",
        where=str(rows.value_stores[0].path),
        hint=nearest(name, names),
    )


class Vectors:
    """Vectors of referred records, for rows that hold references, or of the tokens themselves.

    `column`: column of the rows, with a record number of `store` for each token; `name`: a column
    of `store` (often of an overlay) with a vector per record; or both are one column with a vector
    per token. Raises `UsageError` if there is none.
    """

    def __init__(self, column: str, store: Store, name: str) -> None:
        self.column, self.store, self.name = column, store, name
        own = store.schema.get(name)
        self.own = own is not None and own.per == "token" and own.width > 0
        names = [n for n in value_columns(store) if store.schema[n].width]
        if name not in names and not self.own:
            raise UsageError(
                f"the store has no column {name!r} with a vector per record",
                where=str(store.path),
                hint=nearest(name, names) if names else "`tokmill embed RUN STORE` makes one",
            )
        self.width = store.schema[name].width

    @property
    def model(self) -> str:
        """Digest of the model that made the vectors (`tokmill embed`); "": it is not known."""
        for laid in self.store.overlays.values():
            stated = laid.manifest.overlay
            if self.name in laid.schema and isinstance(stated, Overlay):
                return str(stated.about.get("model", ""))
        return ""

    def of(self, columns: Mapping[str, Array], document: Array) -> Array:
        """Return (B, T, W) float32, the vector of each position's record; 0 at padding."""
        if self.own:
            return columns[self.column].astype(np.float32)
        filled = document >= 0
        # A record that several positions name is read once.
        records, which = np.unique(
            columns[self.column][filled].astype(np.int64), return_inverse=True
        )
        vectors = np.zeros((*document.shape, self.width), np.float32)
        vectors[filled] = self.store.values(self.name, records)[which]
        return vectors


LOOKED_AT = 65_536
"""Entries that are read at a time, to count their tokens."""


class Tuples(Rows):
    """Entries of several rows, one record per row: a triplet, a group.

    Args:
        store: the store of the entries, one per record.
        length: tokens of a row; longer records are cut off at the end.
        columns: columns of `store` with record numbers of one other store. Either several columns
            with a number or a vector of numbers per record: the entry has these records, in this
            order. Or one column with a value per token: the entry has one record for each token.
            Without columns an entry has `size` consecutive records of `store`; records left over
            at the end are in no entry.
        size: records of an entry, without `columns`.
        shards: number of shards of `store` that are mixed at a time, drawn by `seed`; 0: all.
        seed: seed of this draw.
        of_rows: columns with a value per record that are read of each row's own record, also if the
            store of the entries has them.
        unlike: places within an entry whose records are not like the others (`families`).
        group: record column of numbers; entries, or records, with equal numbers are similar.

    The attribute `store` is then the store of the tokens, `listed` the store of the entries.

    Raises:
        UsageError: the columns are not as described, or an entry names no records.
        TokmillError: a reference cannot be opened (`Store.reference`).
    """

    def __init__(
        self,
        store: Store,
        length: int,
        columns: Sequence[str] = (),
        *,
        size: int = 2,
        shards: int = 0,
        seed: int = 0,
        of_rows: Sequence[str] = (),
        unlike: Sequence[int] = (),
        group: str = "",
    ) -> None:
        if length < 1 or size < 1:
            raise UsageError(
                f"entries of {size} rows of {length} tokens cannot be made",
                hint="both are at least 1",
            )
        self.listed, self.length, self.columns = store, length, tuple(columns)
        self.of_rows, self.unlike, self.group = frozenset(of_rows), tuple(unlike), group
        self.size, self.of_tokens, self.store = size, False, store
        if columns:
            referred = [store.reference(name) for name in columns]
            self.size = sum(max(1, store.schema[name].width) for name in columns)
            self.store = referred[0]
            kinds = {store.schema[name].per for name in columns}
            self.of_tokens = kinds == {"token"}
            if {one.fingerprint for one in referred} != {referred[0].fingerprint}:
                raise UsageError(
                    f"the columns {', '.join(columns)} refer to several stores",
                    where=str(store.path),
                    hint="an entry has records of one store; `tokmill build select` merges stores",
                )
            if len(kinds) > 1 or (self.of_tokens and len(columns) > 1):
                raise UsageError(
                    f"the columns {', '.join(columns)} make no entries",
                    where=str(store.path),
                    hint="several columns need a value per record; a single one may have a value "
                    "per token",
                )
        empty = int(np.count_nonzero(np.diff(store.offsets()) == 0)) if self.of_tokens else 0
        if empty:
            raise UsageError(
                f"{empty:,} records of {store.records:,} name no record in {columns[0]!r}",
                where=str(store.path),
                hint="`tokmill build select STORE --min-length 1 -o NEW` leaves them out",
            )
        # Without columns the last entry that begins in a shard may end in the next one.
        ends = np.cumsum([0, *(part.records for part in store.shards)])
        borders = ends if columns else ends // size
        self._count = int(borders[-1])
        self._numbering = Numbering(borders, shard_groups(len(store.shards), shards, seed))
        self.groups = self._numbering.groups

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> int:  # type: ignore[override]
        """Tokens that the rows of an epoch hold."""
        return self._counted[0]

    @property
    def cut_tokens(self) -> int:
        """Tokens of an epoch that are cut off, as rows are too short."""
        return self._counted[1]

    @property
    def cut_records(self) -> int:
        """Records of an epoch that are cut, counted once for each entry that names them."""
        return self._counted[2]

    @cached_property
    def _counted(self) -> tuple[int, int, int]:
        lengths, counts = np.diff(self.store.offsets()), np.zeros(3, np.int64)
        for start in range(0, len(self), LOOKED_AT):
            sizes, records = self.records(np.arange(start, min(start + LOOKED_AT, len(self))))
            kept = np.minimum(lengths[records], self.length)
            cut = lengths[records] - kept
            counts += kept.sum(), cut.sum(), np.count_nonzero(cut)
        tokens, cut_tokens, cut_records = counts.tolist()
        return tokens, cut_tokens, cut_records

    def records(self, entries: Array) -> tuple[Array, Array]:
        """Return (number of records of each entry, the records of all entries in order); int64.

        Raises `TokmillError` for a number that the referred store does not have.
        """
        entry = self._numbering.in_store_order(np.asarray(entries, np.int64))
        sizes = np.full(len(entry), self.size, np.int64)
        if not self.columns:
            return sizes, (entry[:, None] * self.size + np.arange(self.size)).ravel()
        if self.of_tokens:
            offsets, name = self.listed.offsets(), self.columns[0]
            sizes = offsets[entry + 1] - offsets[entry]
            begins, ends = np.cumsum(sizes) - sizes, np.cumsum(sizes)
            records = np.zeros(int(sizes.sum()), np.int64)
            shards, _, first = self.listed.places(entry)
            for shard, token, begin, end in zip(shards, first, begins, ends, strict=True):
                stored = self.listed.shard(int(shard))[name]
                records[begin:end] = stored[token : token + end - begin]
        else:
            parts = [self.listed.values(name, entry) for name in self.columns]
            records = np.column_stack(parts).astype(np.int64).ravel()
        wrong = (records < 0) | (records >= self.store.records)
        if wrong.any():
            raise TokmillError(
                f"a reference names the record {records[wrong][0]} of {self.store.path}, whose "
                f"records are 0 to {self.store.records - 1}: a shard is damaged",
                where=str(self.listed.path),
                hint=f"`tokmill store validate {self.listed.path}` finds it",
            )
        return sizes, records

    def families(self) -> Array:
        """Return families of records that one entry says are similar, or its group; without groups
        also those with equal tokens.
        """
        count, entries = len(self.store), np.arange(len(self))
        sizes, records = self.records(entries)
        begins = np.cumsum(sizes) - sizes
        heads, places = records[begins], np.arange(len(records)) - np.repeat(begins, sizes)
        positives = ~np.isin(places, self.unlike)
        links = [(np.repeat(heads, sizes)[positives], records[positives])]
        if self.columns and is_number(self.listed, self.group):
            numbers = self.listed.column(self.group)[self._numbering.in_store_order(entries)]
            links.append((heads, heads[first_of_equals(numbers)]))
        else:
            schema = self.store.schema
            content = "content" if has_entries(schema) else ""
            name = self.group if is_number(self.store, self.group) else content
            values = self.store.column(name) if name else store_digests(self.store)
            links.append((np.arange(count), first_of_equals(values)))
        return linked(count, *links)

    def sizes(self, entries: Array) -> Array:
        return self.records(entries)[0]

    def spans(self, rows: Array, epoch: int = 0) -> Spans:
        records, offsets = self.records(rows)[1], self.store.offsets()
        stop = np.minimum(offsets[records + 1] - offsets[records], self.length)
        nothing = np.zeros_like(records)
        return Spans(np.arange(len(records)), records, nothing, nothing, stop)

    @property
    def value_stores(self) -> Sequence[Store]:
        """The store of the entries, and that of the tokens."""
        return (self.listed, self.store) if self.columns else (self.store,)

    def value_records(self, entries: Array, epoch: int = 0) -> Sequence[Array]:
        """Return for each row the record of its entry, and its own record."""
        sizes, records = self.records(entries)
        if not self.columns:
            return (records,)
        return np.repeat(self._numbering.in_store_order(entries), sizes), records


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

    Raises `UsageError` if there is no such column, or if no two records are similar.
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
        return np.minimum(self._begin[entry + 1] - self._begin[entry], self.size)

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
