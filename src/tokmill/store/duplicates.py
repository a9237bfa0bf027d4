"""Exact duplicates within a store, and records that two stores share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.store.hashes import first_of_equals, store_digests
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.store.strings import Strings


class Duplicates(msgspec.Struct, frozen=True):
    """Records of a store that are equal to an earlier one."""

    store: str
    records: int
    duplicates: int
    tokens: int
    """Tokens of the duplicates."""
    examples: list[tuple[int, int]]
    """(record, first record equal to it)."""


class Leak(msgspec.Struct, frozen=True):
    """Records of one store that stand in another as well."""

    store: str
    other: str
    records: int
    shared: int
    examples: list[tuple[int, int]]
    """(record of the store, record of the other)."""


def find_duplicates(store: Store, examples: int = 10) -> Duplicates:
    """Find records whose tokens equal those of an earlier record (16 bytes of memory a record)."""
    first = first_of_equals(store_digests(store))
    return _duplicates(store, first, first != np.arange(len(first)), examples)


def _duplicates(store: Store, first: Array, repeats: Array, examples: int) -> Duplicates:
    repeated = np.flatnonzero(repeats)
    lengths = np.diff(store.ends(), prepend=0)
    return Duplicates(
        store=str(store.path),
        records=len(store),
        duplicates=len(repeated),
        tokens=int(lengths[repeated].sum()),
        examples=[(int(i), int(first[i])) for i in repeated[:examples]],
    )


def find_copies(store: Store, by: Sequence[str], examples: int = 10) -> tuple[Duplicates, Array]:
    """Find records whose tokens something else has too: the first record with them is of another
    key, its values in the columns `by`.

    So with `project` and `function` a function that two levels compile alike is no copy, and one of
    another name or project is. Returns what was found, and (records,) u1: 1 for a copy. Memory: 24
    bytes a record. Raises `UsageError` for columns without one value a record.
    """
    keys = _keys(store, by)
    first = first_of_equals(store_digests(store))
    copies = keys != keys[first]
    return _duplicates(store, first, copies, examples), copies.astype(np.uint8)


def _keys(store: Store, by: Sequence[str]) -> Array:
    """Return a number a record, equal where the values of some columns are: (records,) i8."""
    single = [n for n, c in store.schema.items() if c.per == "record" and not c.width]
    for name in by:
        if name not in single:
            raise UsageError(
                f"by: the store has no column {name!r} with one value a record",
                where=str(store.path),
                hint=nearest(name, single),
            )
    known: dict[tuple[object, ...], int] = {}
    parts = [np.zeros(0, np.int64)]
    for _, _, batch in store.batches(1 << 16):
        values = []
        for name in by:
            column = batch.columns[name]
            values.append(column.distinct()[1] if isinstance(column, Strings) else column)
        # Rows of a table may hold equal strings, so keys are compared by what they say.
        places = np.stack([np.unique(value, return_inverse=True)[1] for value in values], axis=1)
        _, once, number = np.unique(places, axis=0, return_index=True, return_inverse=True)
        said = []
        for name in by:
            column = batch.columns[name]
            chosen = column.take(once) if isinstance(column, Strings) else column[once]
            said.append(chosen.decoded() if isinstance(chosen, Strings) else chosen.tolist())
        codes = [known.setdefault(key, len(known)) for key in zip(*said, strict=True)]
        parts.append(np.asarray(codes, np.int64)[number.reshape(-1)])
    return np.concatenate(parts)


def find_leak(store: Store, other: Store, examples: int = 10) -> Leak:
    """Find the records that two stores share: a leak if one is for training and one for testing.

    Raises `TokmillError` if their vocabularies differ, as equal ids would mean different tokens.
    """
    for name, vocabulary in store.vocabularies.items():
        theirs = other.vocabularies.get(name)
        if theirs is None or theirs.sha256 != vocabulary.sha256:
            raise TokmillError(
                f"the vocabularies {name!r} differ, so the tokens cannot be compared",
                where=f"{store.path} and {other.path}",
                hint="build both with one tokenizer",
            )
    mine, theirs_digests = store_digests(store), store_digests(other)
    order = np.argsort(theirs_digests, kind="stable")
    place = np.searchsorted(theirs_digests, mine, sorter=order)
    place = np.minimum(place, max(0, len(order) - 1))
    found = theirs_digests[order[place]] == mine if len(order) else np.zeros(len(mine), bool)
    shared = np.flatnonzero(found)
    return Leak(
        store=str(store.path),
        other=str(other.path),
        records=len(store),
        shared=len(shared),
        examples=[(int(i), int(order[place[i]])) for i in shared[:examples]],
    )
