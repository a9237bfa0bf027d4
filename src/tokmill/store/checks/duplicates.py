"""Exact duplicates within a store, and records that two stores share."""

from __future__ import annotations

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.store.checks.hashes import first_of_equals, store_digests
from tokmill.store.store import Store


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
    repeated = np.flatnonzero(first != np.arange(len(first)))
    lengths = np.diff(store.ends(), prepend=0)
    return Duplicates(
        store=str(store.path),
        records=len(store),
        duplicates=len(repeated),
        tokens=int(lengths[repeated].sum()),
        examples=[(int(i), int(first[i])) for i in repeated[:examples]],
    )


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
