"""Making shards of a finished store again: to mend them, or to see that they come out the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tokmill.build.finish import in_order, missing_tasks
from tokmill.build.folder import (
    AGAIN,
    check_links,
    remove_shards,
    sweep,
    write_if_different,
)
from tokmill.build.make import Task, Work, make_shard
from tokmill.build.resources import Amount
from tokmill.build.source import Item
from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.files import (
    inside,
    locked,
    machine_errors,
    make_folder,
    sha256_file,
    sync_folder,
)
from tokmill.store import manifest as layout
from tokmill.store.manifest import Plan, Receipt
from tokmill.store.shard import SUFFIX
from tokmill.store.store import (
    Store,
    make_manifest,
    planned_shards,
    read_planned,
    read_receipts,
    shard_path,
)
from tokmill.store.validate import Problem, validate


class Repaired(msgspec.Struct, frozen=True):
    """What a repair did."""

    store: str
    shards: list[str]
    remaining: list[Problem]


def work_of(store: Store) -> tuple[Work, dict[str, Task]]:
    """Return what is needed to make the store's shards again."""
    plan: Plan = layout.read_json(store.path / "plan.json", Plan)
    tasks: dict[str, Task] = {}
    planned = list(read_planned(store.path))
    if layout.plan_digest(plan.recipe_id, planned) != plan.plan_id:
        raise TokmillError(
            "the items are not those of plan.json: one of the two was damaged, or a build began "
            "and has not ended",
            where=str(store.path / "inputs.jsonl"),
            hint="run the build again: it writes both anew and ends what began",
        )
    for item in planned:
        task = tasks.setdefault(item.shard, Task(item.shard, []))
        task.items.append(Item(item.name, item.path, item.start, item.stop, item.digest))
    work = Work(
        plan.recipe["source"],
        plan.options,
        plan.roots,
        plan.vocabularies,
        str(store.path),
        Amount().resources(),
    )
    return work, tasks


def remake(store: Store, names: Iterable[str], folder: Path) -> list[Receipt]:
    """Make the planned shards with these names in another folder."""
    check_links(store.path)
    work, tasks = work_of(store)
    source = work.source()
    make_folder(folder)
    receipts: list[Receipt] = []
    for name in names:
        if name not in tasks:
            raise TokmillError(f"the plan knows no shard {name!r}", where=str(store.path))
        receipts += make_shard(source, tasks[name], work.vocabularies, folder)
    return receipts


def deep_check(store: Store, count: int) -> list[Problem]:
    """Make `count` shards again (drawn by name, which is a digest) and compare their bytes."""
    by_name = {entry.name: entry for entry in store.shards}
    planned = sorted({name.partition("-")[0] for name in by_name})[:count]
    folder = store.path / AGAIN
    problems = []
    try:
        for receipt in remake(store, planned, folder):
            entry = by_name.get(receipt.name)
            if entry is None or entry.sha256 != receipt.sha256:
                problems.append(
                    Problem(
                        str(shard_path(store.path, receipt.name)),
                        "making it again from its input gives other bytes",
                        receipt.name,
                    )
                )
    finally:
        remove_shards(folder)
    return problems


def shards_of_input(store: Store, name: str) -> list[str]:
    """Return the planned shards that hold an input, by its name below the INPUT argument."""
    names: set[str] = set()
    found: list[str] = []
    for item in read_planned(store.path):
        names.add(item.name)
        if item.name == name and item.shard not in found:
            found.append(item.shard)
    if not found:
        raise UsageError(
            f"the store has no input {name!r}", where=str(store.path), hint=nearest(name, names)
        )
    return found


def mend_manifest(store: Store) -> None:
    """Write the manifest that plan and receipts give, where no shard is missing."""
    plan: Plan = layout.read_json(store.path / "plan.json", Plan)
    planned = list(read_planned(store.path))
    known = {item.shard for item in planned}
    receipts = [receipt for receipt in read_receipts(store.path) if receipt.shard in known]
    if store.manifest.complete and not missing_tasks(planned, receipts):
        manifest = make_manifest(plan, in_order(planned, receipts), complete=True)
        write_if_different(store.path / "manifest.json", layout.encode(manifest))


def repair(store: Store, inputs: Sequence[str] = (), *, quiet: bool = True) -> Repaired:
    """Make the bad shards again (or those of named inputs), and only those.

    A shard that comes out other than it is and other than the manifest says is refused: its input
    has changed, which is a matter for `tokmill build`. A manifest that is not what plan and
    receipts say is written anew.
    """
    with locked(
        store.path / ".lock", "another build is writing to this store", "wait for it to end"
    ):
        sweep(store.path)
        if inputs:
            names = [shard for name in inputs for shard in shards_of_input(store, name)]
        else:
            problems = validate(store, quiet=quiet).problems
            known = set(planned_shards(store.path))
            bad = dict.fromkeys(p.shard.partition("-")[0] for p in problems if p.shard)
            names = [name for name in bad if name in known]
        wanted = {entry.name: entry.sha256 for entry in store.shards}
        folder = store.path / AGAIN
        try:
            for receipt in remake(store, names, folder):
                shard = shard_path(store.path, receipt.name)
                stands = shard.exists() and sha256_file(shard) == receipt.sha256
                if not stands and wanted.get(receipt.name) != receipt.sha256:
                    raise TokmillError(
                        f"the shard {receipt.name} comes out other than it was: an input changed",
                        where=", ".join(sorted({item.name for item in receipt.items})[:3]),
                        hint="run the build again with --yes to take the input as it is now",
                    )
                for suffix in (".json",) if stands else (SUFFIX, ".json"):
                    with machine_errors("rename", store.path / "shards"):
                        made = inside(folder, f"{receipt.name}{suffix}")
                        made.rename(shard.with_suffix(suffix))
            sync_folder(store.path / "shards")
        finally:
            remove_shards(folder)
        mend_manifest(store)
        if store.manifest.complete:
            remove_shards(store.path / "shards", {entry.name for entry in Store(store.path).shards})
        return Repaired(str(store.path), names, validate(Store(store.path), quiet=quiet).problems)
