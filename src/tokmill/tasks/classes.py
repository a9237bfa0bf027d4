"""The names of the classes of a label column, which are saved in the run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import read_file
from tokmill.base.headers import loads_json
from tokmill.store.schema import Column
from tokmill.store.store import Store
from tokmill.tasks.task_inputs import MOST_CLASSES


def label_column(store: Store, name: str) -> Column:
    """Return a label column: one number for each record, in the store or one of its overlays."""
    column = store.schema.get(name)
    names = [
        n
        for n, c in store.schema.items()
        if c.per == "record" and c.dtype != "utf8" and not c.width
    ]
    if column is None or name not in names:
        what = "does not have one number for each record" if column else "is not there"
        hint = nearest(
            name,
            names,
            "--set task.column=NAME; of an overlay: --set 'data.overlays=[\"NAME\"]'",
        )
        if column is not None and column.dtype == "utf8":
            hint = "of texts make an overlay with a number for each: docs/bert.md, classify"
        raise UsageError(
            f"the label column {name!r} {what}",
            where=str(store.path),
            hint=hint,
        )
    return column


def classes_of(store: Store, name: str) -> tuple[str, ...]:
    """Return the names of the classes of a column, by number.

    They are in the column's vocabulary. Without a vocabulary, the classes are the whole numbers
    from 0 to the largest in the column. Raises `UsageError` for a column that holds no classes.
    """
    column = label_column(store, name)
    if column.dtype.startswith("f"):
        raise UsageError(
            f"the column {name!r} holds fractions, not classes",
            where=str(store.path),
            hint="number the classes from 0",
        )
    if column.vocab in store.vocabularies:
        return _names(store, column.vocab)
    low, high = store.manifest.ranges.get(name, (0, 0))
    if low < 0 or high >= MOST_CLASSES:
        raise UsageError(
            f"the column {name!r} holds numbers from {low:g} to {high:g}; classes are 0 to at most "
            f"{MOST_CLASSES - 1:,}",
            where=str(store.path),
            hint="number the classes from 0",
        )
    return tuple(str(number) for number in range(int(high) + 1))


def _names(store: Store, vocabulary: str) -> tuple[str, ...]:
    path = store.vocabulary_file(vocabulary)
    try:
        names = loads_json(read_file(path))["tokens"]
        if not all(isinstance(name, str) for name in names) or not names:
            raise ValueError("its tokens are not names")
    except (ValueError, TypeError, KeyError) as error:
        raise TokmillError(
            f"this is not a list of classes: {error}",
            where=str(path),
            hint="the same `tokmill build` makes it again",
        ) from None
    return tuple(names)


def same_classes(parts: Sequence[tuple[Store, tuple[str, ...]]]) -> tuple[str, ...]:
    """Return the classes of several stores; the longest list, of which the others are a beginning.

    Raises `UsageError` if a number means different classes in two stores.
    """
    longest = max((names for _, names in parts), key=len)
    for store, names in parts:
        check_classes(store, names, longest, "another store has")
    return longest


def check_classes(store: Store, names: Sequence[str], learned: Sequence[str], who: str) -> None:
    """Refuse a store whose classes are not the known classes or the first of them."""
    if list(names) != list(learned[: len(names)]):
        shown = [", ".join(some[:8]) + ", …" * (len(some) > 8) for some in (names, learned)]
        raise UsageError(
            f"its classes are {shown[0]}; {who} {shown[1]}",
            where=str(store.path),
            hint="a store with the same classes in the same order: `tokmill build tsv … --label "
            f"{' --label '.join(map(shlex.quote, learned[:8]))}`",
        )
