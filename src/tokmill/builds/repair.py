"""Making shards of a finished store again: to mend them, or to see that they come out the same."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tokmill.builds.finish import missing_tasks
from tokmill.builds.folder import AGAIN, check_links, remove_shards, sweep
from tokmill.builds.make_shard import ShardJob, Work, make_shard, planned_work
from tokmill.builds.mend import mend_files, mend_manifest
from tokmill.builds.probe import settle_probe
from tokmill.builds.source import Item
from tokmill.builds.stamps import doubt
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
from tokmill.store.manifest import Manifest, Receipt
from tokmill.store.shard import SUFFIX
from tokmill.store.store import Store, inputs_fit, read_planned, read_receipts, shard_path
from tokmill.store.validate import Problem, validate


class Repaired(msgspec.Struct, frozen=True):
    """What a repair did."""

    store: str
    shards: list[str]
    """Shards that were made again."""
    remaining: list[Problem]
    files: list[str] = []
    """Other files that were written again."""


def work_of(store: Path) -> tuple[Work, dict[str, ShardJob]]:
    """Return what is needed to make the shards of a store again, by name."""
    plan = layout.read_plan(store)
    if not inputs_fit(store, plan):
        raise TokmillError(
            "the items are not those of plan.json: one of the two was damaged, or a build began "
            "and has not ended",
            where=str(store / "inputs.jsonl"),
            hint=f"`tokmill store repair {shlex.quote(str(store))}` plans anew where the inputs "
            "are what they were; the same build ends what began",
        )
    tasks: dict[str, ShardJob] = {}
    for item in read_planned(store):
        task = tasks.setdefault(item.shard, ShardJob(item.shard, []))
        task.items.append(Item.again(item))
    return planned_work(store, plan), tasks


def remake(store: Path, names: Iterable[str], folder: Path) -> list[Receipt]:
    """Make the planned shards with these names in another folder."""
    check_links(store)
    work, tasks = work_of(store)
    source = work.source()
    if work.format > 1:
        settle_probe(source, store)
    make_folder(folder)
    receipts: list[Receipt] = []
    for name in names:
        if name not in tasks:
            raise TokmillError(
                f"the plan knows no shard {name!r}",
                where=str(store),
                hint="`tokmill store validate STORE` names the shards that are bad",
            )
        receipts += make_shard(source, tasks[name], work.vocabularies, folder, format=work.format)
    return receipts


def deep_check(store: Store, count: int) -> list[Problem]:
    """Make `count` shards again (drawn by name, which is a digest) and compare their bytes."""
    by_name = {entry.name: entry for entry in store.shards}
    planned = sorted({name.partition("-")[0] for name in by_name})[:count]
    folder = store.path / AGAIN
    problems = []
    try:
        for receipt in remake(store.path, planned, folder):
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
    _doubt(store.path, [problem.shard for problem in problems])
    return problems


def _doubt(store: Path, names: Iterable[str]) -> None:
    """Let the next build read the inputs of shards again that do not come out as they were."""
    shards = {name.partition("-")[0] for name in names}
    if shards:
        doubt(store, [item for item in read_planned(store) if item.shard in shards])


def shards_of_inputs(store: Path, inputs: Sequence[str]) -> list[str]:
    """Return the planned shards that hold inputs, by their names below the INPUT argument."""
    found: dict[str, list[str]] = {}
    for item in read_planned(store):
        shards = found.setdefault(item.name, [])
        if item.shard not in shards:
            shards.append(item.shard)
    for name in inputs:
        if name not in found:
            raise UsageError(
                f"the store has no input {name!r}", where=str(store), hint=nearest(name, found)
            )
    return list(dict.fromkeys(shard for name in inputs for shard in found[name]))


def repair(store: Path | str, inputs: Sequence[str] = (), *, quiet: bool = True) -> Repaired:
    """Make what is bad in a store again (or the shards of named inputs), and only that.

    First the files that say what belongs in it (plan, vocabularies, inputs), from copies or from
    the inputs; then shards; then the manifest. A shard that comes out other than it is and other
    than the manifest says is refused: its input has changed, which is a matter for `tokmill build`.
    """
    store = Path(store)
    if not any((store / name).exists() for name in (layout.PLAN, layout.PLAN_COPY)):
        Store(store)
        raise TokmillError(
            "the store has no plan.json, so nothing says what to make again",
            where=str(store),
            hint="build it anew: --fresh",
        )
    lock = locked(store / ".lock", "another build is writing to this store", "wait for it to end")
    scratch = store / AGAIN
    with lock:
        check_links(store)
        sweep(store)
        try:
            files = mend_files(store)
            manifest = _manifest_of(store)
            if inputs:
                names = shards_of_inputs(store, inputs)
            else:
                names = bad_shards(store, manifest, quiet=quiet)
            wanted = {entry.name: entry.sha256 for entry in manifest.shards} if manifest else None
            _put(store, remake(store, names, scratch) if names else [], scratch, wanted)
        finally:
            remove_shards(scratch)
        if (manifest is None or manifest.complete) and mend_manifest(store):
            files.append("manifest.json")
        mended = Store(store)
        if not mended.partial:
            remove_shards(store / "shards", {entry.name for entry in mended.shards})
        remaining = validate(mended, quiet=quiet).problems
        return Repaired(str(store), names, remaining, files)


def _manifest_of(store: Path) -> Manifest | None:
    """Return the manifest; None where it is damaged or lost."""
    with contextlib.suppress(TokmillError):
        return layout.read_sealed(store / "manifest.json", Manifest)
    return None


def bad_shards(store: Path, manifest: Manifest | None, *, quiet: bool) -> list[str]:
    """Return the planned shards that are to be made again."""
    planned = list(read_planned(store))
    known = {item.shard for item in planned}
    bad: list[str] = []
    if manifest is not None:
        problems = validate(Store(store), quiet=quiet).problems
        bad = [problem.shard.partition("-")[0] for problem in problems if problem.shard]
    elif any(read_receipts(store)):
        # Receipts alone say what is there, and may be believed as far as their digests.
        receipts = [receipt for receipt in read_receipts(store) if receipt.shard in known]
        bad = [task.shard for task in missing_tasks(planned, receipts)]
        for receipt in receipts:
            if sha256_file(shard_path(store, receipt.name)) != receipt.sha256:
                bad.append(receipt.shard)
    return [name for name in dict.fromkeys(bad) if name in known]


def _put(
    store: Path, receipts: Iterable[Receipt], scratch: Path, wanted: Mapping[str, str] | None
) -> None:
    """Move shards that were made again to their places, if they are what they were (`wanted`)."""
    for receipt in receipts:
        shard = shard_path(store, receipt.name)
        stands = shard.exists() and sha256_file(shard) == receipt.sha256
        if not stands and wanted is not None and wanted.get(receipt.name) != receipt.sha256:
            _doubt(store, [receipt.name])
            raise TokmillError(
                f"the shard {receipt.name} comes out other than it was: an input changed",
                where=", ".join(sorted({item.name for item in receipt.items})[:3]),
                hint="run the build again with --yes to take the input as it is now",
            )
        for suffix in (".json",) if stands else (SUFFIX, ".json"):
            with machine_errors("rename", store / "shards"):
                made = inside(scratch, f"{receipt.name}{suffix}")
                made.rename(shard.with_suffix(suffix))
    sync_folder(store / "shards")
