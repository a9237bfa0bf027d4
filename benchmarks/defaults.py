"""What the recipe's defaults are chosen by: losses over learning rates, sizes and seeds.

Losses do not depend on how busy the machine is, so this may run beside other work. Each run that
is done is a line of CACHE/defaults/runs.jsonl and is not done again.

    nice -n 15 python benchmarks/defaults.py CACHE [KIND]

KIND: decoder (the default) or rwkv7.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tokmill
from jsonl_store import remove

ROOT = Path(__file__).resolve().parent.parent
TOKMILL = str(Path(sys.executable).parent / "tokmill")
STEPS, SEEDS = 300, (0, 1, 2)
SIZES = {"small": (64, 3, 2), "medium": (128, 4, 4), "large": (256, 4, 4)}
"""Name → width, layers, heads: 0.3, 1.1 and 3.7 million weights with 2,048 ids."""
BASE = {"lr": 2e-3, "betas": [0.9, 0.95], "warmup": 30, "weight_decay": 0.1, "floor": 0.1}
"""Changed key by key; all other keys of the recipe are the defaults."""
RATES = {"decoder": (1e-3, 1.5e-3, 2e-3, 3e-3, 4e-3), "rwkv7": (1e-3, 2e-3, 4e-3)}
FEW = {1e-3, 2e-3, 3e-3}
"""The rates at the large size, whose runs take minutes."""
OTHERS: tuple[dict[str, Any], ...] = (
    {"betas": [0.9, 0.99]},
    {"warmup": 60},
    {"weight_decay": 0.01},
    {"floor": 0.0},
)


class Setting(NamedTuple):
    """One run."""

    kind: str
    size: str
    seed: int
    optim: dict[str, Any]

    @property
    def key(self) -> str:
        """What it is called in the file of runs."""
        return json.dumps(self, sort_keys=True)


def stores(cache: Path) -> Path:
    """Return the folder with the stores `train` and `val` of the demo's text."""
    folder = cache / "defaults" / "text"
    if not (folder / "lm" / "val" / "manifest.json").exists():
        subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "demo_text.py"), str(folder)], check=True
        )
        subprocess.run(
            [TOKMILL, "build", "text", "--train", str(folder / "train.txt"), "--val",
             str(folder / "val.txt"), "--vocab-size", "2048", "-o", str(folder / "lm")],
            check=True,
        )  # fmt: skip
    return folder / "lm"


def settings(kind: str) -> Iterator[Setting]:
    """Yield all runs: the rates of all sizes first, then the other keys at the sizes that cost
    little."""
    for seed in SEEDS:
        for size in SIZES:
            for rate in RATES[kind]:
                if size != "large" or rate in FEW:
                    yield Setting(kind, size, seed, BASE | {"lr": rate})
    for size in list(SIZES)[:2]:
        for seed in SEEDS:
            for other in OTHERS if kind == "decoder" else OTHERS[:1]:
                yield Setting(kind, size, seed, BASE | other)


def loss(cache: Path, setting: Setting) -> float:
    """Train; return the loss on the whole validation text in nats a token."""
    folder, out = stores(cache), cache / "defaults" / "run"
    remove(out)
    width, layers, heads = SIZES[setting.size]
    model: dict[str, Any] = {"kind": setting.kind, "dim": width, "layers": layers}
    model |= {"heads": heads} if setting.kind == "decoder" else {"head_dim": 32}
    recipe = {
        "data": {"train": str(folder / "train"), "val": str(folder / "val"), "seed": setting.seed},
        "model": model,
        "optim": setting.optim,
        "run": {
            "steps": STEPS, "seed": setting.seed, "device": "cpu", "eval_every": 0,
            "eval_rows": 0, "checkpoint_every": 0, "best": False, "micro_tokens": 2048,
        },
    }  # fmt: skip
    found = tokmill.train(recipe, out, quiet=True).metrics["val_loss"]
    remove(out)
    return float(found)


def known(path: Path) -> dict[str, float]:
    """Return the losses of the runs that are done."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["key"]: line["loss"] for line in lines}


def table(kind: str, done: dict[str, float]) -> list[str]:
    """Return Markdown rows: a change of the base, and the mean loss and spread of each size."""
    changes = [{"lr": rate} for rate in RATES[kind]]
    changes += [dict(other) for other in OTHERS if kind == "decoder" or other is OTHERS[0]]
    lines = [f"| {kind} | " + " | ".join(SIZES) + " |", "|---|" + "---|" * len(SIZES)]
    for change in changes:
        cells = []
        for size in SIZES:
            keys = [Setting(kind, size, seed, BASE | change).key for seed in SEEDS]
            found = [done[key] for key in keys if key in done]
            cells.append(
                f"{statistics.mean(found):.4f} ± {(max(found) - min(found)) / 2:.4f} ({len(found)})"
                if found
                else ""
            )
        what = ", ".join(f"{key} {value}" for key, value in change.items())
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return lines


def main(cache: Path, kind: str = "decoder") -> list[str]:
    """Do what is missing; return the section's lines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = cache / "defaults" / "runs.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = known(path)
    for setting in settings(kind):
        if setting.key not in done:
            begun = time.process_time()
            done[setting.key] = loss(cache, setting)
            line = {"key": setting.key, "loss": done[setting.key]}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(
                f"{setting.key}: {done[setting.key]:.4f}, {time.process_time() - begun:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    torch.set_num_threads(threads)
    return [
        f"The demo's text, 2,048 ids, {STEPS} steps of 2,048 tokens, cosine; loss on its "
        "validation text in nats a token: mean ± half the range (seeds). "
        f"Base: {', '.join(f'{key} {value}' for key, value in BASE.items())}.",
        "",
        *table(kind, done),
    ]


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]), *sys.argv[2:])))
