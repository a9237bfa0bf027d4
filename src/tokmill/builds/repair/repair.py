"""Make shards of a finished store again: to repair them, or to check that they come out equal."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import inside, machine_errors, make_folder, sha256_file, sync_folder
from tokmill.base.locks import locked
from tokmill.builds.check_probe import settle_probe
from tokmill.builds.finish import missing_tasks
from tokmill.builds.folder import AGAIN, TAKEN, check_links, remove_shards, sweep
from tokmill.builds.make_shard import (
    Content,
    ShardJob,
    Work,
    check_unchanged,
    make_shard,
    planned_work,
)
from tokmill.builds.repair.repair_files import mend_files, mend_manifest
from tokmill.builds.repair.stamps import doubt
from tokmill.builds.source import Item
from tokmill.store import manifest as layout
from tokmill.store.checks.locate import LeftOut, input_paths, line_of
from tokmill.store.checks.validate import Problem, validate
from tokmill.store.manifest import Manifest, Receipt
from tokmill.store.marks import LOCK
from tokmill.store.receipts import inputs_fit, planned_receipts, read_planned, read_receipts
from tokmill.store.schema import each_drop
from tokmill.store.shards.shard import SUFFIX
from tokmill.store.store import Store, shard_path


class Repaired(msgspec.Struct, frozen=True):
    """The result of a repair."""

    store: str
    shards: list[str]
    """Shards that were made again."""
    remaining: list[Problem]
    files: list[str] = []
    """Other files that were written again."""


def work_of(store: Path) -> tuple[Work, dict[str, ShardJob]]:
    """Return the `Work` of a store and its shards by name, to make shards again."""
    plan = layout.read_plan(store)
    if not inputs_fit(store, plan):
        raise TokmillError(
            "the items are not those of plan.json: one of the two is damaged, or a build has begun "
            "and not ended",
            where=str(store / "inputs.jsonl"),
            hint=f"`tokmill store repair {shlex.quote(str(store))}` writes them again if the "
            "inputs have not changed; the same build finishes what has begun",
        )
    tasks: dict[str, ShardJob] = {}
    for item in read_planned(store):
        task = tasks.setdefault(item.shard, ShardJob(item.shard, []))
        task.items.append(Item.again(item))
    return planned_work(store, plan), tasks


def remake(store: Path, names: Iterable[str], folder: Path) -> list[Receipt]:
    """Make planned shards again, in another folder."""
    check_links(store)
    work, tasks = work_of(store)
    source = work.source()
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
        receipts += make_shard(source, tasks[name], work.vocabularies, folder)
    return receipts


def deep_check(store: Store, count: int) -> list[Problem]:
    """Make `count` shards again and compare their bytes; names are digests, so this is a sample."""
    # A shard that was cut is not yet what the plan makes.
    by_name = {
        entry.name: entry
        for number, entry in enumerate(store.shards)
        if store.receipt(number).cut is UNSET
    }
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
    """Make the next build read the inputs of these shards again."""
    shards = {name.partition("-")[0] for name in names}
    if shards:
        doubt(store, [item for item in read_planned(store) if item.shard in shards])


def shards_of_inputs(store: Path, inputs: Sequence[str]) -> list[str]:
    found: dict[str, list[str]] = {}
    for item in read_planned(store):
        shards = found.setdefault(item.name, [])
        if item.shard not in shards:
            shards.append(item.shard)
    for name in inputs:
        if name not in found:
            under = [known for known in found if known.endswith(f"/{name}")] or found
            raise UsageError(
                f"the store has no input {name!r}", where=str(store), hint=nearest(name, under)
            )
    return list(dict.fromkeys(shard for name in inputs for shard in found[name]))


def repair(store: Path | str, inputs: Sequence[str] = (), *, quiet: bool = True) -> Repaired:
    """Make again what is damaged in a store, and the shards of named inputs.

    First come the files beside the shards (vocabularies, inputs), then shards, then the manifest. A
    new shard that equals neither the old one nor the digest in the manifest is refused: its input
    has changed, and only `tokmill build` takes that.
    """
    store = Path(store)
    if not (store / layout.PLAN).exists():
        Store(store)
        raise TokmillError(
            "the store has no plan.json, so nothing says what to make again",
            where=str(store),
            hint="run the same `tokmill build` again: it writes the plan anew",
        )
    scratch = store / AGAIN
    with locked(store / LOCK, TAKEN, "wait for it to end"):
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
    """Return the manifest; None if it is damaged or lost."""
    with contextlib.suppress(TokmillError):
        return layout.read_sealed(store / "manifest.json", Manifest)
    return None


def bad_shards(store: Path, manifest: Manifest | None, *, quiet: bool) -> list[str]:
    """Return the planned shards that must be made again."""
    planned = list(read_planned(store))
    known = {item.shard for item in planned}
    bad: list[str] = []
    if manifest is not None:
        problems = validate(Store(store), quiet=quiet).problems
        bad = [problem.shard.partition("-")[0] for problem in problems if problem.shard]
    elif any(read_receipts(store)):
        # Without a manifest, compare the shards with the digests in their receipts.
        receipts = planned_receipts(store, planned)
        bad = [task.shard for task in missing_tasks(planned, receipts)]
        for receipt in receipts:
            if sha256_file(shard_path(store, receipt.name)) != receipt.sha256:
                bad.append(receipt.shard)
    return [name for name in dict.fromkeys(bad) if name in known]


def _put(
    store: Path, receipts: Iterable[Receipt], scratch: Path, wanted: Mapping[str, str] | None
) -> None:
    """Move new shards to their places if they equal the old ones, or the digests in `wanted`."""
    for receipt in receipts:
        shard = shard_path(store, receipt.name)
        stands = shard.exists() and sha256_file(shard) == receipt.sha256
        if not stands and wanted is not None and wanted.get(receipt.name) != receipt.sha256:
            _doubt(store, [receipt.name])
            raise TokmillError(
                f"the new shard {receipt.name} differs from the old one: an input has changed",
                where=", ".join(sorted({item.name for item in receipt.items})[:3]),
                hint="run the build again: it completes a shard that was cut; --yes takes the "
                "input as it is now",
            )
        for suffix in (".json",) if stands else (SUFFIX, ".json"):
            with machine_errors("rename", store / "shards"):
                made = inside(scratch, f"{receipt.name}{suffix}")
                made.rename(shard.with_suffix(suffix))
    sync_folder(store / "shards")


def each_left_out(store: Store, *, rejected_only: bool = True) -> Iterator[LeftOut]:
    """Yield each record that was left out, in the order of the inputs.

    Raises `TokmillError` if an input has changed since the build.
    """
    work, tasks = work_of(store.path)
    source = work.source()
    paths = input_paths(store)
    for shard in dict.fromkeys(entry.name.partition("-")[0] for entry in store.shards):
        for item in tasks[shard].items:
            check_unchanged(item)
            path = paths.get(item.name, "")
            for batch in source.read(item, Content()):
                for drop in each_drop(batch.drops):
                    if drop.rejected or not rejected_only:
                        line = line_of(path, drop.offset)
                        yield LeftOut(
                            item.name, path, drop.offset, line, drop.reason, drop.rejected
                        )
