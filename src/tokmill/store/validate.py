"""`store validate`: everything about a store that the folder alone can tell."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill.errors import TokmillError
from tokmill.files import inside, machine_errors, sha256_file
from tokmill.progress import Progress
from tokmill.store import manifest as layout
from tokmill.store.events import EVENTS, damaged_events
from tokmill.store.manifest import SHARD_FILE, ShardEntry
from tokmill.store.overlay import (
    FOLDER,
    check_offsets,
    check_parallel,
    command_of,
    facts_of,
    overlay_names,
)
from tokmill.store.probe import probe_digest, probe_path
from tokmill.store.references import bad_references
from tokmill.store.schema import PHRASE_BIT, phrase_columns
from tokmill.store.shard import Shard
from tokmill.store.store import (
    Store,
    inputs_fit,
    make_manifest,
    read_planned,
    read_receipts,
    shard_path,
)
from tokmill.store.vocab import LEARNED, Learned


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    where: str
    what: str
    shard: str = ""
    """The shard to make again, where that mends it."""
    mend: str = ""
    """The command that mends it, where that is not a repair of the store."""


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
        """Whether nothing is wrong."""
        return not self.problems


def validate(store: Store, *, quiet: bool = True) -> Report:
    """Check hashes, shapes, offsets, ids, counts, receipts, vocabularies, strays and overlays.

    Reads every byte of the store and of its overlays once.
    """
    if store.overlays:
        # What is checked is the store alone, and then each of its overlays.
        store = Store(store.path)
    problems: list[Problem] = []
    for name, vocabulary in store.vocabularies.items():
        path = inside(store.path / "vocab", vocabulary.file)
        if not path.exists():
            problems.append(Problem(str(path), f"the vocabulary {name!r} is missing"))
        elif sha256_file(path) != vocabulary.sha256:
            problems.append(Problem(str(path), "the vocabulary is not the one of the plan"))
    if store.manifest.probe != probe_digest(store.path):
        what = "the probe of the engine is missing, or not the one of the manifest"
        problems.append(Problem(str(probe_path(store.path)), what))
    empty = 0
    with Progress("validate", store.manifest.bytes, quiet=quiet) as bar:
        for entry in store.shards:
            try:
                empty += check_shard(store, entry)
            except TokmillError as error:
                problems.append(Problem(error.where, error.what, entry.name))
            bar.advance(entry.bytes)
    problems += check_totals(store)
    if not any(problem.shard for problem in problems):
        problems += check_plan(store)
    problems += check_strays(store)
    problems += check_events(store)
    problems += check_learned(store)
    problems += [
        Problem(error.where, error.what, mend=mend) for error, mend in bad_references(store)
    ]
    problems += check_overlays(store, quiet=quiet)
    return Report(
        store=str(store.path),
        complete=store.manifest.complete,
        shards=len(store.shards),
        records=store.records,
        tokens=store.tokens,
        empty_records=empty,
        problems=problems,
    )


def check_shard(store: Store, entry: ShardEntry) -> int:
    """Raise `TokmillError` for the first thing wrong with a shard; return its empty records."""
    path = shard_path(store.path, entry.name)
    if not path.exists():
        raise TokmillError(
            "the shard is missing",
            where=str(path),
            hint="`tokmill store repair STORE` makes it again",
        )
    size = path.stat().st_size
    if size != entry.bytes:
        raise TokmillError(
            f"{size} bytes instead of {entry.bytes}",
            where=str(path),
            hint="`tokmill store repair STORE` makes it again",
        )
    if sha256_file(path) != entry.sha256:
        raise TokmillError(
            "the bytes have changed (sha256 differs)",
            where=str(path),
            hint="`tokmill store repair STORE` makes it again",
        )
    receipt_path = path.with_suffix(".json")
    if not receipt_path.exists():
        raise TokmillError(
            "the receipt is missing",
            where=str(receipt_path),
            hint="`tokmill store repair STORE` makes it again",
        )
    receipt = layout.read_sealed(receipt_path, layout.Receipt)
    stated = (receipt.records, receipt.tokens, receipt.bytes, receipt.sha256)
    if stated != (entry.records, entry.tokens, entry.bytes, entry.sha256):
        raise TokmillError(
            "receipt and manifest contradict each other",
            where=str(receipt_path),
            hint="`tokmill store repair STORE` makes it again",
        )
    shard = Shard(path, checked=False)
    empty = check_arrays(store, entry, shard)
    if entry.records and int(shard["item"].max()) >= len(receipt.items):
        raise TokmillError(
            "a record's input is not in the receipt",
            where=str(path),
            hint="`tokmill store repair STORE` makes it again",
        )
    return empty


def check_arrays(store: Store, entry: ShardEntry, shard: Shard) -> int:
    """Check what the arrays say; return the number of empty records."""
    where = str(shard.path)

    def demand(condition: Any, what: str) -> None:
        if not bool(condition):
            raise TokmillError(
                what, where=where, hint="`tokmill store repair STORE` makes it again"
            )

    offsets = shard["offsets"]
    demand(len(offsets) == entry.records + 1, "the number of records is not the stated one")
    demand(offsets[0] == 0 and offsets[-1] == entry.tokens, "the token count is not the stated one")
    lengths = np.diff(offsets.astype(np.int64))
    demand((lengths >= 0).all(), "record offsets fall")
    demand(len(shard["start"]) == len(shard["item"]) == entry.records, "provenance is incomplete")
    coded = phrase_columns(store.schema)
    if coded:
        table = shard["table_offsets"].astype(np.int64)
        ids = (shard["phrase"] & ~PHRASE_BIT).astype(np.int64)
        ends = shard["phrase_offsets"].astype(np.int64)
        demand((np.diff(table) >= 0).all() and (np.diff(ends) >= 0).all(), "phrase offsets fall")
        demand(len(ends) == entry.records + 1 and ends[-1] == len(ids), "phrases are missing")
        demand(not len(ids) or ids.max() < len(table) - 1, "a phrase is not in the table")
        total = np.concatenate([[0], np.cumsum(np.diff(table)[ids])])
        demand((np.diff(total[ends]) == lengths).all(), "phrases and token counts disagree")
    for name, column in store.schema.items():
        if name == "border" and column.phrase:
            continue
        if column.dtype == "utf8":
            check_strings(entry, shard, name, demand)
            continue
        array = shard[f"table.{name}"] if column.phrase else shard[name]
        demand(array.dtype == column.numpy(), f"column {name!r} is {array.dtype}")
        wanted = entry.tokens if column.per == "token" else entry.records
        if column.phrase:
            wanted = int(shard["table_offsets"][-1])
        demand(len(array) == wanted, f"column {name!r} has {len(array)} values, not {wanted}")
        vector = (column.width,) if column.width else ()
        demand(array.shape[1:] == vector, f"column {name!r} has the shape {array.shape}")
        if column.vocab in store.vocabularies and array.size:
            limit = store.vocabularies[column.vocab].size
            high = int(array.max())
            demand(high < limit, f"column {name!r} holds the id {high}; ids are 0 to {limit - 1}")
        if column.ref is not None and array.size:
            stated = store.manifest.ranges.get(name, (0, -1))
            demand(array.max() <= stated[1], f"column {name!r} holds more than the manifest says")
    return int((lengths == 0).sum())


def check_strings(
    entry: ShardEntry, shard: Shard, name: str, demand: Callable[[Any, str], None]
) -> None:
    """Check a string column, whichever way it lies in the shard."""
    array, has_table = shard[name], f"{name}.values" in shard
    strings = f"{name}.values" if has_table else name
    offsets = shard[f"{strings}.offsets"].astype(np.int64)
    count = len(array) if has_table else len(offsets) - 1
    demand(count == entry.records, f"column {name!r} has a wrong length")
    whole = len(offsets) and offsets[0] == 0 and offsets[-1] == len(shard[strings])
    demand(whole and (np.diff(offsets) >= 0).all(), f"strings of {name!r} are misplaced")
    if has_table and count:
        demand(array.max() < len(offsets) - 1, f"a string of {name!r} is not in its table")


def check_totals(store: Store) -> list[Problem]:
    """Check the manifest against itself."""
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
    """Check plan, its copy and the items, and that a complete manifest says what they say.

    Receipts must be sound.
    """
    path = store.path / layout.PLAN
    if not path.exists() and not (store.path / layout.PLAN_COPY).exists():
        return []
    try:
        plan: layout.Plan = layout.read_sealed(path, layout.Plan)
    except TokmillError as error:
        return [Problem(error.where, error.what)]
    copy = store.path / layout.PLAN_COPY
    if isinstance(plan.inputs_sha256, str) and not same_files(path, copy):
        return [Problem(str(copy), "the copy of the plan is not like plan.json")]
    try:
        if layout.canonical_digest(plan.recipe) != plan.recipe_id:
            return [Problem(str(path), "the recipe is not the one that its recipe_id names")]
        if plan.plan_id != store.manifest.plan_id:
            what = "manifest and plan are of different builds: one that began has not ended"
            return [Problem(str(store.path / "manifest.json"), what)]
        planned = list(read_planned(store.path))
        if not inputs_fit(store.path, plan):
            what = "the items are not those of plan.json"
            return [Problem(str(store.path / "inputs.jsonl"), what)]
        if not store.manifest.complete:
            return []
        order = {name: i for i, name in enumerate(dict.fromkeys(item.shard for item in planned))}
        receipts = [receipt for receipt in read_receipts(store.path) if receipt.shard in order]
    except TokmillError as error:
        return [Problem(error.where, error.what)]
    receipts.sort(key=lambda receipt: (order[receipt.shard], receipt.part))
    probe = store.manifest.probe
    wanted = make_manifest(plan, receipts, complete=True, probe=probe)
    return [
        Problem(str(store.path / "manifest.json"), f"{name}: not what plan and receipts say")
        for name in wanted.__struct_fields__
        if name not in ("producer", "records", "tokens", "bytes")
        and getattr(wanted, name) != getattr(store.manifest, name)
    ]


def same_files(one: Path, other: Path) -> bool:
    """Say whether two small files are there and equal."""
    with machine_errors("read", one):
        return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def check_events(store: Store) -> list[Problem]:
    """Check the lines of the log; a last one that a crash cut short is fine."""
    return [
        Problem(f"{store.path / EVENTS}:{number}", "the line is not what was written")
        for number in damaged_events(store.path)
    ]


def check_learned(store: Store) -> list[Problem]:
    """Check the files that a tokenizer that was learned for the store has beside it."""
    folder = store.path / "vocab"
    if not (folder / LEARNED).exists():
        return []
    try:
        note: Learned = layout.read_sealed(folder / LEARNED, Learned)
    except TokmillError as error:
        return [Problem(error.where, error.what)]
    return [
        Problem(str(folder / name), "the file is not the one that was written with the tokenizer")
        for name, digest in note.files.items()
        if not (folder / name).is_file() or sha256_file(folder / name) != digest
    ]


def check_strays(store: Store) -> list[Problem]:
    """Report shards that belong to nothing; other files are leftovers, or somebody's own."""
    known = {entry.name for entry in store.shards}
    return [
        Problem(str(path), "the file belongs to no shard of the manifest")
        for path in sorted((store.path / "shards").iterdir())
        if store.manifest.complete
        and SHARD_FILE.fullmatch(path.name)
        and path.name.partition(".")[0] not in known
    ]


def check_overlays(store: Store, *, quiet: bool = True) -> list[Problem]:
    """Check each overlay as a store, and that its records are those of this one.

    One whose build has not finished is checked as far as it is there.
    """
    problems = []
    for name in overlay_names(store.path):
        path = store.path / FOLDER / name
        mend = f"tokmill store repair {shlex.quote(str(path))}"
        try:
            overlay = Store(path)
            facts = facts_of(overlay)
            found = validate(overlay, quiet=quiet).problems
            problems += [msgspec.structs.replace(one, mend=one.mend or mend) for one in found]
            if facts.base != store.fingerprint:
                stale = "the overlay belongs to another fingerprint"
                problems.append(Problem(str(path), stale, mend=command_of(overlay)))
            elif not found and not overlay.partial:
                check_parallel(store, overlay)
                check_offsets(store, overlay)
        except TokmillError as error:
            problems.append(Problem(error.where, error.what, mend=mend))
    return problems
