"""Which records are compared with each other: columns of references, or key columns of a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.feed.entries import KeyedEntries, Tuples
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows
from tokmill.feed.values import FAMILY
from tokmill.store.schema import ROLES, Array, Schema, has_entries
from tokmill.store.store import Store
from tokmill.tasks.comparison.comparison_losses import ALIKE, ANCHOR, OTHER

TUPLES = (ROLES, ROLES[:2], ("member",))
"""Columns of references that are looked for, in this order."""
KEYS = ("project", "program", "function", "part")
"""Record columns of which equal values mean alike records; those that a store has."""
RELATIONS = ("role", "record", "group")
"""Names of the values that say what the rows of a step are to each other."""
ROLE = "role"
"""Record column of entries of several records: `ANCHOR`, `ALIKE` or `OTHER`."""
GROUP = "group"
"""Record column of numbers: entries with the same number are alike; or a number for each record."""


def reference_columns(schema: Schema, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that name the records of an entry; none: the store has no such columns."""
    if chosen:
        return tuple(chosen)
    references = {name for name, column in schema.items() if column.ref is not None}
    return next((names for names in TUPLES if references.issuperset(names)), ())


def has_positives(schema: Schema, columns: Sequence[str], same: Sequence[str]) -> bool:
    """Say whether it is known which records of a store are alike."""
    return bool(same or reference_columns(schema, columns)) or has_entries(schema)


def key_columns(store: Store, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of which equal values mean alike records.

    Raises `UsageError` if a store has none of the usual ones.
    """
    keys = tuple(chosen) or tuple(name for name in KEYS if name in store.schema)
    if not keys:
        raise UsageError(
            "nothing says which records are alike: there are no columns of references ("
            + ", or ".join(" ".join(names) for names in TUPLES)
            + f") and no key columns ({', '.join(KEYS)})",
            where=str(store.path),
            hint="`tokmill build mine` makes a store of references; --set 'task.same=[\"COLUMN\"]' "
            'names key columns, --set \'task.columns=["A","B"]\' columns of references',
        )
    return keys


def entry_rows(
    store: Store,
    length: int,
    config: Any,
    shards: int,
    seed: int,
    of_rows: Sequence[str] = (),
) -> Rows:
    """Return the rows of entries: those that columns of references name, or the three records of
    each entry, or some records of equal keys.

    `config`: with the keys `columns`, `same`, `size` and `group`; `of_rows`: see `Entries`.
    """
    names = reference_columns(store.schema, config.columns)
    if has_entries(store.schema) and not names and config.same:
        raise UsageError(
            "the entries of the store say already which records are alike",
            where="task.same",
            hint="leave it out",
        )
    if names or has_entries(store.schema):
        roles = roles_of([(n, store.schema[n].width) for n in names if n in store.schema])
        return Tuples(
            store,
            length,
            names,
            size=len(ROLES),
            shards=shards,
            seed=seed,
            of_rows=of_rows,
            unlike=np.flatnonzero(roles == OTHER).tolist() if names else [OTHER],
            group=config.group or GROUP,
        )
    keys = key_columns(store, config.same)
    return KeyedEntries(store, length, keys, size=config.size, shards=shards, seed=seed)


def value_columns(schema: Schema, columns: Sequence[str], group: str) -> list[str]:
    """Return the values that `with_relations` needs: record columns, and `FAMILY`.

    A column with a number for each row says itself which rows are alike; else the rows say it.
    """
    named = reference_columns(schema, columns)
    names = [name for name in named if name in schema and schema[name].per == "record"]
    if has_entries(schema) and not named:
        names = [ROLE]
    chosen = schema.get(group or GROUP)
    usable = chosen is not None and chosen.per == "record" and chosen.dtype[0] in "ui"
    if group and not (named and usable):
        raise UsageError(
            f"the column {group!r} does not have a whole number for each entry",
            where="task.group",
            hint="it is a record column of the store that has the columns of references",
        )
    if named and usable and chosen is not None and chosen.width:
        return [*names, group or GROUP]
    return [*names, FAMILY]


def with_relations(batch: Batch, columns: Sequence[str], group: str) -> dict[str, Array]:
    """Return values of the rows of a batch, with `role`, `record` and `group`.

    All int64, as `likeness.relations` wants them. Columns that begin with `negative` name negatives
    of their entry, others alike records; the first one is the anchor. Without such columns and
    without a `role` all rows of an entry are alike (rows of key columns, or of a column with a
    value per token).

    Raises `UsageError` if `group` has not as many numbers as an entry has rows.
    """
    values = dict(batch.values)
    count = len(batch)
    names = [name for names in (columns, *TUPLES) for name in names]
    references = {
        n: values.pop(n).astype(np.int64).reshape(count, -1) for n in names if n in values
    }
    begins = np.diff(batch.entry, prepend=-2) != 0
    place = np.arange(count) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
    role = values.pop(ROLE, np.zeros(count)).astype(np.int64)
    record = family = values.pop(FAMILY, np.arange(count))
    if references:
        role = roles_of([(name, records.shape[1]) for name, records in references.items()])[place]
    if (numbers := values.pop(group or GROUP, None)) is not None:
        records = np.concatenate([*references.values()], axis=1)
        if numbers.shape != records.shape:
            raise UsageError(
                f"{group or GROUP!r} has {numbers[0].size} numbers an entry of "
                f"{records.shape[1]} records",
                where="task.group",
                hint="one number for an entry, or one for each of its records",
            )
        record = np.take_along_axis(records, place[:, None], axis=1)[:, 0]
        family = np.take_along_axis(numbers, place[:, None], axis=1)[:, 0]
    return values | {"role": role, "record": record, "group": family.astype(np.int64)}


def roles_of(columns: Iterable[tuple[str, int]]) -> Array:
    """Return the roles of an entry's rows, of columns of references and their widths (or 0)."""
    return np.concatenate(
        [
            np.full(max(1, width), role_of(name, number))
            for number, (name, width) in enumerate(columns)
        ]
        or [np.zeros(0, np.int64)]
    )


def role_of(column: str, number: int) -> int:
    """Return the role of the rows that a column names; `number`: its place among the columns."""
    if column.startswith("negative"):
        return OTHER
    return ALIKE if number else ANCHOR


def asking_entries(entry: Array, values: Mapping[str, Array]) -> int:
    """Return the number of entries with at least two alike rows; entry -1 is none."""
    positives = entry[(entry >= 0) & (values["role"] != OTHER)]
    return int(np.count_nonzero(np.bincount(positives) > 1)) if len(positives) else 0
