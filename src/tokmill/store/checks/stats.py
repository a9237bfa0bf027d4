"""Statistics of a store: lengths, padding, use of the vocabulary, records that were left out.

All figures are exact for the shards that are read. Memory: the map of one shard, an array of the
size of the vocabulary for each column, and the distinct lengths (at most √(2 · tokens)).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from tokmill.base.errors import UsageError
from tokmill.store.schema import PHRASE_BIT, Array, Column
from tokmill.store.shards.shard import Shard
from tokmill.store.store import Store

BLOCK = 1 << 22
"""Tokens that are read at a time."""
LARGEST = 1 << 24
"""Columns with larger ids are not counted: the table of counts would be too large."""
FREQUENT = 20


class Lengths(msgspec.Struct, frozen=True):
    """Lengths of records in tokens, including the `eot` token.

    The quantiles p90 and p99 are the smallest length such that a share of at least so many records
    is not longer; so it is a length that occurs. The median of an even number of records is the
    mean of the two in the middle. All values are 0 for a store without records.
    """

    min: int
    mean: float
    median: float
    p90: int
    p99: int
    max: int
    histogram: list[tuple[int, int, int]]
    """(first length, last length, records) of the bins 0, 1, 2…3, 4…7, 8…15, …, without those
    above the longest record."""


class IdUse(msgspec.Struct, frozen=True):
    """How the ids of one token column are used."""

    unique: int
    """Different ids that occur."""
    vocabulary: int | None
    """Size of the column's vocabulary; None: the store has none for it."""
    used: float | None
    """`unique` / `vocabulary`."""
    unknown: float | None
    """Share of the tokens that have the `unk` role's id; None: no such role."""
    eot: int | None
    """Tokens that have the `eot` role's id; None: no such role."""
    frequent: list[tuple[int, int, float]]
    """(id, tokens, share of the tokens) of the 20 most frequent ids, equal counts by id."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `statistics`."""

    records: int
    tokens: int
    shards: int
    lengths: Lengths
    width: int
    """Row length for `padding`, `rows` and `longer`."""
    rows: int
    """Rows of `width` if no row holds two records: the sum of ceil(length / width)."""
    padding: float
    """Share of positions that would be padding in these rows: 1 - tokens / (rows · width)."""
    longer: float
    """Share of the records that are longer than `width`."""
    empty: int
    """Records without any token but `eot` (of the first column that has the role)."""
    columns: dict[str, IdUse]
    not_counted: list[str]
    """Token columns whose ids are too large to be counted one by one."""
    input_bytes: int
    """Bytes of content that the build read, for the whole store (manifest)."""
    bytes_per_token: float | None
    """UTF-8 bytes of the documents / tokens, for the whole store; None where it is not text."""
    skipped: dict[str, int]
    """Records left out by rule, by reason, for the whole store (manifest)."""
    rejected: dict[str, int]
    """Records refused as errors, by reason, for the whole store (manifest)."""


@dataclass(slots=True)
class Counts:
    """Counts of one pass over the shards."""

    shards: int
    lengths: Array
    """Lengths that occur, ascending (int64)."""
    records: Array
    """Records of each of these lengths (int64)."""
    ids: dict[str, Array]
    """Column → tokens of each id (int64)."""
    empty: int

    @property
    def tokens(self) -> int:
        return int(self.lengths @ self.records)


def statistics(
    store: Store, width: int = 1024, *, advance: Callable[[int], None] | None = None
) -> Statistics:
    """Return the statistics of a store; see `Statistics` for their meaning."""
    if width < 1:
        raise UsageError(f"a width of {width} is too small", hint="--width 1024")
    return summary(store, count(store, advance), width)


def summary(store: Store, counts: Counts, width: int = 1024) -> Statistics:
    manifest = store.manifest
    records, tokens = int(counts.records.sum()), counts.tokens
    rows = int(-(-counts.lengths // width) @ counts.records)
    longer = int(counts.records[counts.lengths > width].sum())
    return Statistics(
        records=records,
        tokens=tokens,
        shards=counts.shards,
        lengths=length_figures(counts.lengths, counts.records),
        width=width,
        rows=rows,
        padding=1 - tokens / (rows * width) if rows else 0.0,
        longer=longer / records if records else 0.0,
        empty=counts.empty,
        columns={name: _id_use(store, name, table, tokens) for name, table in counts.ids.items()},
        not_counted=[n for n in id_columns(store) if n not in counts.ids],
        input_bytes=manifest.input_bytes,
        bytes_per_token=store.bytes_per_token(),
        skipped=manifest.skipped,
        rejected=manifest.rejected,
    )


def count(store: Store, advance: Callable[[int], None] | None = None) -> Counts:
    """Count lengths and ids; see `statistics` for the arguments."""
    names = [n for n in id_columns(store) if store.manifest.ranges.get(n, (0, 0))[1] < LARGEST]
    ids = {name: np.zeros(_vocabulary_size(store, name) or 0, np.int64) for name in names}
    lengths, records = np.zeros(0, np.int64), np.zeros(0, np.int64)
    # No column of phrases has such a role.
    flat = [name for name in names if not store.schema[name].phrase]
    ending = next(((n, eot) for n in flat if (eot := _role(store, n, "eot")) is not None), None)
    empty = 0
    for number, entry in enumerate(store.shards):
        shard = store.shard(number)
        offsets = shard["offsets"].astype(np.int64)
        lengths, records = _merge(lengths, records, np.diff(offsets))
        for name in names:
            _check_ids(shard, name, store)
            for part in _id_counts(shard, name, store.schema[name]):
                ids[name] = _add(ids[name], part)
        empty += _empty(shard, offsets, ending)
        if advance is not None:
            advance(entry.bytes)
    return Counts(len(store.shards), lengths, records, ids, empty)


def id_columns(store: Store) -> list[str]:
    """Return the token columns that hold ids: unsigned scalars, without `border`."""
    return [
        name
        for name in store.token_columns
        if name != "border"
        and not store.schema[name].width
        and store.schema[name].dtype in ("u1", "u2", "u4")
    ]


def length_figures(lengths: Array, records: Array) -> Lengths:
    total = int(records.sum())
    if not total:
        return Lengths(0, 0.0, 0.0, 0, 0, 0, [])
    cumulative = np.cumsum(records)

    def quantile(percent: int) -> int:
        # In integers: as a float, 0.9 * total may exceed a count that equals it exactly.
        return int(lengths[np.searchsorted(cumulative * 100, percent * total, side="left")])

    middle = np.searchsorted(cumulative, [(total - 1) // 2, total // 2], side="right")
    longest = int(lengths[-1])
    bins = [(0, 0)] + [(1 << k, (2 << k) - 1) for k in range(longest.bit_length())]
    edges = np.asarray([first for first, _ in bins] + [bins[-1][1] + 1])
    cuts = np.searchsorted(lengths, edges, side="left")
    below = np.append(0, cumulative)[cuts]
    return Lengths(
        min=int(lengths[0]),
        mean=int(lengths @ records) / total,
        median=float(lengths[middle].mean()),
        p90=quantile(90),
        p99=quantile(99),
        max=longest,
        histogram=[(*b, int(n)) for b, n in zip(bins, np.diff(below), strict=True)],
    )


def _id_use(store: Store, name: str, table: Array, tokens: int) -> IdUse:
    size = _vocabulary_size(store, name)
    unique = int(np.count_nonzero(table))
    unknown, eot = _role(store, name, "unk"), _role(store, name, "eot")
    first = np.lexsort((np.arange(len(table)), -table))[: min(FREQUENT, unique)]
    return IdUse(
        unique=unique,
        vocabulary=size,
        used=unique / size if size else None,
        unknown=None if unknown is None else int(table[unknown]) / max(tokens, 1),
        eot=None if eot is None else int(table[eot]),
        frequent=[(int(i), int(table[i]), int(table[i]) / tokens) for i in first],
    )


def _vocabulary_size(store: Store, name: str) -> int | None:
    vocabulary = store.vocabularies.get(store.schema[name].vocab or "")
    return None if vocabulary is None else vocabulary.size


def _role(store: Store, name: str, role: str) -> int | None:
    vocabulary = store.vocabularies.get(store.schema[name].vocab or "")
    return None if vocabulary is None else vocabulary.roles.get(role)


def _merge(lengths: Array, records: Array, new: Array) -> tuple[Array, Array]:
    more, times = np.unique(new, return_counts=True)
    merged, where = np.unique(np.concatenate([lengths, more]), return_inverse=True)
    total = np.zeros(len(merged), np.int64)
    np.add.at(total, where, np.concatenate([records, times]))
    return merged, total


def _add(total: Array, part: Array) -> Array:
    if len(part) > len(total):
        total, part = part.astype(np.int64), total
    total[: len(part)] += part
    return total


def _check_ids(shard: Shard, name: str, store: Store) -> None:
    """Refuse ids beyond the vocabulary or `LARGEST`: the table of counts would grow with them."""
    phrase = store.schema[name].phrase
    values = shard[f"table.{name}"] if phrase else shard[name]
    most = _vocabulary_size(store, name) or LARGEST
    if len(values) and int(values.max()) >= most:
        raise shard.damaged(f"column {name!r} holds the id {values.max()}; ids are below {most}")
    if not phrase:
        return
    phrases = shard["phrase"]
    if len(phrases) and int((phrases & ~PHRASE_BIT).max()) >= len(shard["table_offsets"]) - 1:
        raise shard.damaged("it uses phrases that are not in its table")


def _id_counts(shard: Shard, name: str, column: Column) -> Iterator[Array]:
    """Yield the number of tokens of each id, a block of tokens at a time."""
    if not column.phrase:
        flat = shard[name]
        for start in range(0, len(flat), BLOCK):
            yield np.bincount(flat[start : start + BLOCK])
        return
    table_offsets = shard["table_offsets"].astype(np.int64)
    times = np.zeros(len(table_offsets) - 1, np.int64)
    ids = shard["phrase"]
    for start in range(0, len(ids), BLOCK):
        part = ids[start : start + BLOCK] & ~PHRASE_BIT
        times += np.bincount(part, minlength=len(times))
    values = shard[f"table.{name}"]
    if len(values):
        # bincount sums floats; sums of integers below 2^53 are exact.
        weights = np.repeat(times, np.diff(table_offsets))
        yield np.bincount(values, weights=weights).astype(np.int64)


def _empty(shard: Shard, offsets: Array, ending: tuple[str, int] | None) -> int:
    if ending is None:
        return int(np.count_nonzero(np.diff(offsets) == 0))
    name, eot = ending
    ids, empty = shard[name], 0
    for first, after in _record_blocks(offsets):
        start = int(offsets[first])
        sums = np.append(0, np.cumsum(ids[start : int(offsets[after])] != eot))
        reached = sums[offsets[first : after + 1] - start]
        empty += int(np.count_nonzero(reached[1:] == reached[:-1]))
    return empty


def _record_blocks(offsets: Array) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of runs of records with at most a block of tokens, or one record."""
    first, records = 0, len(offsets) - 1
    while first < records:
        after = int(np.searchsorted(offsets, offsets[first] + BLOCK, side="right")) - 1
        after = min(max(after, first + 1), records)
        yield first, after
        first = after
