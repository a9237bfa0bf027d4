"""Batches of rows: the batch of any step is computed directly, for any number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tokmill.base.errors import TokmillError, UsageError, shell_word
from tokmill.feed.entries import FAMILY, Values, Vectors
from tokmill.feed.order import Order, kept, key
from tokmill.feed.rows import Mix, Rows, column_dtypes, row_shares
from tokmill.store.gather import Gather
from tokmill.store.schema import Array, ranges
from tokmill.store.store import Store


@dataclass(slots=True)
class Batch:
    """B rows of T tokens.

    `columns`: name → (B, T) in the store's dtype, 0 at padding; vectors: (B, T, W).
    `document`: (B, T) int32, the number of the token's document within its row, -1 at padding; a
    number is left out before the rest of a document that is cut (`Packed`).
    `key`: (B,) uint64 = hash(seed, epoch, row), with several stores hash(seed, store, epoch, row).
    All random choices in a row come from its key, so they do not depend on the process.
    `values`: name → (B,) or (B, width), columns with a value per record.
    `targets`: set by the task; name → (B,), or (B, K, …) with values along the positions of a row
    (K at most T), which are cut with the row; int64 (-1: nothing to learn) or float32. Several
    values per row that do not belong to positions are put into `values`.
    `shared`: (B,) int64, number of tokens at the beginning of the row that another row of the epoch
    has too; they are read here and counted there.
    `entry`: (B,) int64, ascending: the entry of the batch to which a row belongs, -1: none. Rows of
    an entry are adjacent and stay together. By default each row is an entry.
    """

    columns: dict[str, Array]
    document: Array
    key: Array
    values: dict[str, Array] = field(default_factory=dict)
    targets: dict[str, Array] = field(default_factory=dict)
    shared: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    entry: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if len(self.entry) != len(self.key):
            self.entry = np.arange(len(self.key))

    def __len__(self) -> int:
        return len(self.key)

    def rows(self, which: slice | Array, length: int | None = None) -> Batch:
        """Return some of the rows, cut to `length` tokens; views for a slice.

        After `length` there must be only padding.
        """
        return Batch(
            {name: value[which, :length] for name, value in self.columns.items()},
            self.document[which, :length],
            self.key[which],
            {name: value[which] for name, value in self.values.items()},
            {name: _cut(value, which, length) for name, value in self.targets.items()},
            self.shared[which] if len(self.shared) else self.shared,
            self.entry[which],
        )


def _cut(target: Array, which: slice | Array, length: int | None) -> Array:
    return target[which, :length] if target.ndim > 1 else target[which]


class LaidOut(NamedTuple):
    """Entries of one source, and everything about their rows except the tokens.

    `key` and `shared` have a value per row. `begins`: the first row of each entry, and the number
    of rows; None: each entry is one row. `records`: for each of the source's `value_stores`, the
    record of each row; empty if no values are wanted.
    """

    source: int
    key: Array
    shared: Array
    gather: Gather
    begins: Array | None
    records: Sequence[Array]


class Piece(NamedTuple):
    """The entries (later: rows) `first` … `last` - 1 of `laid`; `to`: their places in a batch."""

    laid: LaidOut
    first: int
    last: int
    to: Array


class Feed:
    """The batches of a training run: a pure function of the step.

    `rows`: rows of one store, or of several stores that are mixed. `batch_size`: the number of
    entries of a step in all processes (`feed/entries.py`; usually an entry is a row); each process
    gets an equal part. `weights`: relative numbers of tokens from each store; without weights, in
    proportion to the sizes of the stores, so that all end together. `Order` decides the order of
    the entries of a store, `Mix` the next store.

    `columns`: columns with a value per token (for `Batch.columns`), or with a value per record (for
    `Batch.values`, if each row has one record); None: all with a value per token. `vectors`: for
    each source, name → vectors that are put into `Batch.columns` under this name.
    """

    def __init__(
        self,
        rows: Rows | Iterable[Rows],
        batch_size: int,
        *,
        weights: Iterable[float] = (),
        seed: int = 0,
        shuffle: bool = True,
        columns: Iterable[str] | None = None,
        vectors: Sequence[Mapping[str, Vectors]] = (),
    ) -> None:
        # A store is iterable too, but is refused below.
        if isinstance(rows, Iterable) and not isinstance(rows, Store):
            self.sources: list[Rows] = list(rows)
        else:
            self.sources = [rows]
        if not self.sources:
            raise UsageError(
                "a feed takes rows: there are none",
                hint="tokmill.Feed(tokmill.Windows(store, 128), batch_size=8)",
            )
        for source in self.sources:
            self._check_rows(source, batch_size)
        if batch_size < 1:
            raise UsageError(
                f"a batch of {batch_size} rows cannot be made", hint="a batch has at least one row"
            )
        self.length, self.batch_size, self.seed = self.sources[0].length, batch_size, seed
        stores = [source.store for source in self.sources]
        names = None if columns is None else list(columns)
        wanted = [] if names is None else [n for n in names if self._is_value(n)]
        self.values = Values(self.sources, wanted)
        if names is not None:
            names = [name for name in names if name not in wanted]
        self.dtypes = column_dtypes(stores, names)
        self.vectors = vectors or [{} for _ in stores]
        self.sizes = [id_counts(store) for store in stores]
        shares = row_shares(self.sources, list(weights))
        self.mix = Mix(shares)
        self.rows_in_all = int(sum(shares) * sum(source.tokens for source in self.sources))
        self.orders = [
            Order(source.groups, *self._keys(number), shuffle=shuffle)
            for number, source in enumerate(self.sources)
        ]
        # Two blocks a source: the current one, and the one before, which another step may need.
        self._block = kept(self._make_block, 2 * len(self.sources))

    @property
    def stores(self) -> list[Store]:
        """The stores that are read: of tokens, and of the vectors beside them."""
        vectors = [vector.store for named in self.vectors for vector in named.values()]
        return [*(source.store for source in self.sources), *vectors]

    def _is_value(self, name: str) -> bool:
        """Say whether a column has a value per record in some source (and no value per token)."""
        return name == FAMILY or any(
            name not in source.store.token_columns
            and any(name in store.schema for store in (source.store, *source.value_stores))
            for source in self.sources
        )

    def _check_rows(self, source: Rows, batch_size: int) -> None:
        if isinstance(source, Store) or not hasattr(source, "spans"):
            raise UsageError(
                f"a feed takes rows, not a {type(source).__name__}: say how the store is cut",
                hint=f"tokmill.Feed(tokmill.Windows(store, 128), batch_size={batch_size})",
            )
        if len(source) == 0 or not source.tokens:
            raise UsageError(
                "the store has no rows to train on",
                where=str(source.store.path),
                hint="it holds no tokens: look at it with `tokmill inspect`",
            )
        if source.length != self.sources[0].length:
            raise UsageError(
                f"rows of {source.length} and of {self.sources[0].length} tokens make no batch",
                where=str(source.store.path),
                hint="cut all stores to rows of one length",
            )

    def _keys(self, number: int) -> tuple[int, ...]:
        """Return the parts of a source's keys besides epoch and row."""
        return (self.seed,) if len(self.sources) == 1 else (self.seed, number)

    def __len__(self) -> int:
        """Return the number of whole batches in an epoch (at least 1).

        With weights, an epoch ends when as many tokens were read as all stores hold.
        """
        return max(1, self.rows_in_all // self.batch_size)

    def _slots(self, step: int, rank: int, world: int) -> tuple[int, int]:
        """Return (first, last + 1) of a rank's slots at a step."""
        if step < 0 or not 0 <= rank < world:
            raise UsageError(
                f"there is no step {step} of process {rank} of {world}",
                hint="steps and processes are counted from 0",
            )
        share = rows_per_process(self.batch_size, world)
        first = step * self.batch_size + rank * share
        return first, first + share

    def rows_of(self, step: int, rank: int = 0, world: int = 1) -> tuple[Array, Array, Array]:
        """Return (epoch, row, source) of a rank's rows at a step; all int64 (batch_size / world,).

        `source` is the number of the store.
        """
        first, last = self._slots(step, rank, world)
        epoch, row, source = np.zeros((3, last - first), np.int64)
        for number, (slots, start) in enumerate(self.mix.split(first, last)):
            epoch[slots], row[slots] = self.orders[number].rows(start, start + len(slots))
            source[slots] = number
        return epoch, row, source

    def shards_of(self, step: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Store, int]]:
        """Yield the shards of which a rank's rows at a step are tokens, each with its store."""
        epochs, rows, sources = self.rows_of(step, rank, world)
        for number in np.unique(sources).tolist():
            here, store = sources == number, self.sources[number].store
            for epoch in np.unique(epochs[here]).tolist():
                spans = self.sources[number].spans(rows[here & (epochs == epoch)], epoch)
                for shard in np.unique(store.shards_of(spans.record)).tolist():
                    yield store, shard

    def describe(self, epoch: Array, row: Array, source: Array) -> str:
        """Return which rows these are in words, such as "epoch 0, rows 7, 3"; at most 8 a store."""
        parts = []
        for number in np.unique(source).tolist():
            places = np.flatnonzero(source == number)
            named = ", ".join(map(str, row[places[:8]])) + (", …" if len(places) > 8 else "")
            of = f" of {self.sources[number].store.path}" if len(self.sources) > 1 else ""
            parts.append(f"epoch {epoch[places[0]]}, rows {named}{of}")
        return "; ".join(parts)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return a rank's part of the batch of a step. Pure: same arguments, same batch."""
        first, last = self._slots(step, rank, world)
        pieces = []
        for number, (slots, start) in enumerate(self.mix.split(first, last)):
            done = 0
            for epoch, block, a, b in self.orders[number].parts(start, start + len(slots)):
                pieces.append(Piece(self._block(number, epoch, block), a, b, slots[done:][: b - a]))
                done += b - a
        return self._fill(pieces, last - first)

    def make(self, epoch: Array, row: Array, source: Array | None = None) -> Batch:
        """Return the batch of the given rows; without `source`, of the first source."""
        source = np.zeros(len(row), np.int64) if source is None else source
        pieces = []
        for number, era in dict.fromkeys(zip(source.tolist(), epoch.tolist(), strict=True)):
            here = np.flatnonzero((source == number) & (epoch == era))
            pieces.append(Piece(self._lay_out(number, era, row[here]), 0, len(here), here))
        return self._fill(pieces, len(row))

    def _make_block(self, number: int, epoch: int, block: int) -> LaidOut:
        return self._lay_out(number, epoch, self.orders[number].block(epoch, block))

    def _lay_out(self, number: int, epoch: int, row: Array) -> LaidOut:
        """Compute everything about rows of one source except their tokens."""
        rows, sizes = self.sources[number], self.sources[number].sizes(row)
        parts, begins, shared, count = [row], None, rows.shared(row), len(row)
        if sizes is not None:
            begins = np.concatenate([[0], np.cumsum(sizes)])
            shared, count = np.repeat(shared, sizes), int(begins[-1])
            # Each row of an entry has its own key.
            parts = [np.repeat(row, sizes), np.arange(count) - np.repeat(begins[:-1], sizes)]
        gather = Gather(rows.store, rows.spans(row, epoch), count, self.length)
        records = rows.value_records(row, epoch) if self.values.dtypes else ()
        keys = key(*self._keys(number), epoch, *parts)
        return LaidOut(number, keys, shared, gather, begins, records)

    def _fill(self, pieces: Sequence[Piece], size: int) -> Batch:
        entry = np.arange(size)
        if any(piece.laid.begins is not None for piece in pieces):
            pieces, entry = _as_rows(pieces, size)
            size = len(entry)
        columns = {name: np.zeros((size, self.length), kind) for name, kind in self.dtypes.items()}
        document = np.empty((size, self.length), np.int32)
        keys, shared = np.empty(size, np.uint64), np.empty(size, np.int64)
        values = {name: np.zeros(size, kind) for name, kind in self.values.dtypes.items()}
        vectors: dict[str, Array] = {}
        for laid, first, last, to in pieces:
            rows = self.sources[laid.source]
            records = [part[first:last] for part in laid.records]
            for name, value in self.values.read(laid.source, rows, records).items():
                values[name][to] = value
            laid.gather.copy(first, last, columns, to)
            keys[to], shared[to] = laid.key[first:last], laid.shared[first:last]
            documents, piece_columns = laid.gather.documents(first, last), columns
            # Usually a batch is one piece, whose arrays can be used without a copy.
            if len(pieces) == 1:
                document = documents
            else:
                document[to] = documents
                piece_columns = {name: value[to] for name, value in columns.items()}
            self._check_ids(laid.source, piece_columns)
            for name, vector in self.vectors[laid.source].items():
                filled = vector.of(piece_columns, documents)
                # They are in no shard, so they are kept apart from what is copied out of shards.
                whole = vectors.setdefault(name, np.zeros((size, *filled.shape[1:]), np.float32))
                whole[to] = filled
        columns |= vectors
        return Batch(columns, document, keys, values, shared=shared, entry=entry)

    def _check_ids(self, number: int, columns: Mapping[str, Array]) -> None:
        """Refuse ids that the vocabulary does not have: the store is damaged."""
        for name, size in self.sizes[number].items():
            ids = columns.get(name)
            if ids is None or not ids.size:
                continue
            worst = int(ids.max())
            if worst < size:
                worst = int(ids.min()) if ids.dtype.kind == "i" else 0
            if not 0 <= worst < size:
                path = self.sources[number].store.path
                place = shell_word(path)
                raise TokmillError(
                    f"the column {name!r} holds the id {worst}, but its ids are 0 to {size - 1}: "
                    "a shard is damaged",
                    where=str(path),
                    hint=f"`tokmill store validate {place}` finds the shard",
                )


def _as_rows(pieces: Sequence[Piece], size: int) -> tuple[list[Piece], Array]:
    """Return pieces of `size` entries as pieces of rows, and the entry of each row (int64)."""
    sizes = np.ones(size, np.int64)
    for laid, first, last, to in pieces:
        if laid.begins is not None:
            sizes[to] = np.diff(laid.begins[first : last + 1])
    begins = np.cumsum(sizes) - sizes
    parts = []
    for laid, first, last, to in pieces:
        counts = sizes[to]
        if laid.begins is not None:
            first, last = int(laid.begins[first]), int(laid.begins[last])
        parts.append(Piece(laid, first, last, ranges(begins[to], counts)))
    return parts, np.repeat(np.arange(size), sizes)


def rows_per_process(batch_size: int, world: int) -> int:
    """Return the number of rows of a batch in each of `world` processes; all must be equal."""
    if batch_size % world:
        raise UsageError(
            f"a batch of {batch_size} rows cannot be split over {world} processes",
            hint=nearest_sizes(batch_size, world),
        )
    return batch_size // world


def nearest_sizes(size: int, unit: int) -> str:
    """Return a hint with the multiples of `unit` nearest to a size."""
    below, above = size // unit * unit, -(-size // unit) * unit
    return f"the nearest sizes are {below} and {above}" if below else f"the least size is {above}"


def id_counts(store: Store) -> dict[str, int]:
    """Return column → number of its ids, if a vocabulary or the manifest's range states it."""
    sizes: dict[str, int] = {}
    for name, column in store.schema.items():
        if column.per != "token" or column.dtype == "utf8":
            continue
        if column.vocab in store.vocabularies:
            sizes[name] = store.vocabularies[column.vocab].size
        elif name == "token" and name in store.manifest.ranges:
            sizes[name] = int(store.manifest.ranges[name][1]) + 1
    return sizes
