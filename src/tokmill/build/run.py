"""The build: freeze vocabularies, plan, make the missing shards, finish.

Same plan and same bytes in give byte-identical shards, for any workers and any number of kills.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokmill import plugins, recipe
from tokmill.build.executors import Executor, Here, Pool
from tokmill.build.make import Task, Work
from tokmill.build.plan import difference, make_plan, plan_stands, write_plan
from tokmill.build.resources import Amount, choose
from tokmill.build.source import Frozen, Item, Request, Source
from tokmill.build.watch import Watch
from tokmill.errors import Interrupted, TokmillError, UsageError
from tokmill.files import (
    locked,
    machine_errors,
    make_folder,
    remove,
    remove_leftovers,
    write_file,
)
from tokmill.progress import Progress, human_bytes, human_time
from tokmill.store import manifest as layout
from tokmill.store.manifest import Plan, PlannedItem, Receipt
from tokmill.store.shard import SUFFIX
from tokmill.store.store import Store, make_manifest, read_planned, read_receipts

PART_WAIT = 60.0
"""Seconds that a part waits for the lock: others hold it while they plan and finish."""
KNOWN_FILES = ("manifest.json", "plan.json", "inputs.jsonl", "events.jsonl", "projection.json")
KNOWN_FOLDERS = ("shards", "vocab", "overlays", "cache")
LEARNED = "learned.json"
"""Beside a tokenizer that was learned for a build: the options of its training."""


class BuildRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to build: a source, its inputs and its options."""

    source: str
    inputs: tuple[str, ...] = ()
    out: str = ""
    tokenizer: str | None = None
    """Tokenizer of text sources; for imported token files the one that made them, if known."""
    roles: dict[str, str] = {}
    """Role → special token, where the names do not say it."""
    options: dict[str, Any] = {}
    """The source's own keys (`tokmill recipe schema KIND`)."""


class How(msgspec.Struct, frozen=True, kw_only=True):
    """How to build: nothing of this changes a byte of the store."""

    amount: Amount = Amount()
    part: tuple[int, int] | None = None
    limit_seconds: float | None = None
    max_rejects: float = 0.01
    fresh: bool = False
    yes: bool = False
    quiet: bool = False


def build(
    kind: str,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    roles: Mapping[str, str] | None = None,
    how: How | None = None,
    **options: Any,
) -> Store:
    """Build a store, or continue, grow or simply open one that is there.

    `options` are the source's keys. Raises `TokmillError` when the inputs or an existing store do
    not fit, `Interrupted` when it was stopped and can be continued.
    """
    chosen = BuildRecipe(
        source=kind,
        inputs=tuple(str(path) for path in inputs),
        out=str(out),
        tokenizer=None if tokenizer is None else str(tokenizer),
        roles=dict(roles or {}),
        options=options,
    )
    return run(chosen, how or How(quiet=True))


class Prepared(msgspec.Struct, frozen=True):
    """A build that is planned but not begun."""

    recipe: BuildRecipe
    config: msgspec.Struct
    frozen: dict[str, Frozen]
    plan: Plan
    planned: list[PlannedItem]


def prepare(chosen: BuildRecipe) -> Prepared:
    """Read the options, freeze the vocabularies and plan; writes nothing."""
    kind = plugins.load(plugins.SOURCES, chosen.source)
    config = recipe.convert(kind.Config, chosen.options, f"options of {chosen.source}")
    request = Request(inputs=chosen.inputs, tokenizer=chosen.tokenizer, roles=chosen.roles)
    frozen = kind.freeze(config, request)
    source: Source = kind(config, chosen.inputs, frozen, Amount().resources())
    plan, planned = make_plan(chosen.source, source, config, frozen, chosen.inputs)
    return Prepared(chosen, config, frozen, plan, planned)


def run(chosen: BuildRecipe, how: How) -> Store:
    """Carry out a build recipe; see `build`."""
    if not chosen.out:
        raise UsageError("no folder for the store was named", hint="-o STORE")
    out = Path(chosen.out)
    with machine_errors("read", out):
        check_folder(out)
    prepared = prepare(chosen)
    make_folder(out)
    lock = locked(
        out / ".lock",
        "another build is writing to this store",
        "wait for it, or choose another folder",
        wait=PART_WAIT if how.part else 0,
    )
    with contextlib.ExitStack() as held:
        held.enter_context(lock)
        if how.fresh:
            clear(out)
        settle(out, prepared, how)
        if how.part is not None:
            # Parts on other machines plan the same; only planning and finishing are exclusive.
            held.close()
        return carry_out(out, prepared, how)


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


def clear(out: Path) -> None:
    """Remove a store from its folder, its last word first."""
    for name in KNOWN_FILES:
        remove(out / name)
    for name in KNOWN_FOLDERS:
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
    for folder in (out, out / "vocab", out / "shards"):
        remove_leftovers(folder)


def settle(out: Path, prepared: Prepared, how: How) -> None:
    """Compare with the plan that is there, and write the new one with its vocabularies."""
    plan = prepared.plan
    if (out / "plan.json").exists():
        old: Plan = layout.read_json(out / "plan.json", Plan)
        if old.recipe_id != plan.recipe_id:
            lines = "\n  ".join(difference(old.recipe, plan.recipe))
            raise TokmillError(
                f"the store was built with another recipe:\n  {lines}",
                where=str(out),
                hint="build into a new folder, or start over with --fresh",
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
    for name, item in frozen.items():
        folder = make_folder(out / "vocab")
        write_if_different(folder / item.vocabulary.file, item.data)
        write_if_different(folder / f"{name}.vocabulary.json", layout.encode(item.vocabulary))


def report_changes(out: Path, planned: Sequence[PlannedItem], how: How) -> None:
    """List changed and vanished inputs; go on only if the user agreed."""
    if not (out / "inputs.jsonl").exists():
        return
    before = {item.name: item.digest for item in read_planned(out)}
    now = {item.name: item.digest for item in planned}
    gone = sorted(name for name in before if name not in now)
    changed = sorted(name for name in before if name in now and before[name] != now[name])
    if not gone and not changed:
        return
    lines = [f"changed: {name}" for name in changed] + [f"vanished: {name}" for name in gone]
    shown = "\n  ".join(lines[:20]) + (f"\n  … and {len(lines) - 20} more" * (len(lines) > 20))
    if not how.yes:
        raise TokmillError(
            f"inputs are not what they were:\n  {shown}",
            where=str(out),
            hint="with --yes their shards are made again or dropped, all others are kept",
        )


def missing_tasks(planned: Sequence[PlannedItem], receipts: Iterable[Receipt]) -> list[Task]:
    """Return the shards that have no complete set of receipts, in plan order."""
    parts: dict[str, set[int]] = {}
    complete: dict[str, int] = {}
    for receipt in receipts:
        parts.setdefault(receipt.shard, set()).add(receipt.part)
        if receipt.last:
            complete[receipt.shard] = receipt.part + 1
    groups: dict[str, list[PlannedItem]] = {}
    for item in planned:
        groups.setdefault(item.shard, []).append(item)
    tasks = []
    for shard, items in groups.items():
        have = parts.get(shard, set())
        if complete.get(shard) == len(have):
            continue
        done = next(i for i in range(len(have) + 1) if i not in have) if len(items) == 1 else 0
        tasks.append(
            Task(
                shard,
                [Item(i.name, i.path, i.start, i.stop, i.digest, parts_done=done) for i in items],
            )
        )
    return tasks


def carry_out(out: Path, prepared: Prepared, how: How) -> Store:
    """Make the missing shards and finish the store."""
    plan, planned = prepared.plan, prepared.planned
    if how.part is None:
        sweep(out)
    shards = {item.shard for item in planned}
    receipts = [receipt for receipt in read_receipts(out) if receipt.shard in shards]
    tasks = missing_tasks(planned, receipts)
    if how.part is not None:
        mine, of = how.part
        tasks = [task for i, task in enumerate(tasks) if int(task.shard, 16) % of == mine - 1]
    if not tasks:
        return finish(out, prepared, receipts, how)
    if how.limit_seconds is not None:
        # Names are digests, so their order is a sample of the input.
        tasks.sort(key=lambda task: task.shard)
    watch = Watch(out)
    workers, resources = choose(how.amount, len(tasks))
    work = Work(
        plan.recipe["source"],
        plan.options,
        plan.roots,
        plan.vocabularies,
        str(out),
        resources,
    )
    executor: Executor = Pool(work, workers) if workers else Here(work)
    watch.event("begin", workers=workers, shards=len(tasks), plan_id=plan.plan_id)
    total = plan.input_bytes
    todo = sum(task.size for task in tasks)
    deadline = None if how.limit_seconds is None else time.monotonic() + how.limit_seconds
    bar = Progress("build", total, done=total - todo, extra=watch.text, quiet=how.quiet)
    begun = {receipt.shard for receipt in receipts}
    try:
        with bar:
            for task, made in executor.map(until(tasks, deadline)):
                if task.shard in begun:
                    again = {receipt.name for receipt in made}
                    receipts = [receipt for receipt in receipts if receipt.name not in again]
                receipts += made
                bar.advance(task.size)
                watch.event("shard", shard=task.shard, bytes=task.size, rate=round(bar.rate))
                judge(out, receipts, how.max_rejects)
    except KeyboardInterrupt:
        watch.event("interrupted")
        raise Interrupted(
            "the build was interrupted; its finished shards are kept",
            where=str(out),
            hint="run the same command again: it continues",
        ) from None
    if missing_tasks(planned, receipts) and how.limit_seconds is not None:
        watch.event("time limit")
        return stop_early(out, prepared, receipts, how, bar)
    store = finish(out, prepared, receipts, how)
    watch.event("done", complete=not store.partial, rate=round(bar.rate))
    return store


def until(tasks: Iterable[Task], deadline: float | None) -> Iterator[Task]:
    """Yield tasks until the deadline has passed (always the first)."""
    for number, task in enumerate(tasks):
        if number and deadline is not None and time.monotonic() >= deadline:
            return
        yield task


def judge(out: Path, receipts: Iterable[Receipt], most: float) -> None:
    """End a hopeless build: too large a share of the records was rejected."""
    records = rejected = 0
    reasons: dict[str, int] = {}
    example = ""
    for receipt in receipts:
        records += receipt.records
        for number, offset, reason, is_rejected in receipt.drops:
            if is_rejected:
                rejected += 1
                reasons[reason] = reasons.get(reason, 0) + 1
                example = example or f"{receipt.items[number].name}, byte {offset} ({reason})"
    seen = records + rejected
    if seen >= 1000 and rejected > most * seen:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
        raise TokmillError(
            f"{rejected:,} of {seen:,} records were rejected ({counts}), more than {most:.1%}; "
            f"the first: {example}",
            where=str(out),
            hint="mend the input, or allow more with --max-rejects 0.1",
        )


def finish(out: Path, prepared: Prepared, receipts: Sequence[Receipt], how: How) -> Store:
    """Write the manifest and drop what the plan does not know; a part leaves that to the last."""
    plan = prepared.plan
    if how.part is not None:
        # Other parts have made shards meanwhile; whichever ends last sees them all.
        shards = {item.shard for item in prepared.planned}
        receipts = [receipt for receipt in read_receipts(out) if receipt.shard in shards]
    if missing_tasks(prepared.planned, receipts):
        return Store(out)
    ordered = in_order(prepared.planned, receipts)
    with contextlib.ExitStack() as held:
        if how.part is not None:
            lock = locked(
                out / ".lock",
                "another build is writing to this store",
                "wait for it",
                wait=PART_WAIT,
            )
            held.enter_context(lock)
        sweep(out)
        judge(out, ordered, how.max_rejects)
        manifest = make_manifest(plan, ordered, complete=True)
        if manifest.records == 0:
            why = {**manifest.skipped, **manifest.rejected}
            counts = ", ".join(f"{count:,} {reason}" for reason, count in why.items())
            raise TokmillError(
                f"not one record was found ({counts or 'the input is empty'})",
                where=", ".join(prepared.recipe.inputs),
                hint="is it the right kind of input, and are the field names right?",
            )
        write_if_different(out / "manifest.json", layout.encode(manifest))
        kept = {entry.name for entry in manifest.shards}
        for path in (out / "shards").iterdir():
            if path.name.partition(".")[0] not in kept:
                remove(path)
    return Store(out)


def write_if_different(path: Path, data: bytes) -> None:
    """Write a file unless the one that stands is the same."""
    with machine_errors("read", path):
        same = path.exists() and path.read_bytes() == data
    if not same:
        write_file(path, data)


def in_order(planned: Sequence[PlannedItem], receipts: Iterable[Receipt]) -> list[Receipt]:
    """Return receipts in plan order, parts of a shard by number."""
    place = {shard: i for i, shard in enumerate(dict.fromkeys(item.shard for item in planned))}
    return sorted(receipts, key=lambda receipt: (place[receipt.shard], receipt.part))


def stop_early(
    out: Path, prepared: Prepared, receipts: Sequence[Receipt], how: How, bar: Progress
) -> Store:
    """End a build at its time limit: a partial store, and what the whole would take."""
    manifest = make_manifest(prepared.plan, in_order(prepared.planned, receipts), complete=False)
    write_if_different(out / "manifest.json", layout.encode(manifest))
    share = max(bar.done, 1) / max(bar.total, 1)
    projection = {
        "share": round(share, 4),
        "rate_bytes_per_second": round(bar.rate),
        "projected_seconds": round(bar.total / bar.rate, 1) if bar.rate else None,
        "projected_tokens": round(manifest.tokens / share),
        "projected_disk_bytes": round(manifest.bytes / share),
        "peak_memory_bytes": Watch(out).resources().get("memory"),
    }
    write_file(out / "projection.json", layout.encode(projection))
    if not how.quiet:
        memory = human_bytes(projection["peak_memory_bytes"] or 0)
        print(
            f"time limit reached after {human_time(bar.seconds)}: {share:.1%} of the input at "
            f"{human_bytes(bar.rate)}/s.\nThe whole input would take "
            f"{human_time(bar.total / max(bar.rate, 1))}, "
            f"{human_bytes(manifest.bytes / share)} on disk and about {memory} of memory.\n"
            "What was made is kept: the same command without --limit-time goes on.",
            file=sys.stderr,
        )
    return Store(out)


def finish_parts(out: Path) -> int:
    """Write the manifest of a store built in parts; return how many shards are still missing."""
    plan: Plan = layout.read_json(out / "plan.json", Plan)
    planned = list(read_planned(out))
    known = {item.shard for item in planned}
    receipts = [receipt for receipt in read_receipts(out) if receipt.shard in known]
    missing = missing_tasks(planned, receipts)
    if not missing:
        prepared = Prepared(BuildRecipe(source=plan.recipe["source"]), plan, {}, plan, planned)
        with locked(out / ".lock", "a build is writing to this store", "wait for it to end"):
            finish(out, prepared, receipts, How(quiet=True))
    return len(missing)
