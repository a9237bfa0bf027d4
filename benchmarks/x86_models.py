"""RWKV-7 and a decoder of equal size learn the same store of programs: loss and tokens a second.

Both read the same six columns of the same rows in the same order, one after the other, and are
measured on programs that neither has seen. The figure goes to docs/images.

    python benchmarks/x86_models.py CACHE
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jsonl_store import remove
from measure import TOKMILL, markdown
from tokmill import Store
from tokmill.base.files import write_file
from tokmill.report.pages import figures
from tokmill.report.pages.plot import render
from tokmill.store.checks.stats import count
from tokmill.training.runs.trackers import METRICS, read_metrics
from x86_store import some

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "rwkv7-decoder.svg"
COLUMNS = ["asm", "mne", "type", "reg", "rw", "eflag"]
PROGRAMS, LARGEST = 150, 300_000
"""None is so large that what is held out is one program."""
STEPS = 300
SHARED = {
    "model.dim": 128, "model.layers": 4, "model.join": "concat", "model.field_dim": 32,
    "task.tied": "false", "task.length": 256, "task.rows": "packed", "data.batch": 16,
    "optim.warmup": 20, "optim.floor": 0.1, "optim.betas": "[0.9,0.99]",
    "run.precision": "bf16", "run.log_every": 10, "run.eval_every": 50, "run.eval_rows": 128,
}  # fmt: skip
MODELS = {
    "RWKV-7": {"model.kind": "rwkv7", "model.head_dim": 32, "optim.lr": 3e-3, "optim.eps": 1e-18},
    "decoder": {"model.kind": "decoder", "model.heads": 4, "optim.lr": 3e-3},
}


def run(*command: object) -> dict[str, Any]:
    """Run tokmill with --json and return what it says; its failure ends the benchmark."""
    done = subprocess.run(
        [TOKMILL, *map(str, command), "--json"], check=True, stdout=subprocess.PIPE
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def stores(cache: Path) -> tuple[Path, Path]:
    """Return a store to learn from and one of other programs; made where missing."""
    folder = cache / "x86-models"
    parts = folder / "train", folder / "val"
    if not all((part / "manifest.json").exists() for part in parts):
        remove(folder)
        folder.mkdir(parents=True)
        some(folder / "in", PROGRAMS, LARGEST)
        run("build", "x86", folder / "in", "-o", folder / "all", "-q")
        split = ("--by", "program", "--ratio", 0.9, "--unique")
        run("build", "select", folder / "all", "-o", parts[0], "-q", *split)
        run("build", "select", folder / "all", "-o", parts[1], "-q", *split, "--rest")
    return parts


def unigram(train: Path, val: Path, columns: list[str]) -> float:
    """Return the loss a token of guessing each column by how often its ids stand in `train`."""
    learned, asked = (count(Store(path)).ids for path in (train, val))
    loss = 0.0
    for name in columns:
        share = (learned[name] + 1) / (learned[name] + 1).sum()
        loss -= float((asked[name] / asked[name].sum() * np.log(share)).sum())
    return loss


def main(cache: Path, steps: int = STEPS) -> list[str]:
    """Measure; return the section for RESULTS.md."""
    train, val = stores(cache)
    folder = cache / "x86-models-runs"
    remove(folder)
    curves: list[figures.Series] = []
    rows = [["share of each id", "", f"{unigram(train, val, COLUMNS):.3f}", ""]]
    for colour, (name, keys) in enumerate(MODELS.items()):
        out = folder / name
        options = [f"--set={key}={value}" for key, value in (SHARED | keys).items()]
        run("train", train, "--val", val, "-o", out, "--steps", steps, "-q", *options)
        logged = read_metrics(out / METRICS)
        speed = statistics.median(
            line["tokens_per_second"] for line in logged if "tokens_per_second" in line
        )
        loss = run("eval", out, val)["loss"]
        weights = load_file(out / "model" / "model.safetensors").values()
        size = sum(weight.size for weight in weights) / 1e6
        rows.append([name, f"{size:.2f}", f"{loss:.3f}", f"{speed:,.0f}"])
        curves += [
            replace(one, label=f"{one.label}, {speed:,.0f} tokens/s", colour=colour)
            for one in figures.loss([out]).series
        ]
    title = "Six streams of programs, 4 layers of 128 on two cores"
    figure = figures.Figure(title, "step", "loss (nats a token)", "line", curves)
    FIGURE.parent.mkdir(exist_ok=True)
    write_file(FIGURE, render(figure, "svg"))
    seen = f"{Store(train).tokens:,} tokens to learn from, {Store(val).tokens:,} of other programs"
    return [
        f"{PROGRAMS} programs of this machine below {LARGEST // 1000} KB: {seen}. {steps} steps of "
        "16 rows of 256 positions, the same rows for both, bf16; the loss is the sum over six "
        "columns.",
        "",
        *markdown(
            ["what", "weights, millions", "loss on other programs, nats a token", "tokens/s"], rows
        ),
        "",
        "![Loss by step](../docs/images/rwkv7-decoder.svg)",
    ]


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
