"""Columns that hold record numbers of another store: find that store and check its fingerprint.

A manifest states fingerprint and path of each such store. The path comes from a file, so it is not
trusted: whatever lies there is only opened for reading, and only used if it is a store with the
stated fingerprint.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import path_from_text, path_to_text
from tokmill.store import manifest as layout
from tokmill.store.manifest import Reference
from tokmill.store.store import Store


def reference_to(path: Path | str) -> Reference:
    """Return the reference to a store, with an absolute path."""
    store = Store(path).whole()
    place = path_to_text(str(store.path.resolve()))
    return Reference(store.fingerprint, place, store.records, store.manifest.recipe_id)


def references_of(store: Store) -> dict[str, Reference]:
    stated = store.manifest.references
    return {
        name: msgspec.structs.replace(one, path=path_to_text(str(place_of(store.path, one))))
        for name, one in (stated if isinstance(stated, dict) else {}).items()
    }


def written_in(folder: Path, references: Mapping[str, Reference]) -> dict[str, Reference]:
    """Return references with absolute paths in the form in which a store writes them.

    A path is made relative if both stores lie below a common folder other than `/`, so that they
    can be moved together.
    """
    home, written = str(folder.resolve()), {}
    for name, one in references.items():
        place = path_from_text(one.path)
        if os.path.commonpath([home, place]) != os.sep:
            place = os.path.relpath(place, home)
            if path_to_text(place) != place:
                # JSON holds a path that is not UTF-8 as a URI, which is absolute.
                place = path_from_text(one.path)
        written[name] = msgspec.structs.replace(one, path=path_to_text(place))
    return written


def place_of(folder: Path, reference: Reference) -> Path:
    """Return the folder that a reference in the store `folder` names; it may lie anywhere."""
    place = path_from_text(reference.path)
    if not place or "\0" in place or len(os.fsencode(place)) > 4095:
        raise TokmillError(
            f"the path of a referred store, {reference.path[:40]!r}, is impossible",
            where=str(folder / "manifest.json"),
            hint="the file is damaged, or not to be trusted",
        )
    return Path(os.path.abspath(folder.resolve().joinpath(place)))


def reference_of(store: Store, column: str) -> Reference:
    """Return the reference of a column."""
    references = [name for name, one in store.schema.items() if one.ref is not None]
    if column not in references:
        raise UsageError(
            f"the store has no column {column!r} that refers to another store",
            where=str(store.path),
            hint=nearest(column, references)
            or "`tokmill build overlay STORE --values FILE --refer COLUMN=OTHER` makes one, "
            "`tokmill build triplets PICKLES --blocks OTHER` too; intervals refer to blocks if "
            "they are built with `tokmill build bbv --blocks STORE`",
        )
    stated, name = store.manifest.references, store.schema[column].ref
    result = stated.get(name or "") if isinstance(stated, dict) else None
    where = str(store.path / "manifest.json")
    if result is None:
        raise TokmillError(
            f"the column {column!r} refers to the store {name!r}, which the manifest does not "
            "describe",
            where=where,
            hint="build the store again: --fresh",
        )
    low, high = store.manifest.ranges.get(column, (0, -1))
    if low < 0 or high >= result.records:
        raise TokmillError(
            f"the column {column!r} holds {low if low < 0 else high}; the store that it refers to "
            f"has the records 0 to {result.records - 1}",
            where=where,
            hint="build the store again with record numbers in this range",
        )
    return result


def open_reference(store: Store, column: str, opened: dict[str, Store] | None = None) -> Store:
    """Open the store of a column; `opened` (fingerprint → store) saves opening it twice."""
    stated = reference_of(store, column)
    if opened is not None and stated.fingerprint in opened:
        return opened[stated.fingerprint]
    place = place_of(store.path, stated)
    here = f"the store that the column {column!r} refers to"
    try:
        result = Store(place)
    except TokmillError as error:
        raise TokmillError(
            f"{here} cannot be opened: {error.what}",
            where=str(place),
            hint="if it was moved, move it back, or put a link there (ln -s)",
        ) from error
    if result.fingerprint != stated.fingerprint:
        raise TokmillError(
            f"{here} {difference(stated, result)}: fingerprint {stated.fingerprint[:12]} and "
            f"{stated.records:,} records then, {result.fingerprint[:12]} and "
            f"{result.records:,} now",
            where=str(place),
            hint="put an unchanged copy there; or number the records anew: "
            f"`{again_command(store)}`",
        )
    if result.records != stated.records:
        raise TokmillError(
            f"{here} has {result.records:,} records, not {stated.records:,}",
            where=str(store.path / "manifest.json"),
            hint="the file is damaged, or not to be trusted: build the store again with --fresh",
        )
    if opened is not None:
        opened[stated.fingerprint] = result
    return result


def difference(stated: Reference, store: Store) -> str:
    if store.manifest.recipe_id == stated.recipe_id:
        if store.records != stated.records:
            return "has grown" if store.records > stated.records else "has lost records"
        return "was built again from other content"
    if store.manifest.source == "select":
        return "is a selection, in which records have other numbers"
    return "is a different one"


def again_command(store: Store) -> str:
    plan = store.path / layout.PLAN
    command = layout.read_plan(store.path).command if plan.exists() else ""
    return command if isinstance(command, str) and command else "the build that made this store"


def bad_references(store: Store) -> Iterator[TokmillError]:
    for column, spec in store.schema.items():
        if spec.ref is not None:
            try:
                open_reference(store, column, store.referred)
            except TokmillError as error:
                yield error
