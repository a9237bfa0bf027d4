"""The folder of a store before and between builds: is it one, what does it hold, what changed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokmill.builds.make_shard import InputChanged
from tokmill.builds.plan import difference, plan_stands, write_plan
from tokmill.builds.prepare import How, Prepared
from tokmill.builds.probe import PROBE_LOCK
from tokmill.builds.source import Frozen
from tokmill.builds.stamps import FILE as STAMPS
from tokmill.builds.stamps import changed_shards, stamps_of, write_stamps
from tokmill.errors import Interrupted, MachineError, TokmillError, UsageError
from tokmill.files import (
    inside,
    is_lock,
    locked,
    machine_errors,
    make_folder,
    new_folder,
    remove,
    remove_leftovers,
    write_file,
)
from tokmill.store import manifest as layout
from tokmill.store.manifest import SHARD_FILE, Manifest, Overlay, Plan, PlannedItem
from tokmill.store.marks import LOCK, is_store
from tokmill.store.probe import FILE as PROBE
from tokmill.store.probe import probe_path
from tokmill.store.shard import SUFFIX
from tokmill.store.store import read_planned, read_receipts
from tokmill.store.vocab import LEARNED

KNOWN_FILES = (
    "manifest.json", layout.PLAN, layout.PLAN_COPY, "inputs.jsonl", "events.jsonl",
    "projection.json",
)  # fmt: skip
KNOWN_FOLDERS = ("shards", "vocab", "overlays", "cache")
SHARD_DIGITS = 24
"""Digits of a shard's name before the number of a part."""
AGAIN = "cache/again"
"""Where shards are made again, to be compared with those that stand."""
CACHED = re.compile(
    r"stamps\.jsonl|repeats-[0-9a-f]{24}|\.repeats\.lock|pieces-[0-9a-f]{16}-[-0-9]+\.safetensors"
)
"""What else a store keeps in `cache`."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TAKEN = "another build is writing to this store"


def check_folder(out: Path) -> None:
    """Refuse a folder that holds something else than a store.

    A store is known by what its files say, one that has just begun by its lock; neither by names.
    """
    if out.is_file():
        raise UsageError(
            "is a file; a store is a folder", where=str(out), hint="choose another path"
        )
    if not out.is_dir():
        return
    check_links(out)
    if is_store(out):
        return
    names = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith("."))
    if is_lock(out / LOCK):
        names = [name for name in names if name not in (*KNOWN_FILES, *KNOWN_FOLDERS)]
    if names:
        raise UsageError(
            f"the folder is not empty and holds no store ({names[0]} …)",
            where=str(out),
            hint="choose a new folder",
        )


def format_of(out: Path) -> int:
    """Return the format of a store that is built: that of the one that is there, or the newest.

    One that is there goes on in its own format, so that its shards stay what they are.
    """
    kinds: dict[str, Any] = {layout.PLAN: Plan, layout.PLAN_COPY: Plan, "manifest.json": Manifest}
    for name, kind in kinds.items():
        with contextlib.suppress(TokmillError):
            found: int = layout.read_sealed(out / name, kind).format
            if found in layout.READABLE:
                return found
    return layout.FORMAT


def check_links(out: Path) -> None:
    """Refuse a store one of whose folders is a link: what lies behind it may be anybody's."""
    for name in (*KNOWN_FOLDERS, AGAIN):
        if (out / name).is_symlink():
            raise UsageError(
                "is a link; a store holds its files itself",
                where=str(out / name),
                hint="remove the link, or choose another folder for the whole store",
            )


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Hold the lock of a folder that is to become a store; it goes again if nothing else came."""
    with new_folder(out), locked(out / LOCK, TAKEN, "wait for it, or choose another folder"):
        try:
            yield
        finally:
            if [path.name for path in out.iterdir()] == [LOCK]:
                remove(out / LOCK)


def clear(out: Path, spared: Collection[str] = ()) -> None:
    """Remove a store from its folder, its last word first; `spared` folders of it stay.

    What a store does not write stays too, and the folder that it lies in.
    """
    check_links(out)
    vocabularies = _vocabulary_files(out)
    for name in KNOWN_FILES:
        if not (out / name).is_dir():
            remove(out / name)
    for name in KNOWN_FOLDERS:
        folder = out / name
        if name in spared or not folder.is_dir():
            continue
        if name == "overlays":
            for overlay in [path for path in folder.iterdir() if is_store(path)]:
                clear(overlay)
                remove(overlay / LOCK)
                _remove_empty(overlay)
        elif name == "vocab":
            # LEARNED says how the tokenizer of this build was learned, just before.
            if (folder / LEARNED).exists():
                vocabularies.difference_update(TOKENIZER_FILES)
            _remove_files(folder, lambda name: name in vocabularies)
        elif name == "shards":
            remove_shards(folder)
        else:
            remove_shards(out / AGAIN)
            _remove_files(folder, lambda name: CACHED.fullmatch(name) is not None)


def remove_shards(folder: Path, kept: Collection[str] = ()) -> None:
    """Remove the files of shards in a folder but those of shards `kept`; nothing else.

    The folder goes too if it is empty then.
    """
    _remove_files(
        folder,
        lambda name: SHARD_FILE.fullmatch(name) is not None and name.partition(".")[0] not in kept,
    )


def _remove_files(folder: Path, ours: Callable[[str], bool]) -> None:
    if not folder.is_dir() or folder.is_symlink():
        return
    remove_leftovers(folder)
    with machine_errors("list", folder), os.scandir(folder) as entries:
        found = [e.name for e in entries if ours(e.name) and e.is_file(follow_symlinks=False)]
    for name in found:
        remove(folder / name)
    _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _vocabulary_files(out: Path) -> set[str]:
    """Return the names of the files in `vocab` of a store, as its plan or its manifest has them."""
    kinds: dict[str, Any] = {layout.PLAN: Plan, layout.PLAN_COPY: Plan, "manifest.json": Manifest}
    for name, kind in kinds.items():
        with contextlib.suppress(TokmillError):
            found: Any = layout.read_sealed(out / name, kind)
            beside = TOKENIZER_FILES if "token" in found.vocabularies else ()
            return {*(one.file for one in found.vocabularies.values()), *beside, PROBE}
    return {*TOKENIZER_FILES, PROBE}


def sweep(out: Path) -> None:
    """Remove what killed writers left behind."""
    for folder in (out, out / "vocab", out / "shards", out / "cache"):
        remove_leftovers(folder)
    if probe_path(out).exists():
        # Nobody takes the lock any more; a kill may have left it.
        remove(out / PROBE_LOCK)


@contextlib.contextmanager
def given_up(out: Path) -> Iterator[None]:
    """Remove a store that fails where it began, if it holds no record, so that another may begin.

    What was interrupted, stopped by the machine, or met a changed input, is to be continued and
    stays.
    """
    there = [name for name in (*KNOWN_FILES, *KNOWN_FOLDERS) if (out / name).exists()]
    # A tokenizer may have been learned for it, and rows planned.
    begins = {*there} <= {"vocab", "cache"}
    asked = probe_path(out).exists()
    try:
        yield
    except Exception as error:
        goes_on = isinstance(error, Interrupted | MachineError | InputChanged)
        if begins and not goes_on and not any(receipt.records for receipt in read_receipts(out)):
            sweep(out)
            clear(out, there)
            remove(out / STAMPS)
            if not asked:
                remove(probe_path(out))
            if not there:
                # It is the mark of what stays.
                remove(out / LOCK)
        raise


def settle(out: Path, prepared: Prepared, how: How) -> None:
    """Compare with the plan that is there, and write the new one with its vocabularies."""
    plan, stamps = prepared.plan, stamps_of(prepared.planned)
    if any((out / name).exists() for name in (layout.PLAN, layout.PLAN_COPY)):
        old = _plan_before(out, plan)
        if old.recipe_id != plan.recipe_id and any(r.records for r in read_receipts(out)):
            lines = "\n  ".join(difference(old.recipe, plan.recipe))
            is_overlay = isinstance(plan.overlay, Overlay)
            thing = "overlay was made" if is_overlay else "store was built"
            place = "give the new one another --name" if is_overlay else "build into a new folder"
            raise TokmillError(
                f"the {thing} with another recipe:\n  {lines}",
                where=str(out),
                hint=f"{place}, or start over with --fresh",
            )
        changed = changed_shards(out, prepared.planned, stamps, prepared.source, quiet=how.quiet)
        if old.plan_id != plan.plan_id or changed:
            report_changes(out, prepared.planned, how, changed)
        _forget(out, changed)
        if old.plan_id == plan.plan_id and plan_stands(out, plan, prepared.planned):
            write_vocabularies(out, prepared.frozen)
            write_stamps(out, stamps)
            return
    elif any(SHARD_FILE.fullmatch(path.name) for path in out.glob(f"shards/*{SUFFIX}")):
        raise TokmillError(
            "there are shards but no plan.json", where=str(out), hint="start over with --fresh"
        )
    write_vocabularies(out, prepared.frozen)
    make_folder(out / "shards")
    write_plan(out, plan, prepared.planned)
    write_stamps(out, stamps)


def _forget(out: Path, shards: Collection[str]) -> None:
    """Remove the receipts of shards, so that these are made again."""
    for path in [*(out / "shards").glob("*.json")] if shards else []:
        if SHARD_FILE.fullmatch(path.name) and path.name[:SHARD_DIGITS] in shards:
            remove(path)


def _plan_before(out: Path, plan: Plan) -> Plan:
    """Return the plan that is there; where it is damaged, and was of one recipe, the new one."""
    try:
        return layout.read_plan(out)
    except TokmillError:
        with contextlib.suppress(TokmillError):
            manifest = layout.read_sealed(out / "manifest.json", Manifest)
            if manifest.recipe_id == plan.recipe_id:
                return plan
        raise


def write_vocabularies(out: Path, frozen: Mapping[str, Frozen]) -> None:
    """Write the files of the vocabularies that are not there, or not what they should be."""
    for item in frozen.values():
        write_if_different(inside(make_folder(out / "vocab"), item.vocabulary.file), item.data)


def report_changes(
    out: Path, planned: Sequence[PlannedItem], how: How, changed: Mapping[str, str]
) -> None:
    """List changed and vanished inputs; go on only if the user agreed.

    `changed`: shard → an input that has other content, though its name and sample are the same.
    """
    if not (out / "inputs.jsonl").exists():
        return
    before = list(read_planned(out))
    now = {item.name: (item.digest, item.others) for item in planned}
    lines = dict.fromkeys(f"changed: {name}" for name in changed.values())
    for item in before:
        if now.get(item.name) == (item.digest, item.others):
            continue
        path = Path(item.path)
        if path.suffix == SUFFIX and path.parent.name == "shards":
            # A shard of another store: its name means nothing to anybody, the store does.
            lines[f"changed or grown: {path.parent.parent}"] = None
        else:
            lines[f"{'changed' if item.name in now else 'vanished'}: {item.name}"] = None
    if not lines:
        return
    shown = "\n  ".join(list(lines)[:20]) + (
        f"\n  … and {len(lines) - 20} more" * (len(lines) > 20)
    )
    if not how.yes:
        raise TokmillError(
            f"inputs are not what they were:\n  {shown}",
            where=str(out),
            hint="with --yes their shards are made again or dropped, all others are kept",
        )


def write_if_different(path: Path, data: bytes) -> bool:
    """Write a file unless the one that stands is the same; say whether it was written."""
    with machine_errors("read", path):
        same = path.exists() and path.read_bytes() == data
    if not same:
        write_file(path, data)
    return not same
