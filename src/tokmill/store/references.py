"""Columns that hold record numbers of another store: that store is found, and is what it was.

A manifest says of each such store its fingerprint and the place where it was. The place is what a
file says, so nothing is believed of it: whatever lies there is opened as a store, for reading
alone, and is used if its fingerprint is the stated one.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.files import locked, path_from_text, path_to_text, write_file
from tokmill.store import manifest as layout
from tokmill.store.manifest import Manifest, Plan, Reference
from tokmill.store.marks import LOCK
from tokmill.store.seal import sealed
from tokmill.store.store import Store

NEW = "NEW"
"""Stands in hints for the folder that only the user knows."""


def reference_to(path: Path | str) -> Reference:
    """Return what a manifest says of a store that is referred to, its place absolute.

    Raises `TokmillError` where there is no store, or one whose build has not finished.
    """
    store = Store(path)
    if store.partial:
        raise TokmillError(
            "the store is not complete, so the numbers of its records will change",
            where=str(store.path),
            hint="finish it with the same `tokmill build` before something refers to it",
        )
    place = path_to_text(str(store.path.resolve()))
    return Reference(store.fingerprint, place, store.records, store.manifest.recipe_id)


def references_of(store: Store) -> dict[str, Reference]:
    """Return the references of a store by name, their places absolute."""
    stated = store.manifest.references
    return {
        name: msgspec.structs.replace(one, path=path_to_text(str(place_of(store.path, one))))
        for name, one in (stated if isinstance(stated, dict) else {}).items()
    }


def written_in(folder: Path, references: Mapping[str, Reference]) -> dict[str, Reference]:
    """Return references whose places are absolute as the files of a store say them.

    Relative where both have a folder above them in common, so that they may be moved together.
    """
    home, written = str(folder.resolve()), {}
    for name, one in references.items():
        place = path_from_text(one.path)
        if os.path.commonpath([home, place]) != os.sep:
            place = os.path.relpath(place, home)
            if path_to_text(place) != place:
                # JSON holds a path that is no UTF-8 as a URI, which is absolute.
                place = path_from_text(one.path)
        written[name] = msgspec.structs.replace(one, path=path_to_text(place))
    return written


def place_of(folder: Path, reference: Reference) -> Path:
    """Return the folder that a reference in the store `folder` names.

    It may lie anywhere. Raises `TokmillError` for what no path can be.
    """
    place = path_from_text(reference.path)
    if not place or "\0" in place or len(os.fsencode(place)) > 4095:
        raise TokmillError(
            f"the place of a referred store, {reference.path[:40]!r}, is no path",
            where=str(folder / "manifest.json"),
            hint="the file is damaged, or not to be trusted",
        )
    return Path(os.path.abspath(folder.resolve().joinpath(place)))


def reference_of(store: Store, column: str) -> Reference:
    """Return what the manifest says of the store that a column refers to.

    Raises `UsageError` for a column that is not there or refers to none, `TokmillError` where the
    manifest says nothing of the store, or where a number is beyond its records.
    """
    known = [name for name, one in store.schema.items() if one.ref is not None]
    if column not in known:
        raise UsageError(
            f"the store has no column {column!r} that refers to another store",
            where=str(store.path),
            hint=nearest(column, known)
            or "`tokmill build overlay STORE --values FILE --refer COLUMN=OTHER` makes one",
        )
    stated, name = store.manifest.references, store.schema[column].ref
    found = stated.get(name or "") if isinstance(stated, dict) else None
    where = str(store.path / "manifest.json")
    if found is None:
        raise TokmillError(
            f"the column {column!r} refers to the store {name!r}, of which nothing is said",
            where=where,
            hint="build the store again: --fresh",
        )
    low, high = store.manifest.ranges.get(column, (0, -1))
    if low < 0 or high >= found.records:
        raise TokmillError(
            f"the column {column!r} holds {low if low < 0 else high}; the store that it refers to "
            f"has the records 0 to {found.records - 1}",
            where=where,
            hint="build the store again with numbers of records",
        )
    return found


def open_reference(store: Store, column: str, opened: dict[str, Store] | None = None) -> Store:
    """Open the store that a column refers to; `opened` (fingerprint → store) saves opening twice.

    Raises:
        UsageError: the column refers to no store.
        TokmillError: the store is not there, or not what it was; a number is beyond its records.
    """
    stated = reference_of(store, column)
    if opened is not None and stated.fingerprint in opened:
        return opened[stated.fingerprint]
    place = place_of(store.path, stated)
    here = f"the store that the column {column!r} refers to"
    try:
        found = Store(place)
    except TokmillError as error:
        raise TokmillError(
            f"{here} cannot be opened: {error.what}",
            where=str(place),
            hint=f"say where it is now: `{refer_command(store.path, column)}`",
        ) from error
    if found.fingerprint != stated.fingerprint:
        raise TokmillError(
            f"{here} {difference(stated, found)}: fingerprint {stated.fingerprint[:12]} and "
            f"{stated.records:,} records then, {found.fingerprint[:12]} and {found.records:,} now",
            where=str(place),
            hint=f"where a copy is as it was, say so: `{refer_command(store.path, column)}`; else "
            f"number the records anew: `{again_command(store)}`",
        )
    if found.records != stated.records:
        raise TokmillError(
            f"{here} has {found.records:,} records, not {stated.records:,}",
            where=str(store.path / "manifest.json"),
            hint="the file is damaged, or not to be trusted: build the store again with --fresh",
        )
    if opened is not None:
        opened[stated.fingerprint] = found
    return found


def difference(stated: Reference, found: Store) -> str:
    """Return in words what happened to a store that has another fingerprint than was stated."""
    if found.manifest.recipe_id == stated.recipe_id:
        if found.records != stated.records:
            return "has grown" if found.records > stated.records else "has lost records"
        return "was built again from other content"
    if found.manifest.source == "select":
        return "is a selection, in which records have other numbers"
    return "is another one"


def refer_command(store: Path, column: str) -> str:
    """Return the command that says where a referred store is now."""
    return f"tokmill store refer {shlex.quote(str(store))} {column} {NEW}"


def again_command(store: Store) -> str:
    """Return the command that makes a store again, as far as it is known."""
    plan = store.path / layout.PLAN
    command = layout.read_plan(store.path).command if plan.exists() else ""
    return command if isinstance(command, str) and command else "the build that made this store"


def bad_references(store: Store) -> Iterator[tuple[TokmillError, str]]:
    """Yield what is wrong with the columns that refer to stores, and what mends it."""
    for column, spec in store.schema.items():
        if spec.ref is None:
            continue
        mend = again_command(store)
        try:
            reference_of(store, column)
            mend = refer_command(store.path, column)
            open_reference(store, column, store.referred)
        except TokmillError as error:
            yield error, mend


def refer(path: Path | str, column: str, new: Path | str) -> list[str]:
    """Say in a store where the store that a column refers to is now; return the columns it is for.

    Every column that refers to the same store follows. Fingerprint and records stay what they are.

    Raises `TokmillError` where the store at `new` is not the one that was referred to.
    """
    store = Store(path)
    stated = reference_of(store, column)
    found = reference_to(new)
    if found.fingerprint != stated.fingerprint:
        raise TokmillError(
            f"the store {difference(stated, Store(new))}: fingerprint {found.fingerprint[:12]}, "
            f"and the column {column!r} refers to {stated.fingerprint[:12]}",
            where=str(new),
            hint="name a copy of the store as it was, or number the records anew: "
            f"`{again_command(store)}`",
        )
    [placed] = written_in(store.path, {"": found}).values()

    def moved(references: Mapping[str, Reference]) -> dict[str, Reference]:
        return {
            name: msgspec.structs.replace(one, path=placed.path)
            if one.fingerprint == found.fingerprint
            else one
            for name, one in references.items()
        }

    with locked(store.path / LOCK, "a build is writing to this store", "wait for it to end"):
        kinds: dict[str, type[Plan] | type[Manifest]] = {
            layout.PLAN: Plan,
            layout.PLAN_COPY: Plan,
            "manifest.json": Manifest,
        }
        for name, kind in kinds.items():
            file = store.path / name
            if not file.exists():
                continue
            said = layout.read_sealed(file, kind)
            if isinstance(said.references, dict):
                said = msgspec.structs.replace(said, references=moved(said.references))
                write_file(file, sealed(said))
    fingerprints = {name: one.fingerprint for name, one in references_of(store).items()}
    return [
        name
        for name, spec in store.schema.items()
        if fingerprints.get(spec.ref or "") == found.fingerprint
    ]
