"""The columns of a store, strings in columns, and the batches of records that a source gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Strings:
    """A string for each of n records.

    `numbers` (n, unsigned or int64) are rows of a table. Its m strings lie end to end in `data`
    (u1, UTF-8); row i is `data[offsets[i]:offsets[i + 1]]` (`offsets`: m + 1, int64). Two rows may
    be equal; a row may be unused.
    """

    numbers: Array
    data: Array
    offsets: Array

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def of(cls, values: Sequence[str]) -> Strings:
        """Return strings with a table row for each."""
        return cls.flat(*joined([value.encode("utf-8", "surrogatepass") for value in values]))

    @classmethod
    def flat(cls, data: Array, offsets: Array) -> Strings:
        """Return strings that lie end to end in `data`, one per record."""
        return cls(np.arange(len(offsets) - 1), data, offsets)

    @classmethod
    def constant(cls, value: str, n: int) -> Strings:
        """Return the same string for n records."""
        return cls(np.zeros(n, np.int64), *joined([value.encode("utf-8", "surrogatepass")]))

    def take(self, chosen: Array | slice) -> Strings:
        return Strings(self.numbers[chosen], self.data, self.offsets)

    def distinct(self) -> tuple[list[bytes], Array]:
        """Return (used rows in the order of first use, place in that list for each record).

        Places: (n,) int64. Two rows may hold equal strings.
        """
        if self._is_flat():
            return _cut(self.data, self.offsets), np.arange(len(self))
        used, first, inverse = np.unique(self.numbers, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty(len(used), np.int64)
        place[order] = np.arange(len(used))
        return _cut(*take_flat(self.data, self.offsets, used[order])), place[inverse.reshape(-1)]

    def each(self, function: Callable[[str], Any]) -> Array:
        """Return the results of a function for the string of each record; called once a row.

        Raises `UnicodeDecodeError` for strings that are not UTF-8.
        """
        rows, place = self.distinct()
        results = [function(row.decode("utf-8", "surrogatepass")) for row in rows]
        values = np.empty(len(results), object)
        values[:] = results
        return values[place]

    def decoded(self) -> list[str]:
        """Return the string of each record; raises `UnicodeDecodeError` if one is not UTF-8."""
        return self.each(str).tolist()

    def written_out(self) -> tuple[Array, Array]:
        """Return the strings of all records end to end: (u1, offsets int64)."""
        if self._is_flat():
            return self.data, self.offsets
        return take_flat(self.data, self.offsets, self.numbers)

    def _is_flat(self) -> bool:
        n = len(self.numbers)
        return n == len(self.offsets) - 1 and bool((self.numbers == np.arange(n)).all())


def _cut(data: Array, offsets: Array) -> list[bytes]:
    blob, bounds = data.tobytes(), offsets.tolist()
    return [blob[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def joined(encoded: Sequence[bytes]) -> tuple[Array, Array]:
    """Return byte strings end to end, and the offsets between them."""
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(value) for value in encoded], out=offsets[1:])
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


def take_flat(data: Array, ends: Array, chosen: Array) -> tuple[Array, Array]:
    """Return the chosen pieces of an array end to end, and their offsets.

    `ends` are the offsets of all pieces. A piece may be chosen several times.
    """
    begins, lengths = ends[:-1][chosen], np.diff(ends)[chosen]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return data[ranges(begins, lengths)], offsets


def ranges(begins: Array | int, lengths: Array) -> Array:
    """Return the numbers of several ranges end to end: begin, begin + 1, … of each (int64)."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))


DType = Literal["u1", "u2", "u4", "u8", "i8", "f4", "f8", "utf8"]


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """One column: a value for each token or record.

    `utf8` columns are per record and hold strings. A column with `phrase=True` is per token; its
    values lie in the shard's phrase table. `ref`: the values are record numbers of another store,
    and this is its key in `references` of plan and manifest. `width` above 0: each value is a
    vector.
    """

    dtype: DType
    per: Literal["token", "record"] = "token"
    phrase: bool = False
    vocab: str | None = None
    ref: str | None = None
    width: int = 0

    @property
    def is_whole(self) -> bool:
        return self.dtype in (*REFERRING, "i8")

    def numpy(self) -> np.dtype[Any]:
        """Return the little-endian numpy dtype (bytes for `utf8`)."""
        return np.dtype("u1") if self.dtype == "utf8" else np.dtype(self.dtype).newbyteorder("<")


Schema = dict[str, Column]

ROLES = ("anchor", "positive", "negative")
"""The records of an entry in this order: columns of references, or numbers in the column `role`."""
ROLE = Column("u1", per="record")
"""The column `role` of stores in which an entry is three records that follow each other."""

Places = Literal["byte", "row", "record", "address"]
"""Unit of the places where records begin in their inputs."""


def place_in_words(start: int, places: Places) -> str:
    """Return the place of a record in its input, such as "byte 1,024"."""
    return f"{places} {start:#x}" if places == "address" else f"{places} {start:,}"


def id_dtype(size: int) -> Literal["u1", "u2", "u4"]:
    """Return the smallest unsigned dtype that holds the ids 0 … size - 1."""
    if size <= 1 << 8:
        return "u1"
    if size <= 1 << 16:
        return "u2"
    if size <= 1 << 32:
        return "u4"
    raise TokmillError(
        f"a vocabulary of {size} ids does not fit into 32 bits",
        hint="a vocabulary has at most 2^32 ids",
    )


class Drop(msgspec.Struct, frozen=True, array_like=True):
    """One record that did not enter the store: where it begins, and why."""

    offset: int
    reason: str
    rejected: bool
    """False: skipped by rule (empty, placeholder). True: rejected, and counted as an error."""


class Drops(NamedTuple):
    """All records of a batch that did not enter the store for the same reason."""

    offsets: Array
    """(n,) int64, where each begins, ascending."""
    reason: str
    rejected: bool


def drops_of(singles: Iterable[Drop]) -> list[Drops]:
    groups: dict[tuple[str, bool], list[int]] = {}
    for drop in singles:
        groups.setdefault((drop.reason, drop.rejected), []).append(drop.offset)
    return [Drops(np.array(at, np.int64), *why) for why, at in groups.items()]


def each_drop(drops: Iterable[Drops]) -> Iterator[Drop]:
    singles = [
        Drop(at, some.reason, some.rejected) for some in drops for at in some.offsets.tolist()
    ]
    yield from sorted(singles, key=lambda drop: drop.offset)


@dataclass(slots=True)
class Records:
    """A batch of n records, flat.

    `offsets` (n + 1, int64) counts tokens; `columns` holds flat arrays, one value per token for
    token columns, one per record for record columns (width: a second axis), `Strings` for `utf8`.
    `starts` (n, int64) is the byte at which each record begins in its item.
    """

    offsets: Array
    columns: dict[str, Array | Strings]
    starts: Array
    drops: Sequence[Drops] = field(default_factory=tuple)
    phrases: Phrases | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → number of further skipped records, whose places are not recorded."""
    notes: dict[str, int] = field(default_factory=dict)
    """Change → how often it was made, such as ids replaced by `unk`."""
    ends_part: bool = False
    """Cut the shard after these records (of an item that is a long stream)."""
    done: float | None = None
    """Share of the item up to the end of these records; None: take it from the bytes hashed."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


def has_entries(schema: Schema) -> bool:
    return schema.get("role") == ROLE and "content" in schema


def as_entries(batch: Records, schema: Schema) -> tuple[Records, Schema, Array]:
    """Return (entries as one record each, their schema, the first record of each entry, int64).

    The tokens of an entry are those of its records, end to end, with a role for each; a value per
    record is that of the anchor. Without entries the batch is returned as it is.

    Raises `TokmillError` for roles that are not 0, 1, 2 again and again.
    """
    if not has_entries(schema):
        return batch, schema, np.arange(len(batch))
    role = np.asarray(batch.columns["role"])
    if not np.array_equal(role, np.arange(len(role)) % len(ROLES)) or len(role) % len(ROLES):
        raise TokmillError(
            "the column 'role' does not hold 0, 1, 2 for each entry: a shard is damaged",
            hint="`tokmill store validate STORE` finds it",
        )
    begins = np.arange(0, len(role), len(ROLES))
    columns = {
        name: value if schema[name].per == "token" else np.asarray(value)[begins]
        for name, value in batch.columns.items()
    }
    columns["role"] = np.repeat(role, np.diff(batch.offsets))
    offsets = np.append(batch.offsets[begins], batch.offsets[-1])
    records = Records(offsets, columns, batch.starts[begins])
    return records, {**schema, "role": Column("u1")}, begins


PHRASE_BIT = np.uint32(1 << 31)
"""Top bit of a phrase id: a larger unit (a basic block) begins here."""


@dataclass(slots=True)
class Phrases:
    """The phrases of n records, and the table with the tokens of each phrase.

    `ids` (uint32) are rows of the table, with `PHRASE_BIT` where a block begins; `offsets`
    (n + 1, int64) counts phrases; `table_offsets` (m + 1, int64) counts the tokens of the m rows;
    `table` holds the token columns of all rows, flat. Batches with the same object in `growing`
    share one table, to which rows are only appended; so the writer reads each row once.
    """

    ids: Array
    offsets: Array
    table_offsets: Array
    table: dict[str, Array]
    growing: object = None

    def expanded(self, name: str) -> Array:
        """Return a token column of the records, flat; `border` is computed."""
        ids = (self.ids & ~PHRASE_BIT).astype(np.int64)
        begins = self.table_offsets[ids]
        lengths = self.table_offsets[ids + 1] - begins
        if name == "border":
            return borders(self.ids, lengths)
        return self.table[name][ranges(begins, lengths)]


def borders(phrases: Array, lengths: Array) -> Array:
    """Return the column `border` of phrases with so many tokens each: 1 at the first token of a
    phrase, 3 if a block begins there, else 0 (uint8).
    """
    border = np.zeros(int(lengths.sum()), np.uint8)
    real = lengths > 0
    border[(np.cumsum(lengths) - lengths)[real]] = 1 + 2 * (phrases[real] >= PHRASE_BIT)
    return border


def phrase_columns(schema: Schema) -> list[str]:
    """Return the columns of the phrase table (`border` is computed, not stored)."""
    return [name for name, column in schema.items() if column.phrase and name != "border"]


def has_phrases(schema: Schema) -> bool:
    return any(column.phrase for column in schema.values())


def check_schema(schema: Schema) -> None:
    """Refuse column names that shards use themselves, and columns that no shard can hold."""
    for name, column in schema.items():
        if not name.isidentifier() or name in RESERVED:
            raise TokmillError(
                f"a column cannot be called {name!r}",
                hint="a letter first, then letters, digits and _, and none of "
                f"{', '.join(sorted(RESERVED))}; --column names the column of an overlay",
            )
        if column.dtype == "utf8" and (column.per != "record" or column.width):
            raise TokmillError(
                f"the column {name!r} holds strings, so it must have one value per record",
                hint='strings need per = "record" and no width',
            )
        if column.phrase and (column.per != "token" or column.width):
            raise TokmillError(
                f"the column {name!r} lies in phrases, so it must have one number per token",
                hint='phrase columns need per = "token" and no width',
            )
        if column.ref is not None and (column.phrase or column.dtype not in REFERRING):
            raise TokmillError(
                f"the column {name!r} has the type {column.dtype}, so it holds no record numbers",
                hint="record numbers are integers from 0 on",
            )


REFERRING = ("u1", "u2", "u4", "u8")
"""Types of columns that can hold record numbers of another store."""
RESERVED = {"offsets", "phrase", "phrase_offsets", "table_offsets", "item", "start"}
