"""AdamW against Muon on the same text: loss at equal tokens, and at equal CPU seconds.

Losses do not depend on how busy the machine is, and CPU seconds little, so this may run beside
other work. Each run that is done is a line of CACHE/optimisers/runs.jsonl and is not done again.

    nice -n 15 python benchmarks/optimisers.py CACHE [TEXT] [SIZE]

TEXT: demo (the default) or frozen, the 25 MB of scripts/frozen_text.py. SIZE: medium (the default)
or large, as in defaults.py, or recipe: that of recipes/text/frozen-25mb.toml.
"""

from __future__ import annotations

import json
import lzma
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import defaults
import tokmill
from jsonl_store import remove
from tokmill.base.recipe import read_toml

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
OPTIM = {"floor": 0.1}
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "adamw": ({"lr": 1e-3}, {"lr": 2e-3}, {"lr": 3e-3}, {"lr": 4e-3}),
    "muon": (
        *({"lr": lr, "matrix_rate": 1.0} for lr in (2e-3, 4e-3, 8e-3, 16e-3)),
        {"lr": 4e-3, "matrix_rate": 2.0},
    ),
}
"""Optimiser → the learning rates that are tried with the first seed; the best one gets the rest."""
RECIPE: dict[str, tuple[dict[str, Any], ...]] = {
    "adamw": ({"lr": 7.5e-4}, {"lr": 1.5e-3}, {"lr": 3e-3}),
    "muon": ({"lr": 4e-3}, {"lr": 8e-3}),
}
"""The rates at the size of the recipe, whose runs take minutes."""
STEPS = {"demo": 300, "frozen": 500}


class Run(msgspec.Struct, frozen=True):
    """One run."""

    text: str
    size: str
    kind: str
    optim: dict[str, Any]
    steps: int
    seed: int = 0

    @property
    def key(self) -> str:
        """What it is called in the file of runs."""
        return json.dumps(msgspec.to_builtins(self), sort_keys=True)


class Result(msgspec.Struct, frozen=True):
    """What a run ended with: nats a token and bits a byte of the validation text, CPU seconds."""

    loss: float
    bits: float
    cpu: float


def stores(cache: Path, text: str) -> Path:
    """Return the folder with the stores `train` and `val` of a text, and its files beside it."""
    if text == "demo":
        return defaults.stores(cache)
    folder = cache / "optimisers" / text
    if not (folder / "lm" / "val" / "manifest.json").exists():
        script = str(ROOT / "scripts" / "frozen_text.py")
        subprocess.run([sys.executable, script, str(folder)], check=True)
        subprocess.run(
            [defaults.TOKMILL, "build", "text", "--train", str(folder / "train.txt"), "--val",
             str(folder / "val.txt"), "--vocab-size", "8192", "-o", str(folder / "lm")],
            check=True,
        )  # fmt: skip
    return folder / "lm"


def recipe(cache: Path, run: Run) -> dict[str, Any]:
    """Return the recipe of a run, but for its length."""
    folder = stores(cache, run.text)
    value: dict[str, Any] = {"data": {}, "model": {}, "task": {}, "optim": OPTIM, "run": {}}
    if run.size == "recipe":
        value |= read_toml(ROOT / "recipes" / "text" / "frozen-25mb.toml")
    else:
        width, layers, heads = defaults.SIZES[run.size]
        value["model"] = {"dim": width, "layers": layers, "heads": heads}
    over: dict[str, dict[str, Any]] = {
        "data": {"train": str(folder / "train"), "val": str(folder / "val"), "seed": run.seed},
        "optim": {"kind": run.kind, "warmup": run.steps // 10, **run.optim},
        "run": {
            "steps": run.steps, "seed": run.seed, "device": "cpu", "eval_every": 0,
            "eval_rows": 0, "checkpoint_every": 0, "best": False, "micro_tokens": 2048,
        },
    }  # fmt: skip
    return value | {table: {**value.get(table, {}), **keys} for table, keys in over.items()}


class Bench:
    """The runs of one text and one size; what is done is read from a file and added to it."""

    def __init__(self, cache: Path, text: str, size: str) -> None:
        self.cache, self.text, self.size, self.steps = cache, text, size, STEPS[text]
        self.path = cache / "optimisers" / "runs.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found = [json.loads(line) for line in lines]
        self.done = {one["key"]: msgspec.convert(one["result"], Result) for one in found}

    def run(self, kind: str, optim: dict[str, Any], **changes: Any) -> Result:
        """Train, if that is not done yet; return the result."""
        run = Run(self.text, self.size, kind, optim, **{"steps": self.steps, **changes})
        if run.key not in self.done:
            out = self.cache / "optimisers" / "run"
            remove(out)
            begun = time.process_time()
            metrics = tokmill.train(recipe(self.cache, run), out, quiet=True).metrics
            cpu = time.process_time() - begun
            remove(out)
            result = Result(metrics["val_loss"], metrics.get("val_bits_per_byte", math.nan), cpu)
            self.done[run.key] = result
            with self.path.open("a") as file:
                line = {"key": run.key, "result": msgspec.to_builtins(result)}
                file.write(json.dumps(line) + "\n")
            print(f"{run.key}: {result}", file=sys.stderr, flush=True)
        return self.done[run.key]

    def best(self, kind: str) -> dict[str, Any]:
        """Return the learning rates of an optimiser that did best with the first seed."""
        rates = (RECIPE if self.size == "recipe" else KINDS)[kind]
        return min(rates, key=lambda optim: self.run(kind, optim).loss)

    def seeds(self, kind: str, optim: dict[str, Any], **changes: Any) -> list[Result]:
        """Return the results of all seeds."""
        return [self.run(kind, optim, seed=seed, **changes) for seed in SEEDS]


def show(results: Iterable[Result]) -> str:
    """Return the cells of some runs: loss, bits a byte, CPU seconds."""
    found = list(results)
    losses = [one.loss for one in found]
    spread = (max(losses) - min(losses)) / 2
    bits, cpu = (statistics.mean(getattr(one, name) for one in found) for name in ("bits", "cpu"))
    return f"{statistics.mean(losses):.4f} ± {spread:.4f} | {bits:.4f} | {cpu:.0f}"


def baselines(cache: Path, text: str) -> list[str]:
    """Return rows of what knows nothing of order, and of a general compressor."""
    folder = stores(cache, text)
    train, val = (tokmill.Store(folder / name) for name in ("train", "val"))
    ids = [
        np.concatenate([records.columns["token"] for _, _, records in store.batches()])
        for store in (train, val)
    ]
    size = train.vocabularies["token"].size
    counts = np.bincount(ids[0], minlength=size) + 1
    nats = float(-np.log(counts / counts.sum())[ids[1]].mean())
    bytes_ = (val.bytes_per_token() or math.nan) * len(ids[1])
    bits = nats * len(ids[1]) / math.log(2) / bytes_
    raw = (folder.parent / "val.txt").read_bytes()
    packed = 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw)
    return [
        f"| unigram, of the training text | | {nats:.4f} | {bits:.4f} | |",
        f"| xz -9e of the validation text | | | {packed:.4f} | |",
    ]


def main(cache: Path, text: str = "demo", size: str = "medium") -> list[str]:
    """Do what is missing; return the section's lines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bench = Bench(cache, text, size)
    lines = [
        f"Text {text}, model {size}, {bench.steps} steps, one thread; mean ± half the range of "
        f"{len(SEEDS)} seeds, at the best of the rates that were tried.",
        "",
        "| optimiser | steps | loss, nats a token | bits a byte | CPU s |",
        "|---|---|---|---|---|",
    ]
    adamw, muon = (bench.best(kind) for kind in ("adamw", "muon"))
    slow, fast = bench.seeds("muon", muon), bench.seeds("adamw", adamw)
    # As many steps as take Muon as long as AdamW took.
    ratio = sum(one.cpu for one in fast) / sum(one.cpu for one in slow)
    fewer = int(bench.steps * min(1.0, ratio))
    equal = bench.seeds("muon", muon, steps=fewer)
    for kind, optim, steps, results in (
        ("AdamW", adamw, bench.steps, fast),
        ("Muon", muon, bench.steps, slow),
        ("Muon, equal seconds", muon, fewer, equal),
    ):
        rates = ", ".join(f"{key} {value:g}" for key, value in optim.items())
        lines.append(f"| {kind} ({rates}) | {steps} | {show(results)} |")
    torch.set_num_threads(threads)
    return [*lines, *baselines(cache, text)]


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]), *sys.argv[2:])))
