"""`store validate`: all checks of a store that need only its folder."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import inside, sha256_file
from tokmill.base.progress import Progress
from tokmill.store import manifest as layout
from tokmill.store.checks.probe import probe_digest, probe_path
from tokmill.store.manifest import SHARD_FILE, ShardEntry
from tokmill.store.overlay import (
    FOLDER,
    check_offsets,
    check_parallel,
    command_of,
    facts_of,
    overlay_names,
)
from tokmill.store.receipts import (
    in_order,
    inputs_fit,
    make_manifest,
    planned_receipts,
    read_planned,
)
from tokmill.store.references import bad_references
from tokmill.store.schema import PHRASE_BIT
from tokmill.store.shards.shard import Shard
from tokmill.store.store import Store, shard_path
from tokmill.store.vocab import LEARNED, Learned


class Problem(msgspec.Struct, frozen=True):
    """One problem of a store."""

    where: str
    what: str
    remove: str = ""
    """The damaged shard, which a build makes again only if it is missing."""
    hint: str = ""
    """What to do, if that is not to run the same `tokmill build` again."""


class Report(msgspec.Struct, frozen=True):
    """The result of a validation."""

    store: str
    complete: bool
    shards: int
    records: int
    tokens: int
    empty_records: int
    problems: list[Problem]

    @property
    def ok(self) -> bool:
        return not self.problems


def validate(store: Store, *, quiet: bool = True) -> Report:
    """Check hashes, shapes, offsets, ids, counts, receipts, vocabularies, strays and overlays.

    Reads every byte of the store and of its overlays once; at an address too, not in the cache.
    """
    if store.remote is not None:
        store.remote.refresh()
    if store.overlays:
        # Check the store itself first, then each overlay.
        store = Store(store.path)
    problems: list[Problem] = []
    for name, vocabulary in store.vocabularies.items():
        path = inside(store.path / "vocab", vocabulary.file)
        if not path.exists():
            problems.append(Problem(str(path), f"the vocabulary {name!r} is missing"))
        elif sha256_file(path) != vocabulary.sha256:
            problems.append(Problem(str(path), "the vocabulary is not the one of the plan"))
    if store.manifest.probe != probe_digest(store.path):
        what = "the probe is missing, or not the one of the manifest"
        problems.append(Problem(str(probe_path(store.path)), what))
    empty = 0
    with Progress("validate", store.manifest.bytes, quiet=quiet) as bar:
        for entry in store.shards:
            try:
                empty += check_shard(store, entry)
            except TokmillError as error:
                shard = "" if store.remote else str(shard_path(store.path, entry.name))
                hint = error.hint if store.remote else ""
                problems.append(Problem(error.where, error.what, remove=shard, hint=hint))
            bar.advance(entry.bytes)
    problems += check_totals(store)
    if not any(problem.remove for problem in problems):
        problems += check_plan(store)
    # Other files than shards are leftovers or the user's.
    listed = {entry.name for entry in store.shards}
    problems += [
        Problem(str(path), "the file belongs to no shard of the manifest")
        for path in sorted((store.path / "shards").iterdir())
        if store.manifest.complete
        and SHARD_FILE.fullmatch(path.name)
        and path.name.partition(".")[0] not in listed
    ]
    problems += check_learned(store)
    problems += [Problem(e.where, e.what, hint=e.hint) for e in bad_references(store)]
    problems += check_overlays(store, quiet=quiet)
    return Report(
        store=store.place,
        complete=store.manifest.complete,
        shards=len(store.shards),
        records=store.records,
        tokens=store.tokens,
        empty_records=empty,
        problems=problems,
    )


def demand(path: Path, condition: Any, what: str) -> None:
    """Raise `TokmillError` with `what` for a file of a shard unless a condition holds."""
    if not bool(condition):
        hint = "remove the shard, and the same `tokmill build` makes it again"
        raise TokmillError(what, where=str(path), hint=hint)


def check_shard(store: Store, entry: ShardEntry) -> int:
    """Raise `TokmillError` for the first problem of a shard; return its number of empty records."""
    path = shard_path(store.path, entry.name)
    if store.remote is not None:
        store.remote.file(entry)
    demand(path, path.exists(), "the shard is missing")
    size = path.stat().st_size
    demand(path, size == entry.bytes, f"{size} bytes instead of {entry.bytes}")
    changed = "the bytes have changed (sha256 differs)"
    demand(path, sha256_file(path) == entry.sha256, changed)
    receipt_path = path.with_suffix(".json")
    demand(receipt_path, receipt_path.exists(), "the receipt is missing")
    receipt = layout.read_checked(receipt_path, layout.Receipt)
    stated = (receipt.records, receipt.tokens, receipt.bytes, receipt.sha256)
    equal = stated == (entry.records, entry.tokens, entry.bytes, entry.sha256)
    demand(receipt_path, equal, "receipt and manifest contradict each other")
    shard = Shard(path)
    empty = check_arrays(store, entry, shard)
    listed = not entry.records or int(shard["item"].max()) < len(receipt.items)
    demand(path, listed, "a record's input is not in the receipt")
    return empty


def check_arrays(store: Store, entry: ShardEntry, shard: Shard) -> int:
    """Check the arrays of a shard; return the number of empty records.

    `Shard` itself compares lengths, types and offsets, and finds what leads out of a table.
    """
    shard.check_lengths(entry.records, entry.tokens, store.schema)
    records = shard.records(0, entry.records, store.schema)
    lengths = np.diff(records.offsets)
    if records.phrases is not None:
        phrases = records.phrases
        ids = (phrases.ids & ~PHRASE_BIT).astype(np.int64)
        total = np.concatenate([[0], np.cumsum(np.diff(phrases.table_offsets)[ids])])
        equal = (np.diff(total[phrases.offsets]) == lengths).all()
        demand(shard.path, equal, "phrases and token counts disagree")
    for name, column in store.schema.items():
        if column.dtype == "utf8" or (name == "border" and column.phrase):
            continue
        array = shard[f"table.{name}" if column.phrase else name]
        demand(shard.path, array.dtype == column.numpy(), f"column {name!r} is {array.dtype}")
        if column.vocab in store.vocabularies and array.size:
            limit, high = store.vocabularies[column.vocab].size, int(array.max())
            what = f"column {name!r} holds the id {high}; ids are 0 to {limit - 1}"
            demand(shard.path, high < limit, what)
        if column.ref is not None and array.size:
            stated = store.manifest.ranges.get(name, (0, -1))
            what = f"column {name!r} holds more than the manifest says"
            demand(shard.path, array.max() <= stated[1], what)
    return int((lengths == 0).sum())


def check_totals(store: Store) -> list[Problem]:
    manifest, where = store.manifest, str(store.path / "manifest.json")
    problems = []
    for name in ("records", "tokens", "bytes"):
        total = sum(getattr(entry, name) for entry in manifest.shards)
        if total != getattr(manifest, name):
            problems.append(
                Problem(where, f"{name}: {getattr(manifest, name)} stated, {total} found")
            )
    return problems


def check_plan(store: Store) -> list[Problem]:
    """Check plan and items, and that a complete manifest agrees with them.

    The receipts must have been checked before.
    """
    path = store.path / layout.PLAN
    if not path.exists():
        return []
    try:
        plan: layout.Plan = layout.read_checked(path, layout.Plan)
    except TokmillError as error:
        return [Problem(error.where, error.what)]
    try:
        if layout.canonical_digest(plan.recipe) != plan.recipe_id:
            return [Problem(str(path), "the recipe is not the one that its recipe_id names")]
        if plan.plan_id != store.manifest.plan_id:
            what = "manifest and plan are of different builds: a build has begun and not ended"
            return [Problem(str(store.path / "manifest.json"), what)]
        planned = list(read_planned(store.path))
        if not inputs_fit(store.path, plan):
            what = "the items are not those of plan.json"
            return [Problem(str(store.path / "inputs.jsonl"), what)]
        if not store.manifest.complete:
            return []
        if store.remote is None:
            receipts = planned_receipts(store.path, planned)
        else:
            # Not all of its shards need be in the cache.
            receipts = in_order(planned, map(store.receipt, range(len(store.shards))))
    except TokmillError as error:
        return [Problem(error.where, error.what)]
    probe = store.manifest.probe
    wanted = make_manifest(plan, receipts, complete=True, probe=probe)
    return [
        Problem(str(store.path / "manifest.json"), f"{name}: contradicts plan and receipts")
        for name in wanted.__struct_fields__
        if name not in ("producer", "records", "tokens", "bytes")
        and getattr(wanted, name) != getattr(store.manifest, name)
    ]


def check_learned(store: Store) -> list[Problem]:
    folder = store.path / "vocab"
    if not (folder / LEARNED).exists():
        return []
    try:
        note: Learned = layout.read_checked(folder / LEARNED, Learned)
        files = {inside(folder, name): digest for name, digest in note.files.items()}
    except TokmillError as error:
        return [Problem(str(folder / LEARNED), error.what)]
    return [
        Problem(str(file), "the file is not the one that was written with the tokenizer")
        for file, digest in files.items()
        if not file.is_file() or sha256_file(file) != digest
    ]


def check_overlays(store: Store, *, quiet: bool = True) -> list[Problem]:
    """Check each overlay as a store, and that it has the same records as this one.

    Of an unfinished overlay, the finished shards are checked.
    """
    problems = []
    for name in overlay_names(store.path):
        path = store.path / FOLDER / name
        again = ""
        try:
            overlay = Store(path)
            facts, again = facts_of(overlay), f"`{command_of(overlay)}` makes it again"
            in_overlay = validate(overlay, quiet=quiet).problems
            problems += [msgspec.structs.replace(one, hint=one.hint or again) for one in in_overlay]
            if facts.base != store.fingerprint:
                stale = "the store has changed since the overlay was made"
                problems.append(Problem(str(path), stale, hint=again))
            elif not in_overlay and not overlay.partial:
                check_parallel(store, overlay)
                check_offsets(store, overlay)
        except TokmillError as error:
            problems.append(Problem(error.where, error.what, hint=again))
    return problems
