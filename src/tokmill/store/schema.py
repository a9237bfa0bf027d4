"""What a store holds: columns, and the batches of records that a source hands to the writer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from tokmill.errors import TokmillError
from tokmill.store.strings import Array as Array
from tokmill.store.strings import Strings

DType = Literal["u1", "u2", "u4", "u8", "i8", "f4", "utf8"]


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stream of numbers: a value a token, a phrase or a record.

    `utf8` columns are per record and hold strings. A column with `phrase=True` is per token, and
    its values lie in the shard's phrase table. `ref` names the store whose record numbers the
    values are, by a key of `references` in plan and manifest; `width` above 0 makes every value a
    vector.
    """

    dtype: DType
    per: Literal["token", "phrase", "record"] = "token"
    phrase: bool = False
    vocab: str | None = None
    ref: str | None = None
    width: int = 0

    def numpy(self) -> np.dtype[Any]:
        """Return the little-endian numpy dtype (bytes for `utf8`)."""
        return np.dtype("u1") if self.dtype == "utf8" else np.dtype(self.dtype).newbyteorder("<")


Schema = dict[str, Column]

Places = Literal["byte", "row", "record", "address"]
"""What says where a record begins in its input."""


def place_in_words(start: int, places: Places) -> str:
    """Return where a record begins in its input."""
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
    """One record that did not enter the store: where it began, and why."""

    offset: int
    reason: str
    rejected: bool
    """False: skipped by rule (empty, placeholder). True: rejected, and counted as an error."""


class Drops(NamedTuple):
    """Records of a batch that did not enter the store for one reason, however many."""

    offsets: Array
    """(n,) int64, where each began, rising."""
    reason: str
    rejected: bool


def drops_of(singles: Iterable[Drop]) -> list[Drops]:
    """Return single drops by their reason."""
    found: dict[tuple[str, bool], list[int]] = {}
    for drop in singles:
        found.setdefault((drop.reason, drop.rejected), []).append(drop.offset)
    return [Drops(np.array(at, np.int64), *why) for why, at in found.items()]


def each_drop(drops: Iterable[Drops]) -> Iterator[Drop]:
    """Yield every drop by itself, in the order of the places."""
    singles = [
        Drop(at, some.reason, some.rejected) for some in drops for at in some.offsets.tolist()
    ]
    yield from sorted(singles, key=lambda drop: drop.offset)


@dataclass(slots=True)
class Records:
    """A batch of n records, flat.

    `offsets` (n + 1, int64) counts tokens; `columns` holds flat arrays, one value a token for
    token columns, one a record for record columns (width: a second axis), `Strings` for `utf8`.
    `starts` (n, int64) is the byte at which each record began in its item.
    """

    offsets: Array
    columns: dict[str, Array | Strings]
    starts: Array
    drops: Sequence[Drops] = field(default_factory=tuple)
    phrases: Phrases | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → count of further records skipped, whose places nobody asks for."""
    notes: dict[str, int] = field(default_factory=dict)
    """Counts of what was changed on the way, such as ids replaced by `unk`."""
    ends_part: bool = False
    """The shard is to be cut after these records (an item that is a long stream)."""
    done: float | None = None
    """Share of the item that ends with these records; None: what its digest has seen says it."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


PHRASE_BIT = np.uint32(1 << 31)
"""Top bit of a phrase id: a larger unit (a basic block) begins here."""


@dataclass(slots=True)
class Phrases:
    """The phrases of n records, and the table that says what each one stands for.

    `ids` (uint32) are rows of the table, with `PHRASE_BIT` where a block begins; `offsets`
    (n + 1, int64) counts phrases; `table_offsets` (m + 1, int64) counts the tokens of the m rows;
    `table` holds the token columns of all rows, flat. Batches with one and the same object as
    `growing` have one table, to which rows were only added meanwhile; so the writer looks at each
    row once.
    """

    ids: Array
    offsets: Array
    table_offsets: Array
    table: dict[str, Array]
    growing: object = None


def phrase_columns(schema: Schema) -> list[str]:
    """Return the columns that lie in the phrase table (`border` is computed, not stored)."""
    return [name for name, column in schema.items() if column.phrase and name != "border"]


def has_phrases(schema: Schema) -> bool:
    """Say whether the records of a schema are sequences of phrases."""
    return any(column.phrase for column in schema.values())


def check_schema(schema: Schema) -> None:
    """Refuse column names that the shard itself uses, and columns that no shard can hold."""
    for name, column in schema.items():
        if not name.isidentifier() or name in RESERVED:
            raise TokmillError(
                f"a column cannot be called {name!r}",
                hint="letters, digits and _ make a name, a letter first, and it is none of "
                f"{', '.join(sorted(RESERVED))}; --column names that of an overlay",
            )
        if column.dtype == "utf8" and (column.per != "record" or column.width):
            raise TokmillError(
                f"the column {name!r} holds strings, which are one a record",
                hint='per = "record" is for strings',
            )
        if column.per == "phrase":
            raise TokmillError(
                f"the column {name!r}: a value a phrase is not held yet",
                hint="hold it as a value a token, or a value a record",
            )
        if column.phrase and (column.per != "token" or column.width):
            raise TokmillError(
                f"the column {name!r} lies in phrases, so it is a scalar a token",
                hint="leave out its width",
            )
        if column.ref is not None and (column.phrase or column.dtype not in REFERRING):
            raise TokmillError(
                f"the column {name!r} is of type {column.dtype}, and cannot hold record numbers",
                hint="they are whole numbers from 0 on",
            )


REFERRING = ("u1", "u2", "u4", "u8")
"""Types of columns that may hold record numbers of another store."""
RESERVED = {"offsets", "phrase", "phrase_offsets", "table_offsets", "item", "start"}
