"""Repair of the files beside the shards of a store: inputs, vocabularies, manifest."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.base.files import inside, path_from_text, sha256_file, write_file
from tokmill.builds.check_probe import mend_probe
from tokmill.builds.finish import missing_tasks
from tokmill.builds.folder import write_if_different
from tokmill.builds.make_shard import planned_work
from tokmill.builds.plan import digest_of, group_items, shard_of, write_inputs
from tokmill.builds.source import Frozen, Request
from tokmill.store import manifest as layout
from tokmill.store.checks.probe import FILE as PROBE
from tokmill.store.checks.probe import probe_digest
from tokmill.store.manifest import Manifest, Plan, PlannedItem, sealed
from tokmill.store.receipts import inputs_fit, make_manifest, planned_receipts, read_planned
from tokmill.store.vocab import LEARNED

AGAIN = "run the same `tokmill build` again: it writes the file anew"


def mend_files(store: Path) -> list[str]:
    """Repair vocabularies, probe and inputs; return the names of files written.

    Raises `TokmillError` for a file that cannot be made again from the inputs.
    """
    plan = layout.read_plan(store)
    mended = mend_vocabularies(store, plan)
    if (store / "vocab" / LEARNED).exists():
        names = plugins.require("tokmill.text.learning.learn").mend_beside(store / "vocab")
        mended += [f"vocab/{name}" for name in names]
    if mend_probe(store, plan, planned_work(store, plan).source):
        mended.append(f"vocab/{PROBE}")
    return mended + mend_inputs(store, plan)


def mend_inputs(store: Path, plan: Plan) -> list[str]:
    """Write `inputs.jsonl` again from the inputs if it does not belong to the plan."""
    path = store / "inputs.jsonl"
    if inputs_fit(store, plan):
        return []
    planned = planned_again(store, plan)
    if layout.plan_digest(plan.recipe_id, planned) != plan.plan_id:
        raise TokmillError(
            "the items are not those of plan.json, and the inputs have changed since",
            where=str(path),
            hint=f"{AGAIN}; it lists what has changed",
        )
    lines = (msgspec.json.encode(layout.item_line(item)) + b"\n" for item in planned)
    if digest_of(lines) != plan.inputs_sha256:
        # The same files in another folder; the plan would have to change too.
        raise TokmillError("the inputs were moved", where=str(path), hint=AGAIN)
    write_inputs(store, planned)
    return [path.name]


def planned_again(store: Path, plan: Plan) -> list[PlannedItem]:
    """Return the items of the inputs as they are now."""
    items = planned_work(store, plan).source().items()
    return [
        item.planned(name)
        for group in group_items(items)
        for name in [shard_of(plan.recipe_id, group)]
        for item in group
    ]


def mend_vocabularies(store: Path, plan: Plan) -> list[str]:
    """Make the vocabularies again whose files are not those of the plan."""
    files = {
        name: inside(store / "vocab", vocabulary.file)
        for name, vocabulary in plan.vocabularies.items()
    }
    bad = {
        name: vocabulary
        for name, vocabulary in plan.vocabularies.items()
        if not files[name].is_file() or sha256_file(files[name]) != vocabulary.sha256
    }
    if not bad:
        return []
    mended = []
    frozen = frozen_again(store, plan)
    for name, vocabulary in bad.items():
        path, found = files[name], frozen.get(name)
        if found is None or found.vocabulary.sha256 != vocabulary.sha256:
            raise TokmillError(
                f"the vocabulary {name!r} is damaged, and its source has changed since",
                where=str(path),
                hint=f"copy it from another copy of the store or from the `vocab` of a run on it "
                f"(sha256 {vocabulary.sha256}), or {AGAIN}",
            )
        write_file(path, found.data)
        mended.append(f"vocab/{vocabulary.file}")
    return mended


def frozen_again(store: Path, plan: Plan) -> Mapping[str, Frozen]:
    """Make the vocabularies of a plan again as its build did: from a file, or from the inputs."""
    kind = plugins.load(plugins.SOURCES, plan.recipe["source"])
    config = msgspec.convert(plan.options, type=kind.Config)
    tokenizer = path_from_text(plan.tokenizer) if isinstance(plan.tokenizer, str) else None
    roles = plan.roles if isinstance(plan.roles, dict) else {}
    try:
        with tempfile.TemporaryDirectory(prefix="tokmill-") as scratch:
            if (store / "vocab" / LEARNED).exists():
                tokenizer = _learned_again(store, plan, Path(scratch))
            request = Request(inputs=tuple(plan.inputs()), tokenizer=tokenizer, roles=roles)
            found: Mapping[str, Frozen] = kind.freeze(config, request)
    except TokmillError as error:
        wanted = ", ".join(f"{v.file} (sha256 {v.sha256})" for v in plan.vocabularies.values())
        raise TokmillError(
            f"a vocabulary is damaged and cannot be made again: {error}".partition("\nhint:")[0],
            where=str(store / "vocab"),
            hint=f"copy {wanted} from another copy of the store or from the `vocab` of a run on "
            f"it, or {AGAIN}",
        ) from None
    return found


def _learned_again(store: Path, plan: Plan, scratch: Path) -> str:
    """Learn a tokenizer again as the build did; return its file."""
    learn = plugins.require("tokmill.text.learning.learn")
    options = learn.options_of(learn.read_note(store / "vocab"))
    path, _ = learn.learned_tokenizer(
        scratch, plan.recipe["source"], plan.inputs(), plan.options, options
    )
    return str(path)


def mend_manifest(store: Path) -> bool:
    """Write the manifest anew if it contradicts plan and receipts; say whether it was written.

    If a shard is missing, nothing is written.
    """
    plan = layout.read_plan(store)
    planned = list(read_planned(store))
    receipts = planned_receipts(store, planned)
    if missing_tasks(planned, receipts):
        return False
    manifest = make_manifest(plan, receipts, complete=True, probe=probe_digest(store))
    path = store / "manifest.json"
    try:
        stands = msgspec.structs.replace(
            layout.read_sealed(path, Manifest), producer=manifest.producer
        )
        if stands == manifest:
            # Another version of tokmill wrote it, and it is right.
            return False
    except TokmillError:
        pass
    return write_if_different(path, sealed(manifest))
