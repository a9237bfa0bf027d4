"""The functions that are compared: names, how they were compiled, how many blocks they have."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.similarity.vector_rows import Rows
from tokmill.store.checks.hashes import first_of_equals, mix, store_digests
from tokmill.store.schema import PHRASE_BIT, Array
from tokmill.store.store import Store

NAMES = ("project", "program", "version", "function", "compiler", "level")
"""Columns of strings; project, program, version and function say what was compiled."""
SOURCE = NAMES[:4]
UNKNOWN = "unknown"
SUB_NAME = re.compile("sub_([0-9a-f]{1,16})")
"""A name that lifters make of the address of a function without one."""


@dataclass(slots=True)
class Coded:
    """A string for each of n functions, as numbers of sorted, different strings."""

    codes: Array
    """(n,) i8."""
    names: list[str]

    def take(self, rows: Array) -> "Coded":
        return Coded(self.codes[rows], self.names)


@dataclass(slots=True)
class Functions:
    """n functions, one a row, and the records that each is made of."""

    where: str
    names: dict[str, Coded]
    """A column for each of `NAMES`."""
    blocks: Array
    """(n,) i8, basic blocks; -1: unknown."""
    code: Array | None
    """(n,) u8, equal for functions with equal tokens; None: unknown."""
    named: Array
    """(n,) bool, whether the name is one of the source, not made of the address."""
    record: Array | None
    """(records,) i8, the function of each record; None: record i is function i."""

    def __len__(self) -> int:
        return len(self.blocks)

    def text(self, column: str, row: int) -> str:
        one = self.names[column]
        return one.names[int(one.codes[row])]

    def has_value(self, column: str) -> Array:
        one = self.names[column]
        unknown = [i for i, name in enumerate(one.names) if name in ("", UNKNOWN)]
        return ~np.isin(one.codes, unknown)


def spelled(column: str, words: list[str]) -> list[str]:
    """Return strings of a column; levels may be written as the compiler's option, -O2."""
    return [word.removeprefix("-") for word in words] if column == "level" else words


def coded(texts: Sequence[str]) -> Coded:
    names = sorted(set(texts))
    number = {name: i for i, name in enumerate(names)}
    return Coded(np.asarray([number[text] for text in texts], np.int64), names)


def functions_of(store: Store) -> Functions:
    """Return the functions of a store of x86 code: its records, with parts of a function joined.

    Of a store of walks, all walks through a function are one. Raises `UsageError` for a store
    without the columns.
    """
    missing = [name for name in NAMES if name not in store.schema]
    if missing or any(store.schema[name].dtype != "utf8" for name in NAMES):
        raise UsageError(
            f"the store has no column of strings {missing[0]!r}" if missing else
            f"the columns {', '.join(NAMES)} must hold strings",
            where=str(store.path),
            hint="`tokmill build x86` makes stores of functions with all that is needed",
        )  # fmt: skip
    words: dict[str, list[str]] = {name: [] for name in NAMES}
    places: dict[str, list[Array]] = {name: [np.zeros(0, np.int64)] for name in NAMES}
    blocks = [np.zeros(0, np.int64)]
    for number, entry in enumerate(store.shards):
        shard = store.shard(number)
        for name in NAMES:
            distinct, place = shard.text(name, 0, entry.records).distinct()
            places[name].append(place + len(words[name]))
            words[name] += (one.decode("utf-8", "surrogatepass") for one in distinct)
        blocks.append(_blocks(shard))
    names = {
        name: coded(spelled(name, words[name])).take(np.concatenate(places[name])) for name in NAMES
    }
    record = _of_records(store, names)
    count = int(record.max()) + 1 if len(record) else 0
    first = np.zeros(count, np.int64)
    first[record[::-1]] = np.arange(len(record))[::-1]
    digests = np.zeros(count, np.uint64)
    order = np.arange(len(record)) - first[record]
    part = mix(store_digests(store)["a"] + mix(order.astype(np.uint64)))
    np.add.at(digests, record, part)
    return Functions(
        where=str(store.path),
        names={name: coded.take(first) for name, coded in names.items()},
        blocks=_sums(np.concatenate(blocks), record, count),
        code=digests,
        named=_named(store, names["function"])[first],
        record=None if count == len(record) else record,
    )


def _blocks(shard: Any) -> Array:
    """Return the basic blocks of each record of a shard; -1 where they are not known."""
    if "phrase" in shard:
        ends = shard["phrase_offsets"].astype(np.int64)
        begins = np.concatenate([[0], np.cumsum(shard["phrase"] >= PHRASE_BIT)])
    else:
        ends = shard["offsets"].astype(np.int64)
        if "border" not in shard:
            return np.full(len(ends) - 1, -1, np.int64)
        begins = np.concatenate([[0], np.cumsum(shard["border"] & 2 > 0)])
    return begins[ends[1:]] - begins[ends[:-1]]


def _sums(values: Array, record: Array, count: int) -> Array:
    """Return the sum over the records of each function; -1 where it is unknown."""
    if len(values) and values.min() < 0:
        return np.full(count, -1, np.int64)
    return np.bincount(record, values, count).astype(np.int64)


def _of_records(store: Store, names: dict[str, Coded]) -> Array:
    """Return the number of the function of each record: records of one function share it."""
    key = [coded.codes for coded in names.values()]
    if "walk" in store.schema:
        # Numbered in the order of first use.
        return np.unique(first_of_equals(numbers_of(key)), return_inverse=True)[1].reshape(-1)
    if "part" not in store.schema or not len(store):
        return np.arange(len(store))
    begins = store.column("part") == 0
    begins[0] = True
    if "address" in store.schema:
        key.append(store.column("address"))
    for values in key:
        begins[1:] |= values[1:] != values[:-1]
    return np.cumsum(begins) - 1


def numbers_of(columns: Sequence[Array]) -> Array:
    """Return a number for each row of some columns of codes, equal for equal rows: (n,) i8.

    Numbers ascend as the rows do, the first column first.
    """
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        wide = int(column.max(initial=0)) + 1
        _, place = np.unique(number * wide + column, return_inverse=True)
        number = place.reshape(-1).astype(np.int64)
    return number


def _named(store: Store, function: Coded) -> Array:
    """Return of which records the function has a name that is not made of its address."""
    there = np.asarray([bool(name) for name in function.names], bool)
    named = there[function.codes] if len(there) else np.zeros(len(store), bool)
    if "address" not in store.schema:
        return named
    # Only `sub_` with the own address is made up: a function may really be called `sub_1`.
    matches = [SUB_NAME.fullmatch(name) for name in function.names]
    addresses = np.asarray([int(match[1], 16) if match else 0 for match in matches], np.uint64)
    artificial = np.asarray([match is not None for match in matches], bool)
    if len(addresses):
        named &= ~(
            artificial[function.codes] & (addresses[function.codes] == store.column("address"))
        )
    return named


def of_functions(functions: Functions, matrix: Any, *, unit: bool = True) -> Any:
    """Return a row a function, of a matrix (records, d) with a row a record: the mean of its parts.

    With `unit` each record's row counts with length 1, so that no part outweighs the others by its
    length.
    """
    if functions.record is None:
        return matrix
    sparse = plugins.require("scipy.sparse")
    records = np.arange(len(functions.record))
    scale = 1 / np.bincount(functions.record)[functions.record]
    if unit:
        lengths = Rows(matrix).lengths
        scale *= np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    shape = (len(functions), len(records))
    return sparse.csr_array((scale, (functions.record, records)), shape=shape) @ matrix
