"""Which records are compared with each other: columns of references, or key columns of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tokmill.errors import UsageError
from tokmill.feed.alike import Alike
from tokmill.feed.entries import Tuples
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows
from tokmill.store.schema import ROLES, Array, Schema, has_entries
from tokmill.store.store import Store
from tokmill.tasks.likeness import ALIKE, ANCHOR, OTHER

TUPLES = (ROLES, ROLES[:2], ("member",))
"""Columns of references that are looked for, in this order."""
KEYS = ("project", "program", "function", "part")
"""Record columns of which equal values mean alike records; those that a store has."""
RELATIONS = ("role", "record", "members", "group")
"""Names of the values that say what the rows of a step are to each other."""
CONTENT = "content"
"""Record column of entries of several records: equal numbers mean the same record."""
GROUP = "group"
"""Record column of numbers: entries with the same number are alike."""


def reference_columns(schema: Schema, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that name the records of an entry; none: the store has no such columns."""
    if chosen:
        return tuple(chosen)
    known = {name for name, column in schema.items() if column.ref is not None}
    return next((names for names in TUPLES if known.issuperset(names)), ())


def says_alike(schema: Schema, columns: Sequence[str], same: Sequence[str]) -> bool:
    """Say whether it is known which records of a store are alike."""
    return bool(same or reference_columns(schema, columns)) or has_entries(schema)


def key_columns(store: Store, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of which equal values mean alike records.

    Raises `UsageError` if a store has none of the usual ones.
    """
    found = tuple(chosen) or tuple(name for name in KEYS if name in store.schema)
    if not found:
        raise UsageError(
            "nothing says which records are alike: there are no columns of references ("
            + ", or ".join(" ".join(names) for names in TUPLES)
            + f") and no key columns ({', '.join(KEYS)})",
            where=str(store.path),
            hint="`tokmill build mine` makes a store of references; --set 'task.same=[\"COLUMN\"]' "
            'names key columns, --set \'task.columns=["A","B"]\' columns of references',
        )
    return found


def entry_rows(
    store: Store,
    length: int,
    columns: Sequence[str],
    same: Sequence[str],
    size: int,
    shards: int,
    seed: int,
    of_rows: Sequence[str] = (),
) -> Rows:
    """Return the rows of entries: those that `columns` name, or the three records of each entry,
    or `size` records of equal keys.

    `of_rows`: see `Entries`.
    """
    names = reference_columns(store.schema, columns)
    if names:
        return Tuples(store, length, names, shards=shards, seed=seed, of_rows=of_rows)
    if has_entries(store.schema):
        if same:
            raise UsageError(
                "the entries of the store say already which records are alike",
                where="task.same",
                hint="leave it out",
            )
        return Tuples(store, length, size=len(ROLES), shards=shards, seed=seed, of_rows=of_rows)
    keys = key_columns(store, same)
    return Alike(store, length, keys, size=size, shards=shards, seed=seed)


def value_columns(schema: Schema, columns: Sequence[str], group: str) -> list[str]:
    """Return the record columns that `with_relations` needs, if the store has them."""
    named = reference_columns(schema, columns)
    if has_entries(schema) and not named:
        named = (CONTENT,)
    names = [name for name in named if name in schema and schema[name].per == "record"]
    chosen = schema.get(group or GROUP)
    usable = chosen is not None and chosen.per == "record" and not chosen.width
    if named and usable and chosen is not None and chosen.dtype[0] in "ui":
        return [*names, group or GROUP]
    if group:
        raise UsageError(
            f"the column {group!r} does not have a whole number for each entry",
            where="task.group",
            hint="it is a record column of the store that has the columns of references",
        )
    return names


def with_relations(batch: Batch, columns: Sequence[str], group: str) -> dict[str, Array]:
    """Return values of the rows of a batch, with `role`, `record`, `members` and `group`.

    All int64, as `likeness.relations` wants them. Columns that begin with `negative` name negatives
    of their entry, others alike records; the first one is the anchor. Without such columns (rows of
    key columns, or of a column with a value per token) all rows of an entry are alike, and their
    records are not known. Of imported entries of three records, `content` stands for the numbers.
    """
    values = dict(batch.values)
    count = len(batch)
    own_group = values.get(group or GROUP, np.full(count, -1)).astype(np.int64)
    if CONTENT in values:
        rows = values[CONTENT].reshape(-1, len(ROLES))
        values |= zip(ROLES, np.repeat(rows, len(ROLES), axis=0).T, strict=True)
    values = {n: value for n, value in values.items() if n not in (CONTENT, group or GROUP)}
    names = [name for names in (columns, *TUPLES) for name in names]
    found = {n: values.pop(n).astype(np.int64).reshape(count, -1) for n in names if n in values}
    if not found:
        unknown = np.full(count, -1, np.int64)
        made = {"role": unknown * 0, "record": unknown, "members": unknown[:, None]}
        return values | made | {"group": own_group}
    pattern = np.concatenate(
        [
            np.full(records.shape[1], role_of(name, number))
            for number, (name, records) in enumerate(found.items())
        ]
    )
    begins = np.diff(batch.entry, prepend=-2) != 0
    place = np.arange(count) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
    role, records = pattern[place], np.concatenate([*found.values()], axis=1)
    return values | {
        "role": role,
        "record": np.take_along_axis(records, place[:, None], axis=1)[:, 0],
        "members": records[:, pattern != OTHER],
        "group": np.where(role == OTHER, -1, own_group),
    }


def role_of(column: str, number: int) -> int:
    """Return the role of the rows that a column names; `number`: its place among the columns."""
    if column.startswith("negative"):
        return OTHER
    return ALIKE if number else ANCHOR


def asking_entries(entry: Array, values: Mapping[str, Array]) -> int:
    """Return the number of entries with at least two alike rows; entry -1 is none."""
    alike = entry[(entry >= 0) & (values["role"] != OTHER)]
    return int(np.count_nonzero(np.bincount(alike) > 1)) if len(alike) else 0
