"""The receipts of a store and its plan: what is made, and the manifest of it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import path_from_text, reading, sha256_file
from tokmill.store import manifest as layout
from tokmill.store.checks.probe import probe_digest
from tokmill.store.manifest import Manifest, Plan, PlannedItem, Receipt, ShardEntry
from tokmill.store.shards.shard import SUFFIX


def gather_manifest(path: Path) -> Manifest:
    plan = layout.read_plan(path)
    receipts = planned_receipts(path, read_planned(path))
    return make_manifest(plan, receipts, complete=False, probe=probe_digest(path))


def read_planned(path: Path) -> Iterator[PlannedItem]:
    """Yield the items of a store's plan in order."""
    decoder = msgspec.json.Decoder(PlannedItem)
    with reading(path / "inputs.jsonl") as lines:
        for number, line in enumerate(lines, 1):
            try:
                item = decoder.decode(line)
                paths = (item.path, *(other.path for other in item.others))
                if any(path.startswith("file:") for path in paths):
                    item = layout.with_paths(item, path_from_text)
                yield item
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TokmillError(
                    f"the line cannot be read: {error}",
                    where=f"{path / 'inputs.jsonl'}:{number}",
                    hint="remove the file and run the build again: it writes the file anew",
                ) from error


def inputs_fit(path: Path, plan: Plan) -> bool:
    file = path / "inputs.jsonl"
    return file.is_file() and sha256_file(file) == plan.inputs_sha256


def read_receipts(path: Path, damaged: list[Path] | None = None) -> list[Receipt]:
    """Return the receipts of a store whose shards exist in full size, in no particular order.

    A damaged receipt commits nothing: its path is added to the list `damaged`.
    """
    shards = path / "shards"
    receipts = []
    for file in sorted(shards.glob("*.json")) if shards.is_dir() else []:
        shard = file.with_suffix(SUFFIX)
        if not file.name.startswith(".") and shard.exists():
            try:
                receipt = layout.read_checked(file, Receipt)
            except MachineError:
                raise
            except TokmillError:
                if damaged is not None:
                    damaged.append(file)
                continue
            if shard.stat().st_size == receipt.bytes:
                receipts.append(receipt)
    return receipts


def in_order(planned: Iterable[PlannedItem], receipts: Iterable[Receipt]) -> list[Receipt]:
    """Return the receipts of planned shards in the order of the plan; others are left out."""
    order = {name: i for i, name in enumerate(dict.fromkeys(item.shard for item in planned))}
    listed = [receipt for receipt in receipts if receipt.shard in order]
    return sorted(listed, key=lambda receipt: (order[receipt.shard], receipt.part))


def planned_receipts(
    path: Path, planned: Iterable[PlannedItem], damaged: list[Path] | None = None
) -> list[Receipt]:
    """Return the receipts of planned shards in the order of the plan; see `read_receipts`."""
    return in_order(planned, read_receipts(path, damaged))


def make_manifest(
    plan: Plan, receipts: Iterable[Receipt], *, complete: bool, probe: str | UnsetType = UNSET
) -> Manifest:
    """Return the manifest of a plan, from receipts in the order of the plan.

    `probe`: digest of the probe's file.
    """
    from tokmill.version import __version__

    entries: list[ShardEntry] = []
    contents: list[str] = []
    ranges: dict[str, tuple[int | float, int | float]] = {}
    skipped, rejected, notes = Counter[str](), Counter[str](), Counter[str]()
    read = 0
    for receipt in receipts:
        entries.append(
            ShardEntry(receipt.name, receipt.records, receipt.tokens, receipt.bytes, receipt.sha256)
        )
        for item in receipt.items:
            contents.append(item.sha256)
            read += item.bytes
        for name, (low, high) in receipt.ranges.items():
            before = ranges.get(name, (low, high))
            ranges[name] = (min(low, before[0]), max(high, before[1]))
        rejected.update(receipt.rejected)
        skipped.update(receipt.skipped)
        notes.update(receipt.notes)
    return Manifest(
        producer=f"tokmill {__version__}",
        complete=complete,
        recipe_id=plan.recipe_id,
        plan_id=plan.plan_id,
        fingerprint=layout.canonical_digest([plan.recipe_id, contents]),
        source=plan.recipe["source"],
        schema=plan.schema,
        vocabularies=plan.vocabularies,
        records=sum(entry.records for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        bytes=sum(entry.bytes for entry in entries),
        input_bytes=read,
        ranges=ranges,
        skipped=dict(sorted(skipped.items())),
        rejected=dict(sorted(rejected.items())),
        notes=dict(sorted(notes.items())),
        left_out=plan.left_out,
        overlay=plan.overlay,
        references=plan.references,
        places=plan.places,
        probe=probe,
        shards=entries,
    )
