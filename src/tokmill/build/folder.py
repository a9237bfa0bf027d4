"""The folder of a store before and between builds: is it one, what does it hold, what changed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from tokmill.build.make import InputChanged
from tokmill.build.plan import difference, plan_stands, write_plan
from tokmill.build.prepare import How, Prepared
from tokmill.build.source import Frozen
from tokmill.errors import Interrupted, MachineError, TokmillError, UsageError
from tokmill.files import machine_errors, make_folder, remove, remove_leftovers, write_file
from tokmill.store import manifest as layout
from tokmill.store.manifest import Overlay, Plan, PlannedItem
from tokmill.store.shard import SUFFIX
from tokmill.store.store import read_planned, read_receipts

KNOWN_FILES = ("manifest.json", "plan.json", "inputs.jsonl", "events.jsonl", "projection.json")
KNOWN_FOLDERS = ("shards", "vocab", "overlays", "cache")
LEARNED = "learned.json"
"""Beside a tokenizer that was learned for a build: the options of its training."""


def check_folder(out: Path) -> None:
    """Refuse a folder that holds something else than a store."""
    if out.is_file():
        raise UsageError(
            "is a file; a store is a folder", where=str(out), hint="choose another path"
        )
    if out.is_dir() and not (out / "plan.json").exists():
        names = {entry.name for entry in out.iterdir()}
        strange = sorted(n for n in names - set(KNOWN_FILES) - set(KNOWN_FOLDERS) if n[0] != ".")
        if strange:
            raise UsageError(
                f"the folder is not empty and holds no store ({strange[0]} …)",
                where=str(out),
                hint="choose a new folder",
            )


def clear(out: Path, spared: Collection[str] = ()) -> None:
    """Remove a store from its folder, its last word first; `spared` folders of it stay."""
    for name in KNOWN_FILES:
        remove(out / name)
    for name in KNOWN_FOLDERS:
        if name in spared:
            continue
        with machine_errors("remove", out / name):
            if name == "vocab" and (out / name / LEARNED).exists():
                # It says how the tokenizer of this build was learned, just before.
                for path in (out / name).iterdir():
                    if path.name != LEARNED:
                        path.unlink()
            elif (out / name).is_dir():
                shutil.rmtree(out / name)


def sweep(out: Path) -> None:
    """Remove what killed writers left behind."""
    for folder in (out, out / "vocab", out / "shards", out / "cache"):
        remove_leftovers(folder)


@contextlib.contextmanager
def given_up(out: Path) -> Iterator[None]:
    """Remove a store that fails where it began, if it holds no record, so that another may begin.

    What was interrupted, stopped by the machine, or met a changed input, is to be continued and
    stays.
    """
    there = [name for name in (*KNOWN_FILES, *KNOWN_FOLDERS) if (out / name).exists()]
    # A tokenizer may have been learned for it, and rows planned.
    begins = {*there} <= {"vocab", "cache"}
    try:
        yield
    except Exception as error:
        goes_on = isinstance(error, Interrupted | MachineError | InputChanged)
        if begins and not goes_on and not any(receipt.records for receipt in read_receipts(out)):
            sweep(out)
            clear(out, there)
            remove(out / ".lock")
        raise


def settle(out: Path, prepared: Prepared, how: How) -> None:
    """Compare with the plan that is there, and write the new one with its vocabularies."""
    plan = prepared.plan
    if (out / "plan.json").exists():
        old: Plan = layout.read_json(out / "plan.json", Plan)
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
        if old.plan_id != plan.plan_id:
            report_changes(out, prepared.planned, how)
        elif plan_stands(out, plan, prepared.planned):
            write_vocabularies(out, prepared.frozen)
            return
    elif any(out.glob(f"shards/*{SUFFIX}")):
        raise TokmillError(
            "there are shards but no plan.json", where=str(out), hint="start over with --fresh"
        )
    write_vocabularies(out, prepared.frozen)
    make_folder(out / "shards")
    write_plan(out, plan, prepared.planned)


def write_vocabularies(out: Path, frozen: Mapping[str, Frozen]) -> None:
    """Write the files of the vocabularies that are not there, or not what they should be."""
    for item in frozen.values():
        write_if_different(make_folder(out / "vocab") / item.vocabulary.file, item.data)


def report_changes(out: Path, planned: Sequence[PlannedItem], how: How) -> None:
    """List changed and vanished inputs; go on only if the user agreed."""
    if not (out / "inputs.jsonl").exists():
        return
    before = list(read_planned(out))
    now = {item.name: item.digest for item in planned}
    lines: dict[str, None] = {}
    for item in before:
        if now.get(item.name) == item.digest:
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


def write_if_different(path: Path, data: bytes) -> None:
    """Write a file unless the one that stands is the same."""
    with machine_errors("read", path):
        same = path.exists() and path.read_bytes() == data
    if not same:
        write_file(path, data)
