"""Opening a store of many shards, and adding a file to a finished one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tokmill.store.manifest import Manifest, ShardEntry, sealed
from tokmill.store.schema import Column
from tokmill.store.shards.shard import SUFFIX, write_tensors
from tokmill.store.store import Store


def sparse_store(folder: Path, shards: int) -> None:
    """Write a store of many small shards."""
    (folder / "shards").mkdir(parents=True)
    offsets = np.arange(0, 101, 10, dtype="<u8")
    entries = []
    for number in range(shards):
        name = f"{number:024x}"
        tensors = {
            "offsets": ("u8", [11], [offsets]),
            "token": ("u2", [100], [np.full(100, number % 60000, "<u2")]),
            "item": ("u4", [10], [np.zeros(10, "<u4")]),
            "start": ("u8", [10], [np.arange(10, dtype="<u8")]),
        }
        size, digest = write_tensors(folder / "shards" / f"{name}{SUFFIX}", tensors)
        entries.append(ShardEntry(name, 10, 100, size, digest))
    manifest = Manifest(
        producer="benchmark", complete=True, recipe_id="", plan_id="", fingerprint="", source="bin",
        schema={"token": Column("u2")}, vocabularies={}, records=10 * shards, tokens=100 * shards,
        bytes=sum(entry.bytes for entry in entries), input_bytes=0, ranges={}, skipped={},
        rejected={}, shards=entries,
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(sealed(manifest))


def main(cache: Path) -> list[str]:
    """Measure; return the section for RESULTS.md."""
    folder = cache / "many"
    shutil.rmtree(folder, ignore_errors=True)
    sparse_store(folder, 10_000)
    best = min(_open(folder) for _ in range(5))
    store = Store(folder)
    started = time.perf_counter()
    for record in np.random.default_rng(0).integers(0, len(store), 2000):
        store.record(int(record))
    read = (time.perf_counter() - started) / 2000
    shutil.rmtree(folder)
    again, total = grow(cache)
    return [
        "| what | figure |",
        "|---|---|",
        f"| opening a store of 10,000 shards, imports left out | {best:.3f} s |",
        f"| one random record of it, first touch of most shards | {read * 1e6:.0f} µs |",
        f"| shards made again when one file joins {total} shards | {again} |",
    ]


def _open(folder: Path) -> float:
    started = time.perf_counter()
    assert len(Store(folder)) == 100_000
    return time.perf_counter() - started


def grow(cache: Path) -> tuple[int, int]:
    """Build a store of many files, add one, and return (shards made, shards there before)."""
    inputs, out = cache / "grow", cache / "grown"
    for path in (inputs, out):
        shutil.rmtree(path, ignore_errors=True)
    inputs.mkdir()
    lines = (cache / "text-400.jsonl").read_bytes().splitlines(keepends=True)
    size = len(lines) // 40
    for number in range(40):
        part = lines[number * size : (number + 1) * size]
        (inputs / f"{number:03d}.jsonl").write_bytes(b"".join(part))
    command = [
        str(Path(sys.executable).parent / "tokmill"),
        *("build", "jsonl", str(inputs), "-o", str(out), "--field", "text", "-q"),
        *("--tokenizer", str(cache / "tokenizer.json")),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    before = {path.name for path in (out / "shards").glob(f"*{SUFFIX}")}
    (inputs / "020b.jsonl").write_bytes(b"".join(lines[:100]))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = {path.name for path in (out / "shards").glob(f"*{SUFFIX}")}
    for path in (inputs, out):
        shutil.rmtree(path)
    return len(after - before), len(before)
