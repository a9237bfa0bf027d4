"""Overlays: columns that were added to a finished store, in `STORE/overlays/NAME/`.

An overlay is itself a store. It has the same records as its base (the store in which it lies): as
many shards in the same order, as many records and tokens in each, but other columns. Its manifest
names the base's fingerprint, so a changed base is noticed.
"""

import re
from pathlib import Path

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import machine_errors
from tokmill.store import manifest as layout
from tokmill.store.manifest import Overlay
from tokmill.store.schema import Column
from tokmill.store.store import Store

FOLDER = "overlays"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class ListedOverlay(msgspec.Struct, frozen=True):
    """An overlay of a store, for listing."""

    name: str
    columns: str
    state: str
    """complete; partial: its build has not finished; stale: the base has changed since."""


def overlay_path(base: Path, name: str) -> Path:
    """Return the folder of an overlay; raises `UsageError` for an impossible name."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"an overlay cannot be called {name!r}",
            hint="a letter or digit first, then also . _ and -: --name mask",
        )
    return base / FOLDER / name


def overlay_names(base: Path) -> list[str]:
    folder = base / FOLDER
    with machine_errors("read", folder):
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path.name for path in paths if path.is_dir() and (path / "plan.json").exists()]


def find_overlays(base: Store) -> list[ListedOverlay]:
    result = []
    for name in overlay_names(base.path):
        overlay = Store(base.path / FOLDER / name)
        state = "partial" if overlay.partial else "complete"
        if facts_of(overlay).base != base.fingerprint:
            state = "stale"
        result.append(ListedOverlay(name, ", ".join(overlay.schema), state))
    return result


def facts_of(overlay: Store) -> Overlay:
    """Return the key `overlay` of an overlay's manifest; raises `TokmillError` without one."""
    facts = overlay.manifest.overlay
    if not isinstance(facts, Overlay):
        raise TokmillError(
            "this store is not an overlay",
            where=str(overlay.path),
            hint="`tokmill build overlay STORE --values FILE` makes one",
        )
    return facts


def vector_column(overlay: Store) -> str:
    """Return the column of vectors of an overlay; raises `UsageError` if it is not one."""
    columns = [name for name, c in overlay.schema.items() if c.width and c.per == "record"]
    if len(columns) != 1:
        raise UsageError(
            f"the overlay has {len(columns) or 'no'} columns of vectors",
            where=str(overlay.path),
            hint="`tokmill embed RUN STORE` makes an overlay with one",
        )
    return columns[0]


def open_overlay(base: Store, name: str) -> Store:
    """Open an overlay of a store."""
    path = overlay_path(base.path, name)
    names = overlay_names(base.path)
    if name not in names:
        raise TokmillError(
            f"the store has no overlay {name!r}",
            where=str(base.path),
            hint=nearest(name, names) or "`tokmill build overlay` or `tokmill embed` makes one",
        )
    overlay = Store(path)
    facts = facts_of(overlay)
    if facts.base != base.fingerprint:
        raise TokmillError(
            f"the store has changed since the overlay {name!r} was made: fingerprint "
            f"{facts.base[:12]} then, {base.fingerprint[:12]} now",
            where=str(path),
            hint=f"make it again: `{command_of(overlay)}`",
        )
    if overlay.partial:
        raise TokmillError(
            f"the overlay {name!r} is not complete",
            where=str(path),
            hint=f"`{command_of(overlay)}` continues its build",
        )
    check_parallel(base, overlay)
    double = [column for column in overlay.schema if column in base.schema]
    if double:
        raise TokmillError(
            f"the overlay {name!r} has a column {double[0]!r}, which the store has already",
            where=str(path),
            hint="open one overlay at a time, or make it under another name: --column",
        )
    return overlay


def check_parallel(base: Store, overlay: Store) -> None:
    """Refuse an overlay whose shards are not those of its base."""
    sizes = [[(entry.records, entry.tokens) for entry in s.shards] for s in (base, overlay)]
    if sizes[0] != sizes[1]:
        raise TokmillError(
            "its shards have other numbers of records or tokens than those of the store",
            where=str(overlay.path),
            hint=f"make it again: `{command_of(overlay)}`",
        )


def check_offsets(base: Store, overlay: Store) -> None:
    """Refuse an overlay in which a record has another length than in its base.

    Reads the offsets of both. Raises `TokmillError` for the first such shard.
    """
    for number in range(len(base.shards)):
        shard = overlay.shard(number)
        if not np.array_equal(base.shard(number)["offsets"], shard["offsets"]):
            raise TokmillError(
                "records have other lengths than those of the store",
                where=str(shard.path),
                hint="build the overlay again with --fresh",
            )


def command_of(overlay: Store) -> str:
    plan = layout.read_plan(overlay.path)
    return plan.command if isinstance(plan.command, str) else "the command that made it"


LOSS = "loss"
"""Name of the column."""
WHOLE = "use integers (uint8): 1 for a token that is learned, 0 for one that is only read"


def check_mask(column: Column, values: tuple[float, float], where: str) -> None:
    """Refuse a column `loss` that is no mask; `values`: its smallest and largest value.

    Raises `TokmillError` unless it has one value per token, and only the values 0 and 1.
    """
    if column.per != "token" or column.width:
        each = "a vector" if column.width else "one value"
        raise TokmillError(
            f"the column {LOSS!r} has {each} per {column.per}; a loss mask needs one value "
            "per token",
            where=where,
            hint="repeat a record's value for each of its tokens, or give the column another name",
        )
    if column.dtype == "f4":
        raise TokmillError(
            f"the column {LOSS!r} holds floating-point numbers; a loss mask is 0 or 1",
            where=where,
            hint=WHOLE,
        )
    low, high = values
    if low < 0 or high > 1:
        raise TokmillError(
            f"the column {LOSS!r} holds {low if low < 0 else high}; a loss mask is 0 or 1",
            where=where,
            hint=WHOLE,
        )


def leaves_out(store: Store) -> bool:
    """Say whether a store with its overlays has a column `loss` that leaves tokens out."""
    return LOSS in store.schema and store.manifest.ranges.get(LOSS, (0, 1))[0] == 0


def check_mask_of(store: Store) -> None:
    """Refuse a store with its overlays if `loss` is not a mask, or leaves no token to learn.

    The range of values is taken from the manifest. Raises `TokmillError`.
    """
    holders = [overlay.path for overlay in store.overlays.values() if LOSS in overlay.schema]
    where = str(next(iter(holders), store.path))
    low, high = store.manifest.ranges.get(LOSS, (1, 1))
    check_mask(store.schema[LOSS], (low, high), where)
    if high == 0:
        raise TokmillError(
            f"the column {LOSS!r} is 0 everywhere, so there is no target",
            where=where,
            hint=WHOLE,
        )
