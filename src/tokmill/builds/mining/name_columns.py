"""Which records of a store are one function under several builds, and which have equal content.

Names are compared by 128-bit digests, in columns.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill.base.errors import MachineError, UsageError, nearest
from tokmill.builds.selection.conditions import each_value
from tokmill.builds.selection.minhash import batches
from tokmill.builds.shared import shared
from tokmill.store.checks.hashes import (
    DIGEST,
    first_of_equals,
    linked,
    mix,
    record_digests,
    row_digests,
)
from tokmill.store.schema import Array, Records, Schema, Strings
from tokmill.store.shards.column_buffers import ColumnBuffers, pieces
from tokmill.store.store import Store

FACTS = np.dtype(
    [("group", "<i8"), ("variant", "<i8"), ("content", "<i8"), ("family", "<i8"), ("name", "<i8")]
    + [("why", "u1"), ("", "V7")]
)
EMPTY, NAMELESS, AMBIGUOUS = 1, 2, 3
WHY = {EMPTY: "no tokens", NAMELESS: "no name", AMBIGUOUS: "a name that one build has twice"}
BLOCK = 1 << 14
"""Anchors at a time."""
_SALT = 0x9E3779B97F4A7C15


class Naming(msgspec.Struct, frozen=True):
    """The columns that say what a record is."""

    same: tuple[str, ...]
    """Equal for all records of one function."""
    differ: tuple[str, ...]
    """At least one differs between an anchor and its positive."""
    also: tuple[str, ...]
    """These and the others together name a record once."""
    apart: tuple[str, ...]
    """Records that are equal here are never negatives of each other."""
    nameless: str
    """Regular expression of values in `same` that name nothing."""


def naming(
    schema: Schema, same: Sequence[str], differ: Sequence[str], apart: Sequence[str], nameless: str
) -> Naming:
    """Return the naming of a store's records, by default that of programs."""
    single = {n: c.dtype for n, c in schema.items() if c.per == "record" and not c.width}
    usable = [name for name, dtype in single.items() if dtype not in ("f4", "f8")]

    def chosen(option: str, given: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
        for name in given:
            if name not in usable:
                raise UsageError(
                    f"{option}: the store has no column {name!r} with a name or number per record",
                    hint=nearest(name, usable) or f"these: {', '.join(usable) or 'there is none'}",
                )
        result = tuple(given) or tuple(name for name in default if name in usable)
        if not result:
            raise UsageError(
                f"the store has none of the columns {', '.join(default)}",
                hint=f"name its own: --{option} COLUMN"
                + (f" ({', '.join(usable)})" if usable else ""),
            )
        return result

    names = chosen("same", same, ("project", "program", "function", "part"))
    builds = chosen("differ", differ, ("compiler", "level"))
    if both := [name for name in builds if name in names]:
        raise UsageError(
            f"the column {both[0]!r} cannot be the same and differ", hint="leave one of them out"
        )
    try:
        re.compile(nameless)
    except re.error as error:
        raise UsageError(
            f"nameless: {nameless!r} is not a regular expression: {error}", hint="see Python's `re`"
        ) from None
    others = ("project", "program", "version", "compiler", "level", "part", "walk")
    named = {*names, *builds}
    return Naming(
        names,
        builds,
        tuple(name for name in others if name in usable and name not in named),
        chosen("apart", apart, ("function",)) if apart or "function" in usable else (),
        nameless,
    )


def facts_of(store: Store, by: Naming, folder: Path | None = None) -> Array:
    """Return a row of `FACTS` for each record; digests above 32 MiB are kept in `folder`.

    `group`: first record with the same names; `variant`: first record with the same build (values
    of `differ`); `content`: first record with equal content; `family`: first record that is linked
    to it by equal names or equal content, directly or through others; `name`: first record with
    equal `apart`; `why`: a key of `WHY` if the record is left out, else 0. Records that are left
    out have a group and a family of their own.
    """
    kinds = {
        "group": by.same,
        "variant": by.differ,
        "once": (*by.same, *by.differ, *by.also),
        "name": by.apart,
    }
    values = ColumnBuffers(folder)
    pattern = re.compile(by.nameless)
    for place in range(len(store.shards)):
        for _, batch in batches(store, place):
            columns = {n: digests_of(batch, n) for names in kinds.values() for n in names}
            for kind, names in kinds.items():
                values.add(kind, joined([columns[name] for name in names], len(batch)))
            values.add("content", row_digests(batch, store.schema))
            values.add("empty", np.diff(batch.offsets) == 0)
            values.add("nameless", nameless_in(batch, by.same, pattern))

    def whole(kind: str) -> Array:
        parts = [*pieces(values.take(kind))]
        return np.concatenate(parts) if parts else np.zeros(0, DIGEST)

    facts = np.zeros(len(store), FACTS)
    number = np.arange(len(store))
    once = first_of_equals(whole("once"))
    double = np.bincount(once, minlength=len(store))[once] > 1
    facts["why"][whole("nameless").astype(bool)] = NAMELESS
    facts["why"][whole("empty").astype(bool)] = EMPTY
    facts["why"][double & (facts["why"] == 0)] = AMBIGUOUS
    used = facts["why"] == 0
    for kind in ("group", "variant", "name", "content"):
        facts[kind] = first_of_equals(whole(kind)) if by.apart or kind != "name" else number
    for kind in ("group", "content"):
        # A record that is left out links nothing, and gives no group its number.
        facts[kind] = first_used(facts[kind], used)
    facts["family"] = linked(len(store), (number, facts["group"]), (number, facts["content"]))
    return facts


def digests_of(batch: Records, name: str) -> Array:
    value = batch.columns[name]
    if isinstance(value, Strings):
        data, offsets = value.written_out()
        return record_digests(Records(offsets, {"byte": data}, offsets[:-1]), ["byte"])
    ends = np.arange(len(batch) + 1)
    return record_digests(Records(ends, {"value": value}, ends[:-1]), ["value"])


def joined(digests: Sequence[Array], count: int) -> Array:
    result = np.zeros(count, DIGEST)
    for number, one in enumerate(digests, 1):
        salt = np.uint64(number * _SALT % (1 << 64))
        for part in ("a", "b"):
            result[part] += mix(one[part] + salt)
    return result


def nameless_in(batch: Records, names: Sequence[str], pattern: re.Pattern[str]) -> Array:
    """Say of each record whether one of its names says nothing (bool)."""
    result = np.zeros(len(batch), bool)
    for name in names:
        value = batch.columns[name]
        if isinstance(value, Strings):
            matches = each_value(batch, name, {}, lambda text: bool(pattern.fullmatch(text)))
            result |= np.asarray(matches, bool)
    return result


def first_used(first: Array, used: Array) -> Array:
    """Return numbers of groups so that each is a record that is used; others are groups alone."""
    number = np.arange(len(first))
    least = np.full(len(first), len(first))
    np.minimum.at(least, first[used], number[used])
    return np.where(used, least[first], number)


class Members:
    """The records of each group side by side, those of one build together.

    `order` (int64) are the records that are used, by group, build and number.
    """

    def __init__(self, facts: Array) -> None:
        self.facts = facts
        self.used = np.flatnonzero(facts["why"] == 0)
        keys = (facts[name][self.used] for name in ("variant", "group"))
        self.order = self.used[np.lexsort((self.used, *keys))]
        self.place = np.zeros(len(facts), np.int64)
        self.place[self.order] = np.arange(len(self.order))

    @cached_property
    def groups(self) -> tuple[Array, Array]:
        """Where each record's group begins and ends in `order`; for the places in `order`."""
        return runs(self.facts["group"][self.order])

    @cached_property
    def builds(self) -> tuple[Array, Array]:
        """Where the records of the same group and build begin and end in `order`."""
        change = np.zeros(len(self.order), bool)
        for name in ("group", "variant"):
            change[1:] |= np.diff(self.facts[name][self.order]) != 0
        return runs(np.cumsum(change))

    @cached_property
    def others(self) -> Array:
        """Number of records with other content in other builds; for the places in `order`."""

        def differing(begin: Array, end: Array) -> Array:
            key = begin * len(self.facts) + self.facts["content"][self.order]
            which, counts = np.unique(key, return_inverse=True, return_counts=True)[1:]
            return end - begin - counts[which]

        return differing(*self.groups) - differing(*self.builds)


def runs(values: Array) -> tuple[Array, Array]:
    """Return for each place the begin and the end of its run of equal values; int64."""
    change = np.flatnonzero(np.diff(values)) + 1
    borders = np.concatenate([[0], change, [len(values)]]) if len(values) else np.zeros(1, int)
    lengths = np.diff(borders)
    return np.repeat(borders[:-1], lengths), np.repeat(borders[1:], lengths)


class Keyed:
    """The names of a store's records (`FACTS`) and the members of each group."""

    def __init__(self, store: Store, config: Any, scratch: str) -> None:
        self.store, self.scratch = store, scratch
        self.by: Naming = naming(
            store.schema, config.same, config.differ, config.apart, config.nameless
        )

    def identity(self) -> dict[str, Any]:
        return {"same": self.by.same, "differ": self.by.differ, "apart": self.by.apart}

    @cached_property
    def facts(self) -> Array:
        def find() -> Array:
            if os.access(self.scratch, os.W_OK):
                with contextlib.suppress(MachineError):
                    return facts_of(self.store, self.by, Path(self.scratch))
            return facts_of(self.store, self.by)

        parts = [msgspec.to_builtins(self.by), self.store.content]
        return shared(self.scratch, "names", parts, FACTS, (len(self.store),), find)

    @cached_property
    def members(self) -> Members:
        """The records of each group side by side."""
        return Members(self.facts)

    def blocks(self, place: int) -> list[Array]:
        """Return the records of a shard in blocks (int64); one empty block if it has none."""
        first = sum(entry.records for entry in self.store.shards[:place])
        records = np.arange(first, first + self.store.shards[place].records)
        return np.split(records, range(BLOCK, len(records), BLOCK))

    def left_out(self, records: Array) -> Counter[str]:
        """Return reason → how many of some records are never used."""
        codes, counts = np.unique(self.facts["why"][records], return_counts=True)
        pairs = zip(codes.tolist(), counts.tolist(), strict=True)
        return Counter({WHY[code]: count for code, count in pairs if code})
