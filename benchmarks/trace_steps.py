"""Time of `tokmill trace` for a step of a store of 10^9 documents, which is made up.

The store lists one real shard of 100,000 documents 10,000 times; the numbers of tokens before each
record (8 GB) lie in a sparse copy on the disk, or the documents of packed rows (4 GB) in a file of
holes. Everything else is what a training does: manifest, order, rows, tokens.

    python benchmarks/trace_steps.py FOLDER [DOCUMENTS]
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))

from tokmill.feed import packed  # noqa: E402
from tokmill.feed.packed import Pieces, best_fit, pieces_of, rests  # noqa: E402
from tokmill.store.manifest import Manifest, read_checked, with_checksum  # noqa: E402
from tokmill.store.store import Store  # noqa: E402
from tokmill.training.data import open_stores  # noqa: E402
from tokmill.training.recipe.resolve import resolve  # noqa: E402
from tokmill.training.runs import run as runs  # noqa: E402
from tokmill.training.trace import Trace  # noqa: E402
from toy import SHARD, SIZE, make_store, recipe  # noqa: E402

EACH, STEPS, BATCH, LENGTH = 100_000, 1_000_000, 512, 1024


def make(folder: Path, times: int) -> tuple[Path, np.ndarray]:
    """Write the store; return it and the tokens before each record."""
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(5.5, 1, EACH).astype(np.int64) + 1, 20_000)
    path = make_store(folder / "store", [random.integers(1, SIZE, n) for n in lengths.tolist()])
    manifest: Any = read_checked(path / "manifest.json", Manifest)
    (entry,) = manifest.shards
    assert entry.name == SHARD
    manifest = msgspec.structs.replace(
        manifest,
        shards=[entry] * times,
        records=times * EACH,
        tokens=times * entry.tokens,
        bytes=times * entry.bytes,
    )
    (path / "manifest.json").write_bytes(with_checksum(manifest))
    offsets = np.memmap(folder / "offsets", np.int64, "w+", shape=(times * EACH + 1,))
    ends = np.cumsum(lengths)
    for number in range(times):
        offsets[number * EACH + 1 : (number + 1) * EACH + 1] = ends + number * entry.tokens
    return path, offsets


def scaled(folder: Path, times: int) -> Any:
    """Pieces as of the whole store, from those of one shard; documents are all number 0."""

    def pieces(store: Store, length: int, overlap: int, shards: int, seed: int) -> Pieces:
        one = make_store(folder / "one", [r["token"] for r in store[:EACH]])
        found = pieces_of(Store(one), length, overlap, 0, 0)
        documents = np.memmap(folder / "documents", np.uint32, "w+", shape=(times * EACH,))
        count = found.count * times
        packs = best_fit(*rests(found.rest, count)[:2], length).repeats.sum()
        return dataclasses.replace(
            found, documents=documents, count=count, packs=np.asarray([packs])
        )

    return pieces


def begin(store: Path, out: Path, rows: str) -> Path:
    value = recipe(
        store, STEPS, data={"batch": BATCH}, task={"length": LENGTH, "rows": rows},
        run={"micro_tokens": 32_768},
    )  # fmt: skip
    config = resolve(value, out, {}, 1)
    stores = open_stores(config.data)
    runs.begin(out, config, stores, runs.facts_from(config, stores))
    (out / runs.SESSIONS).write_text(json.dumps({"step": 0, "processes": 8}) + "\n")
    return out


def main(folder: Path, documents: int) -> None:
    folder.mkdir(parents=True)
    times = documents // EACH
    store, offsets = make(folder, times)
    Store.offsets = lambda self: offsets  # type: ignore[method-assign]
    for rows in ("windows", "packed"):
        if rows == "packed":
            packed.pieces_of = scaled(folder, times)  # type: ignore[assignment]
        run = begin(store, folder / rows, rows)
        began = time.perf_counter()
        trace = Trace(run)
        opened = time.perf_counter() - began
        random = np.random.default_rng(1)
        steps = random.integers(1, min(STEPS, len(trace.feed)) + 1, 40).tolist()
        spent, cpu = [], []
        for step in steps:
            began, used = time.perf_counter(), time.process_time()
            seen = trace.step(step)
            spent.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
        one = seen[-1]
        first = trace.feed.batch(steps[-1] - 1, 7, 8)
        print(
            f"{rows}: {len(trace.stores[0]):,} documents, {trace.feed.rows_in_all:,} rows; opened "
            f"in {opened:.1f} s; a step of {BATCH} rows ({len(seen):,} documents, "
            f"{first.document.size * 8:,} tokens): median {1e3 * np.median(spent):.1f} ms, "
            f"least {1e3 * min(spent):.1f} ms; of a core {1e3 * np.median(cpu):.1f} ms"
        )
        if rows == "windows":
            began = time.perf_counter()
            found = list(trace.holding({0: np.asarray([one.record])}))
            spent_here = time.perf_counter() - began
            assert steps[-1] in [held.step for held in found]
            print(f"    record {one.record:,} in {STEPS:,} steps: {len(found)} rows, "
                  f"{spent_here:.3f} s")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10**9)
