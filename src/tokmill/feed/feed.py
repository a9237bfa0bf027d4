"""Rows as batches: any batch of any step by arithmetic, for any number of processes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokmill.errors import TokmillError, UsageError
from tokmill.feed.order import key, permute
from tokmill.feed.rows import Rows
from tokmill.store.schema import Array
from tokmill.store.store import Store


@dataclass(slots=True)
class Batch:
    """B rows of T tokens.

    `columns`: name → (B, T) in the store's dtype, 0 where nothing stands. `document`: (B, T)
    int32, the number of the token's document within its row, -1 at padding. `values`: name → (B,)
    or (B, width), columns that have a value a record (of the row's first span). `key`: (B,) uint64
    = hash(seed, epoch, row): all random choices about a row come from it, so they do not depend on
    the process that makes them. `targets`: put in by the task; name → (B, T) int64, -1 where there
    is nothing to learn. `shared`: (B,) int64, how many tokens at the beginning of the row another
    row of the epoch holds too: they are read, and count there.
    """

    columns: dict[str, Array]
    document: Array
    key: Array
    values: dict[str, Array] = field(default_factory=dict)
    targets: dict[str, Array] = field(default_factory=dict)
    shared: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.key)

    def rows(self, start: int, stop: int) -> Batch:
        """Return some of the rows (views)."""
        return Batch(
            {name: value[start:stop] for name, value in self.columns.items()},
            self.document[start:stop],
            self.key[start:stop],
            {name: value[start:stop] for name, value in self.values.items()},
            {name: value[start:stop] for name, value in self.targets.items()},
            self.shared[start:stop],
        )


class Feed:
    """The batches of a training run: a pure function of the step.

    `batch_size` is the global number of rows a step; a process with rank r of w gets its w-th
    part. Position p of epoch e is row `permute(p)` with the seed and the epoch as keys.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        columns: Sequence[str] | None = None,
    ) -> None:
        if isinstance(rows, Store) or not hasattr(rows, "spans"):
            raise UsageError(
                f"a feed takes rows, not a {type(rows).__name__}: say how the store is cut",
                hint=f"tokmill.Feed(tokmill.Windows(store, 128), batch_size={batch_size})",
            )
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} rows cannot be made")
        if len(rows) == 0:
            raise UsageError(
                "the store has no rows to train on",
                where=str(rows.store.path),
                hint="it holds no tokens: look at it with `tokmill inspect`",
            )
        self.row_source, self.batch_size = rows, batch_size
        self.seed, self.shuffle = seed, shuffle
        self.columns = columns
        self.sizes = id_counts(rows.store)

    def __len__(self) -> int:
        """Return the number of whole batches in an epoch (at least 1)."""
        return max(1, len(self.row_source) // self.batch_size)

    def rows_of(self, step: int, rank: int = 0, world: int = 1) -> tuple[Array, Array]:
        """Return (epoch, row) of a rank's rows at a step; both int64 (batch_size / world,)."""
        if self.batch_size % world:
            below, above = (self.batch_size // world) * world, -(-self.batch_size // world) * world
            raise UsageError(
                f"a batch of {self.batch_size} rows cannot be split over {world} processes",
                hint=f"the nearest sizes are {below or world} and {above}",
            )
        share = self.batch_size // world
        first = step * self.batch_size + rank * share
        epoch, position = np.divmod(np.arange(first, first + share), len(self.row_source))
        if self.shuffle:
            row = position.copy()
            for number in np.unique(epoch):
                here = epoch == number
                row[here] = permute(position[here], len(self.row_source), self.seed, int(number))
        else:
            row = position
        return epoch, row

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return a rank's part of the batch of a step. Pure: same arguments, same batch."""
        epoch, row = self.rows_of(step, rank, world)
        return self.make(epoch, row)

    def make(self, epoch: Array, row: Array) -> Batch:
        """Return the batch of the given rows."""
        source, length = self.row_source, self.row_source.length
        keys = key(self.seed, epoch.astype(np.uint64), row.astype(np.uint64))
        size = len(row)
        document = np.full((size, length), -1, np.int32)
        shared = np.zeros(size, np.int64)
        columns: dict[str, Array] = {}
        for number in np.unique(epoch):
            here = np.flatnonzero(epoch == number)
            spans = source.spans(row[here], int(number))
            spans.row = here[spans.row]
            source.store.fill(spans, length, columns, document, size, self.columns)
            shared[here] = source.shared(row[here])
        self._check_ids(columns)
        return Batch(columns, document, keys, shared=shared)

    def _check_ids(self, columns: Mapping[str, Array]) -> None:
        """Refuse ids that the vocabulary does not have: the store's bytes are damaged."""
        for name, size in self.sizes.items():
            ids = columns.get(name)
            if ids is None or not ids.size:
                continue
            worst = int(ids.max())
            if worst < size:
                worst = int(ids.min()) if ids.dtype.kind == "i" else 0
            if not 0 <= worst < size:
                place = shlex.quote(str(self.row_source.store.path))
                raise TokmillError(
                    f"the column {name!r} holds the id {worst}, but its ids are 0 to {size - 1}: "
                    "a shard is damaged",
                    where=str(self.row_source.store.path),
                    hint=f"`tokmill store validate {place}` finds the shard, "
                    f"`tokmill store repair {place}` makes it again",
                )


def id_counts(store: Store) -> dict[str, int]:
    """Return column → number of its ids, where a vocabulary or the manifest's range says it."""
    sizes: dict[str, int] = {}
    for name, column in store.schema.items():
        if column.per != "token" or column.dtype == "utf8":
            continue
        if column.vocab in store.vocabularies:
            sizes[name] = store.vocabularies[column.vocab].size
        elif name == "token" and name in store.manifest.ranges:
            sizes[name] = int(store.manifest.ranges[name][1]) + 1
    return sizes
