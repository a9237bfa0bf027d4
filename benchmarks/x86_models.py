"""RWKV-7 learns programs for 20 million positions, beside its formula and a decoder.

All read the same six columns of the same rows, in one thread in float32, one after the other, and
are measured on programs that none has seen. The formula is what the authors write, in plain torch
(`peers/rwkv7_formula.py`); it begins with the same weights, so its losses ought to be the same. The
decoder gets as many CPU seconds as RWKV-7 took. Runs continue where they were stopped. The figures
go to docs/images.

    python benchmarks/x86_models.py CACHE
"""

import json
import os
import resource
import subprocess
import sys
import tomllib
from dataclasses import dataclass
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

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parent / "docs" / "images"
RECIPE = HERE.parent / "recipes" / "x86" / "rwkv7-tiny.toml"
COLUMNS = ["asm", "mne", "type", "reg", "rw", "eflag"]
PROGRAMS, LARGEST = 1250, 1_000_000
COUNTED, SMALL = 200, 200_000
"""Programs whose tokens make the vocabularies: all tokens that there can be are six times more."""
POSITIONS = 16 * 256
"""Positions of a step."""
STEPS = 4883
EVERY = 244
"""Steps between evaluations: nearly a million positions."""
SHOWN = (244, 1220, 2440, STEPS)
"""Steps of the table: 1, 5, 10 and 20 million positions."""
LONGER = {
    "model.dim": 64, "model.field_dim": 16, "optim.warmup": 200, "run.log_every": 61,
    "run.eval_every": EVERY, "run.eval_rows": 256, "run.checkpoint_every": 488,
}  # fmt: skip
"""What differs from the recipe: half the width, so that three trainings take two hours."""
DECODER = {
    "model.kind": "decoder", "model.heads": 2, "optim.weight_decay": 0.1, "optim.eps": 1e-8,
}  # fmt: skip
TRIALS = (20, 60)
"""Steps of two short runs, whose difference is the decoder's time a step."""


@dataclass(frozen=True)
class Curve:
    """A training: losses on held-out programs by step, and its CPU seconds."""

    name: str
    losses: dict[int, float]
    cpu: float
    weights: float
    """In millions."""

    @property
    def last(self) -> int:
        return max(self.losses)

    def at(self, step: int) -> str:
        """Return the loss at a step, or at the evaluation next to it, as text."""
        near = [one for one in self.losses if abs(one - step) <= STEPS % EVERY]
        return f"{self.losses[near[-1]]:.3f}" if near else ""


def said(*command: object) -> dict[str, Any]:
    """Run tokmill with --json and return what it says; its failure ends the benchmark."""
    done = subprocess.run(
        [TOKMILL, *map(str, command), "--json"], check=True, stdout=subprocess.PIPE
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def stores(cache: Path) -> tuple[Path, Path]:
    """Return a store to learn from and one of other programs; made where missing."""
    folder = cache / "x86-models"
    parts = folder / "train", folder / "val"
    if not all((part / "manifest.json").exists() for part in parts):
        remove(folder)
        folder.mkdir(parents=True)
        vocab, functions = folder / "vocab", folder / "all"
        some(folder / "counted", COUNTED, SMALL)
        some(folder / "in", PROGRAMS, LARGEST)
        said("vocab", "build", "x86", folder / "counted", "-o", vocab, "--rules", "tokmill", "-q")
        lift = ("--vocab", vocab, "--max-rejects", 1, "--workers", 0, "-q")
        said("build", "x86", folder / "in", "-o", functions, *lift)
        split, others = ("--by", "program", "--ratio", 0.9, "-q"), folder / "others"
        said("build", "select", functions, "-o", parts[0], *split, "--unique")
        said("build", "select", functions, "-o", others, *split, "--rest")
        unseen = ("--unique", "--not-in", parts[0], "-q")
        said("build", "select", others, "-o", parts[1], *unseen)
    return parts


def unigram(train: Path, val: Path, columns: list[str]) -> float:
    """Return the loss a token of guessing each column by how often its ids stand in `train`."""
    learned, asked = (count(Store(path)).ids for path in (train, val))
    loss = 0.0
    for name in columns:
        share = (learned[name] + 1) / (learned[name] + 1).sum()
        loss -= float((asked[name] / asked[name].sum() * np.log(share)).sum())
    return loss


def keys(steps: int, decoder: bool) -> list[str]:
    recipe = tomllib.loads(RECIPE.read_text())
    flat = {f"{table}.{key}": v for table, part in recipe.items() for key, v in part.items()}
    flat |= LONGER | {"run.steps": steps}
    if decoder:
        del flat["model.head_dim"]
        flat |= DECODER
    return [f"--set={key}={json.dumps(v).strip(chr(34))}" for key, v in flat.items()]


def spent(out: Path, command: list[object]) -> float:
    """Run a training in one thread; return its CPU seconds, of all its sessions."""
    facts = out.with_suffix(".json")
    if facts.exists():
        return float(json.loads(facts.read_text()))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    facts.write_text(json.dumps(cpu))
    return cpu


def learned(train: Path, val: Path, out: Path, steps: int, decoder: bool) -> float:
    """Train with tokmill; return the CPU seconds."""
    command = [TOKMILL, "train", train, "--val", val, "-o", out, "-q"]
    return spent(out, [*command, *keys(steps, decoder)])


def curve(name: str, out: Path, cpu: float, weights: float) -> Curve:
    lines = read_metrics(out / METRICS)
    losses = {int(line["step"]): line["val_loss"] for line in lines if "val_loss" in line}
    return Curve(name, losses, cpu, weights)


def size(run: Path) -> float:
    weights = load_file(run / "model" / "model.safetensors").values()
    return sum(weight.size for weight in weights) / 1e6


def trained(train: Path, val: Path, folder: Path) -> list[Curve]:
    """Train the three, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    ours, formula, decoder = (folder / name for name in ("rwkv7", "formula", "decoder"))
    cpu = learned(train, val, ours, STEPS, decoder=False)
    own = curve("RWKV-7", ours, cpu, size(ours))
    peer = spent(formula, [sys.executable, HERE / "x86_formula.py", ours, formula])
    short, long = (learned(train, val, folder / f"trial-{n}", n, decoder=True) for n in TRIALS)
    each = (long - short) / (TRIALS[1] - TRIALS[0])
    seconds = learned(train, val, decoder, round(cpu / each), decoder=True)
    return [
        own,
        curve("the authors' formula", formula, peer, own.weights),
        curve("decoder", decoder, seconds, size(decoder)),
    ]


def drawn(curves: list[Curve], unit: str) -> figures.Figure:
    """Return the figure of losses against million positions, or against CPU minutes."""
    series = []
    for number, one in enumerate(curves):
        scale = POSITIONS / 1e6 if unit == "million positions" else one.cpu / one.last / 60
        steps, losses = np.array(list(one.losses)), np.array(list(one.losses.values()))
        # The second lies on the first.
        line = ":" if number == 1 else "-"
        series.append(figures.Series(one.name, steps * scale, losses, number, line))
    title = "Six streams of held-out programs"
    return figures.Figure(title, unit, "loss (nats a token)", "line", series)


def draw(curves: list[Curve]) -> None:
    for name, unit in (
        ("rwkv7-decoder", "million positions"),
        ("rwkv7-decoder-time", "CPU minutes"),
    ):
        write_file(IMAGES / f"{name}.svg", render(drawn(curves, unit), "svg"))


def main(cache: Path) -> list[str]:
    train, val = stores(cache)
    curves = trained(train, val, cache / "x86-models-runs")
    draw(curves)
    own, formula, decoder = curves
    apart = {step: own.losses[step] - formula.losses[step] for step in own.losses}
    rows = [
        [
            one.name,
            f"{one.weights:.2f}",
            *map(one.at, SHOWN),
            f"{one.losses[one.last]:.3f}",
            f"{one.last * POSITIONS / 1e6:.1f}",
            f"{one.cpu:,.0f}",
            f"{one.last * POSITIONS / one.cpu:,.0f}",
        ]
        for one in curves
    ]
    seen = (
        f"{Store(train).tokens:,} training tokens, {Store(val).tokens:,} held-out tokens of other "
    )
    better = "is better" if decoder.losses[decoder.last] < own.losses[own.last] else "is worse"
    return [
        f"After as many CPU seconds the decoder {better} than RWKV-7. RWKV-7 lies "
        f"{apart[own.last]:+.4f} nats from the authors' formula at the end, and at most "
        f"{max(map(abs, apart.values())):.4f} at any evaluation.",
        "",
        f"{PROGRAMS:,} programs of this machine below {LARGEST // 1000} KB, distinct functions: "
        f"{seen}programs. `recipes/x86/rwkv7-tiny.toml` at width {LONGER['model.dim']}, {STEPS:,} "
        "steps of 16 rows of 256 positions in float32 and one thread; the decoder has the same "
        "layers and width. Rows, their order and, except for the decoder, the initial weights are "
        f"equal. The loss is the sum over six columns, on {LONGER['run.eval_rows']} rows of "
        f"held-out programs; the unigram loss is {unigram(train, val, COLUMNS):.3f}. CPU seconds "
        "are of whole processes with evaluations.",
        "",
        *markdown(
            [
                "model", "parameters, millions", "loss at 1 M positions", "5 M", "10 M", "20 M",
                "at the end", "positions, millions", "CPU seconds", "positions/s",
            ],
            rows,
        ),
        "",
        "![Loss by positions](../docs/images/rwkv7-decoder.svg)",
        "![Loss by time](../docs/images/rwkv7-decoder-time.svg)",
    ]  # fmt: skip


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]))))
