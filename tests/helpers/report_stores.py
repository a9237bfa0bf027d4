"""Small stores, written without a tokenizer, and folders of runs as reports read them."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tokmill.base.files import make_folder, write_file
from tokmill.store.manifest import ItemReceipt, Plan, PlannedItem, Receipt, Rejects, with_checksum
from tokmill.store.receipts import make_manifest
from tokmill.store.schema import Column, Records, Schema, Strings
from tokmill.store.shards.shard import SUFFIX, ShardWriter
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary

ROLES = {"eot": 0, "unk": 1}


def write_store(
    path: Path,
    shards: Sequence[Sequence[Sequence[int]]],
    *,
    size: int = 50,
    roles: dict[str, int] | None = None,
    vocabulary: bytes | None = b"{}",
    kept: bool = False,
    drops: Sequence[tuple[int, int, str, bool]] = (),
    complete: bool = True,
) -> Store:
    """Write shards of records of ids; with `kept` each has a `name` and a number `level`."""
    make_folder(path / "shards")
    make_folder(path / "vocab")
    schema: Schema = {"token": Column("u1", vocab="token" if vocabulary else None)}
    vocabularies = {}
    if vocabulary is not None:
        write_file(path / "vocab/tokenizer.json", vocabulary)
        digest = hashlib.sha256(vocabulary).hexdigest()
        vocabularies = {
            "token": Vocabulary("tokenizer.json", digest, size, ROLES if roles is None else roles)
        }
    if kept:
        schema |= {
            "name": Column("utf8", per="record"),
            "level": Column("u2", per="record"),
        }
    receipts, planned = [], []
    for number, records in enumerate(shards):
        name = hashlib.sha256(str(number).encode()).hexdigest()[:24]
        writer = ShardWriter(schema, {"token": size} if vocabulary else {})
        flat = np.asarray([i for record in records for i in record], "u1")
        offsets = np.cumsum([0, *map(len, records)])
        columns: dict[str, object] = {"token": flat}
        if kept:
            columns["name"] = Strings.of([f"doc-{number}-{i}" for i in range(len(records))])
            columns["level"] = np.arange(len(records)) % 3
        starts = np.arange(len(records)) * 10
        writer.add(Records(offsets, columns, starts), 0)  # type: ignore[arg-type]
        written, digest = writer.write(path / f"shards/{name}{SUFFIX}")
        item = ItemReceipt(
            f"in-{number}.txt", 0, 100, 3 * len(flat), digest, len(records), len(flat), 0, 0
        )
        left = drops if number == 0 else ()
        receipts.append(
            Receipt(
                shard=name,
                part=0,
                last=True,
                records=len(records),
                tokens=len(flat),
                bytes=written,
                sha256=digest,
                ranges=writer.ranges,
                items=[item],
                rejects=[Rejects(item, at, at, 1, why) for item, at, why, bad in left if bad],
                rejected=dict(Counter(why for _, _, why, bad in left if bad)),
                skipped=dict(Counter(why for _, _, why, bad in left if not bad)),
            )
        )
        write_file(path / f"shards/{name}.json", with_checksum(receipts[-1]))
        planned.append(PlannedItem(item.name, "/nowhere", 0, 100, "d" * 32, name))
    lines = b"".join(msgspec.json.encode(item) + b"\n" for item in planned)
    plan = Plan(
        recipe_id="a" * 64,
        plan_id="b" * 64,
        recipe={"source": "text", "config": {"strip": False}},
        schema=schema,
        vocabularies=vocabularies,
        items=len(shards),
        input_bytes=100 * len(shards),
        shards=len(shards),
        options={},
        roots=[],
        inputs_sha256=hashlib.sha256(lines).hexdigest(),
    )
    write_file(path / "plan.json", with_checksum(plan))
    write_file(path / "inputs.jsonl", lines)
    if complete:
        write_file(
            path / "manifest.json", with_checksum(make_manifest(plan, receipts, complete=True))
        )
    return Store(path)


def write_run(path: Path, lines: list[dict[str, float | None]]) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "recipe.json").write_text(json.dumps({"run": {"steps": 20}, "data": {"train": "s"}}))
    (path / "schema.json").write_text(json.dumps({"fingerprint": "f" * 64, "columns": {"a": 3}}))
    return path
