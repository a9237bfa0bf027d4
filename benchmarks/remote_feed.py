"""Batches a second of a store by its address beside those of the same store on the disk.

A proxy before a server of objects adds 50 ms to each request and lets 100 MB/s through; the cache
has room for a tenth of the corpus; a step of a training is 50 ms of sleep. Rounds alternate; each
by address begins with an empty cache. Server, proxy and feed share the machine: it must be quiet.

    python benchmarks/remote_feed.py FOLDER [--megabytes 400] [--steps 400]
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))

import tokmill  # noqa: E402
from crash_stores import ending_names  # noqa: E402
from object_servers import Proxy, gateway, set_up  # noqa: E402
from tokmill.store.publish import push  # noqa: E402
from tokmill.training.data import Loader, make_feed, open_stores  # noqa: E402
from tokmill.training.recipe.resolve import resolve  # noqa: E402
from tokmill.training.runs import run as runs  # noqa: E402

SHARDS, AT_A_TIME = 64, 2
"""Shards of the corpus, and those whose rows are mixed: twice as many need room at a time."""
BATCH, LENGTH = 32, 1024
LATENCY, RATE, STEP = 0.05, 100e6, 0.05
WORDS = np.array(["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"])


def lines(size: int, seed: int) -> Iterator[str]:
    """Yield JSON Lines of so many bytes."""
    random = np.random.default_rng(seed)
    while size > 0:
        line = json.dumps({"text": " ".join(random.choice(WORDS, random.integers(20, 2000)))})
        size -= len(line) + 1
        yield line + "\n"


def make_store(folder: Path, megabytes: int) -> tokmill.Store:
    names = ending_names(SHARDS)
    for number, name in enumerate(names):
        path = folder / "texts" / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(lines(megabytes * 1_000_000 // SHARDS, number)))
    tokenizer = Path(__file__).parents[1] / "tests/golden/tokenizer.json"
    return tokmill.build("jsonl", folder / "texts", folder / "store", tokenizer=tokenizer)


def batches_a_second(place: str, steps: int) -> float:
    """Feed a training whose steps take `STEP` seconds; the first batch counts too."""
    recipe = {
        "data": {"train": place, "batch": BATCH, "shards": AT_A_TIME, "verify": False},
        "model": {"dim": 16, "layers": 1, "heads": 1},
        "task": {"length": LENGTH},
    }
    config = resolve(recipe, Path("no run"), {})
    begun = time.monotonic()
    stores = open_stores(config.data)
    facts = runs.facts_from(config, stores)
    task = runs.make_task(config, runs.inputs_of(config, facts))
    feed = make_feed(config, task, stores, 1)
    micro, cpu = BATCH * LENGTH, torch.device("cpu")
    with Loader(feed, task, range(steps), micro_tokens=micro, device=cpu) as loader:
        for _ in range(steps):
            loader.next()
            time.sleep(STEP)
    return steps / (time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    store = make_store(given.folder.absolute(), given.megabytes)
    scratch = given.folder.absolute() / "server"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    with gateway(scratch) as (port, bucket), pytest.MonkeyPatch.context() as patched:
        proxy: Proxy = set_up(port, scratch, patched)
        os.environ["TOKMILL_CACHE_LIMIT"] = str(store.manifest.bytes // 10)
        os.environ["TOKMILL_PATIENCE"] = "60"
        address = f"s3://{bucket}/corpus"
        push(store.path, address)
        proxy.fault, proxy.rate = (lambda method, path: LATENCY), RATE
        size, shards = store.manifest.bytes / 1e6, len(store.manifest.shards)
        print(f"{size:.0f} MB in {shards} shards, cache {size / 10:.0f} MB")
        for number in range(given.rounds):
            shutil.rmtree(scratch / "cache", ignore_errors=True)
            proxy.requests.clear()
            far = batches_a_second(address, given.steps)
            read, asked = sum(n for _, _, n in proxy.requests) / 1e6, len(proxy.requests)
            near = batches_a_second(str(store.path), given.steps)
            print(f"round {number + 1}: by address {far:.2f} batches/s ({asked} requests, "
                  f"{read:.0f} MB), on the disk {near:.2f}: {far / near:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
