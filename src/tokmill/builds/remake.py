"""What a build left out, and its inputs read again: to list all of that, or to compare shards."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import UNSET

from tokmill.base.errors import TokmillError
from tokmill.base.files import make_folder, open_file
from tokmill.builds.folder import AGAIN, check_links, remove_shards
from tokmill.builds.make_shard import (
    Content,
    ShardJob,
    Work,
    check_unchanged,
    make_shard,
    planned_work,
)
from tokmill.builds.source import Item, settle_probe
from tokmill.store import manifest as layout
from tokmill.store.checks.validate import Problem
from tokmill.store.manifest import Receipt
from tokmill.store.receipts import inputs_fit, read_planned
from tokmill.store.schema import each_drop
from tokmill.store.store import Store, shard_path


class LeftOut(msgspec.Struct, frozen=True):
    """A record that is not in a store."""

    item: str
    path: str
    byte: int
    line: int | None
    """Counted from 1; None if the input is gone, is compressed, or is not text."""
    reason: str
    rejected: bool


def input_paths(store: Store) -> dict[str, str]:
    return {planned.name: planned.path for planned in read_planned(store.path)}


def left_out(store: Store, most: int = 20) -> list[LeftOut]:
    """Return the first rejected records with their places, in the order of the inputs."""
    paths = input_paths(store)
    result: list[LeftOut] = []
    for number in range(len(store.shards)):
        receipt = store.receipt(number)
        for reject in receipt.rejects[: most - len(result)]:
            name = receipt.items[reject.item].name
            path = paths.get(name, "")
            line = line_of(path, reject.first)
            result.append(LeftOut(name, path, reject.first, line, reject.reason, True))
    return result


def line_of(path: str, byte: int) -> int | None:
    """Return the line (from 1) of a byte of a text file; None for other or missing files."""
    if not path.endswith((".jsonl", ".ndjson", ".tsv", ".txt", ".text", ".md")):
        return None
    try:
        with open_file(path) as file:
            lines = 1
            while byte > 0 and (block := file.read(min(byte, 1 << 20))):
                lines += block.count(b"\n")
                byte -= len(block)
            return lines
    except (OSError, TokmillError):
        return None


def work_of(store: Path) -> tuple[Work, dict[str, ShardJob]]:
    plan = layout.read_plan(store)
    if not inputs_fit(store, plan):
        raise TokmillError(
            "the items are not those of plan.json: one of the two is damaged, or a build has begun "
            "and not ended",
            where=str(store / "inputs.jsonl"),
            hint="run the same `tokmill build` again: it writes the file anew",
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
                f"the plan has no shard {name!r}",
                where=str(store),
                hint="`tokmill store validate STORE` names what is damaged",
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
                what = "making it again from its input gives other bytes"
                path = str(shard_path(store.path, receipt.name))
                problems.append(Problem(path, what, remove=path))
    finally:
        remove_shards(folder)
    return problems


def each_left_out(store: Store) -> Iterator[LeftOut]:
    """Yield each record that was left out, in the order of the inputs."""
    work, tasks = work_of(store.path)
    source = work.source()
    paths = input_paths(store)
    for shard in dict.fromkeys(entry.name.partition("-")[0] for entry in store.shards):
        for item in tasks[shard].items:
            check_unchanged(item)
            path = paths.get(item.name, "")
            for batch in source.read(item, Content()):
                for drop in each_drop(batch.drops):
                    line = line_of(path, drop.offset)
                    yield LeftOut(item.name, path, drop.offset, line, drop.reason, drop.rejected)
