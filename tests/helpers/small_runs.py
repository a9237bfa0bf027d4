"""A few real runs of a few steps: two learning rates and three seeds, and one more vocabulary."""

import json
import shutil
from pathlib import Path
from typing import Any

from toy import cycles, make_store, recipe

STEPS = 12
EVERY = 4


def make_runs(root: Path) -> Path:
    """Train and return a folder: stores in `lm` and `other`, runs of three seeds a setting."""
    import torch

    # Shapes are too small for two threads, which wait for each other where the machine is busy.
    torch.set_num_threads(1)
    for name, size in (("lm", 23), ("other", 31)):
        made = {"size": size, "vocabulary": name.encode()}
        make_store(root / name / "train", cycles(60, size=size), **made)
        make_store(root / name / "val", cycles(20, size=size, seed=1), **made)
    for rate in (0.01, 0.003):
        for seed in range(3):
            train(root / "lm", root / f"runs/lr-{rate}/seed-{seed}", seed, optim={"lr": rate})
    return root


def train(stores: Path, out: Path, seed: int = 0, **sections: dict[str, Any]) -> Path:
    """Train a run on the stores `train` and `val` of a folder, `sections` over the recipe."""
    import tokmill

    value = recipe(
        stores / "train",
        STEPS,
        data={"val": str(stores / "val"), "seed": seed},
        run={"seed": seed, "eval_every": EVERY},
    )
    for name, section in sections.items():
        value[name] = {**value[name], **section}
    return tokmill.train(value, out, quiet=True).path


def cut(run: Path, out: Path, step: int) -> Path:
    """Copy a run as a kill after a step leaves it, before its first checkpoint."""
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("model", "best", "step-*"))
    rewrite(out, lambda entry: entry if entry["step"] <= step else None)
    return out


def rewrite(run: Path, change: Any) -> None:
    """Put what a function makes of each line of a run's metrics in its place; None: drop it."""
    file = run / "metrics.jsonl"
    lines = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


def edit_recipe(run: Path, change: Any) -> None:
    """Change the resolved recipe of a run in place."""
    file = run / "recipe.json"
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))
