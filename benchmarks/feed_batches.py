"""Batches a second: tokmill's feed beside other loaders on the same tokens, in turns.

Every contestant makes x and y, int64, 32 rows of 1,024 tokens. tokmill makes the number of each
token's document and its place in it besides. The gate: rows hold the tokens of the flat file.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import corpus
from jsonl_store import tokmill
from measure import TOKMILL, markdown
from tokmill.feed.feed import Feed
from tokmill.models.model import Inputs
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.tasks.task import Task, to_tensors

PEERS = Path(__file__).parent / "peers"
ROWS, LENGTH = 32, 1024
BATCHES = 256
"""A round."""
RESUMED = 1_000_000
CPU = torch.device("cpu")


def get_batch(flat: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch in nanoGPT's way: a fresh map, random places, a copy and a cast a row."""
    data = np.memmap(flat, dtype=np.uint16, mode="r")
    places = torch.randint(len(data) - LENGTH, (ROWS,))
    x = [torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in places]
    y = [torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in places]
    return torch.stack(x), torch.stack(y)


def files(cache: Path) -> tuple[Path, Path]:
    """Return a store and a headerless uint16 file of the same tokens; made where missing."""
    store, flat = cache / "feed-store", cache / "feed.bin"
    if not (store / "manifest.json").exists():
        corpus.main(cache, [400])
        command = tokmill(cache / "text-400.jsonl", cache / "tokenizer.json", store)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        flat.unlink(missing_ok=True)
    if not flat.exists():
        command = [TOKMILL, "store", "export", "bin", str(store), "-o", str(flat)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return store, flat


def make_task(store: Store, rows: str) -> Task:
    """Return the task; its model is as small as can be and does not run."""
    sizes = {"token": store.vocabularies["token"].size}
    model = Decoder(DecoderConfig(dim=2, layers=1, heads=1), Inputs(sizes))
    return NextToken(NextTokenConfig(length=LENGTH, rows=rows), model, Inputs(sizes))


def loader(store: Store, rows: str) -> Callable[[int], Any]:
    task = make_task(store, rows)
    feed = Feed(task.rows(store), ROWS, columns=["token"])
    return lambda step: to_tensors(task.prepare(feed.batch(step)), CPU)


def verify(store: Store, flat: Path) -> None:
    """Stop where rows are not windows of the flat file."""
    data = np.fromfile(flat, np.uint16)
    task = make_task(store, "windows")
    feed = Feed(task.rows(store), ROWS, columns=["token"])
    for step in (0, 1, len(feed) // 2, len(feed) + 3):
        tensors = to_tensors(task.prepare(feed.batch(step)), CPU)
        x, y = tensors.columns["token"].numpy(), tensors.targets["token"].numpy()
        for i, row in enumerate(feed.rows_of(step)[1].tolist()):
            wanted = data[row * LENGTH :][: LENGTH + 1]
            if not np.array_equal(x[i, : len(wanted) - 1], wanted[:-1]) or not np.array_equal(
                y[i][y[i] >= 0], wanted[1:][y[i, : len(wanted) - 1] >= 0]
            ):
                raise SystemExit("a row does not hold the tokens of the file; no figure")


def in_turns(contestants: dict[str, Callable[[int], float]], rounds: int) -> dict[str, float]:
    """Return the least seconds a batch of each contestant, who take the number of the round."""
    best = dict.fromkeys(contestants, np.inf)
    for number in range(rounds):
        for name, contestant in contestants.items():
            best[name] = min(best[name], contestant(number))
    return best


def here(work: Callable[[int], Any]) -> Callable[[int], float]:
    """Return a contestant of this process: seconds a batch over a round of steps."""

    def run(number: int) -> float:
        started = time.perf_counter()
        for step in range(number * BATCHES, (number + 1) * BATCHES):
            work(step)
        return (time.perf_counter() - started) / BATCHES

    return run


def child(*command: str) -> Callable[[int], float]:
    """Return a contestant in a process of its own, which prints seconds as its last line."""

    def run(_: int) -> float:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(json.loads(done.stdout.splitlines()[-1]))

    return run


def batches(cache: Path, peers_python: str, rounds: int) -> list[str]:
    place, flat = files(cache)
    store = Store(place)
    verify(store, flat)
    arguments = [str(value) for value in (ROWS, LENGTH, BATCHES)]
    first = "nanoGPT's get_batch"
    best = in_turns(
        {
            first: here(lambda _: get_batch(flat)),
            "tokmill, windows": here(loader(store, "windows")),
            "tokmill, packed": here(loader(store, "packed")),
            "mosaicml-streaming 0.13.0, shuffle": child(
                peers_python, str(PEERS / "streaming_batches.py"), str(flat), *arguments
            ),
        },
        rounds,
    )
    rows = [
        [
            name, f"{1 / seconds:,.0f}", f"{ROWS * LENGTH / seconds / 1e6:,.0f}",
            f"{best[first] / seconds:.2f}",
        ]
        for name, seconds in best.items()
    ]  # fmt: skip
    return markdown(["loader", "batches/s", "million tokens/s", "/ first"], rows)


def resumes(cache: Path, rounds: int) -> list[str]:
    """Measure the first batch of a fresh process at a late step, from the path of the store."""
    place, _ = files(cache)
    script = str(Path(__file__).resolve())
    kinds = ("windows", "packed")
    best = in_turns(
        {kind: child(sys.executable, script, str(place), kind) for kind in kinds}, rounds
    )
    what = f"first batch of a new process at step {RESUMED:,}, without imports"
    return markdown([what, "seconds"], [[kind, f"{best[kind]:.3f}"] for kind in kinds])


def resume(place: str, kind: str) -> float:
    """Return the seconds from the path of a store to the tensors of a late step."""
    store = Store(place)
    task = make_task(store, kind)
    started = time.perf_counter()
    store = Store(place)
    feed = Feed(task.rows(store), ROWS, columns=["token"])
    to_tensors(task.prepare(feed.batch(RESUMED)), CPU)
    return time.perf_counter() - started


def main(cache: Path, peers_python: str, rounds: int = 5) -> list[str]:
    store = Store(files(cache)[0])
    return [
        f"{store.tokens / 1e6:,.0f} million tokens in {store.records:,} documents and "
        f"{len(store.shards)} shards; {ROWS} rows of {LENGTH:,} tokens per batch, x and y as "
        f"int64; best of {rounds} rounds of {BATCHES} batches, in turns.",
        "",
        *batches(cache, peers_python, rounds),
        "",
        *resumes(cache, rounds),
    ]


if __name__ == "__main__":
    print(json.dumps(resume(*sys.argv[1:])))
