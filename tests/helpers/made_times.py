"""Measurements of schedules without running them: a formula of the actions, and some noise."""

import os
from pathlib import Path
from typing import Any

from tokmill.mlir.loops import schedule as schedules
from tokmill.mlir.measure import Measurements, Result

SMALL = {
    "lstm": {"hidden_size": 16, "lstm_size": 16},
    "distilbert": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1},
    "loop_transformer": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1},
}
"""Embedding → sizes that train in seconds. A new line of `plugins.EMBEDDINGS` needs one here."""
LINES = ("matmul 64 64 64", "add 64 512")


def noise() -> float:
    """Return a share of at most 1 %."""
    return os.urandom(1)[0] / 25600


def made(self: Measurements, module: Any, schedule: str, *more: Any) -> Result:
    """8 as a tile is good, a vector is better; an im2col is refused. The noise never repeats."""
    gain = 1.0
    for action in schedules.read(schedule, "made"):
        if isinstance(action, schedules.Im2col | schedules.Pack):
            return Result(status="refused", reason="for the test")
        if isinstance(action, schedules.Vectorize):
            gain *= 4
        elif isinstance(action, schedules.Tile | schedules.Parallel):
            gain *= 1.3 ** sum(1 if size == 8 else -0.5 * (size > 0) for size in action.sizes)
    gain *= 1 + noise()
    return Result(status="ok", nanoseconds=1e6 / gain, baseline=1e6, noise=0.0, error=0, allowed=1)


def recipe(cache: Path, model_type: str = "lstm", **run: Any) -> dict[str, Any]:
    """A small training that takes seconds."""
    return {
        "model": {
            "kind": "policy",
            "hidden": 32,
            "model_type": model_type,
            "model_config": {kind: dict(sizes) for kind, sizes in SMALL.items()},
        },
        "task": {
            "kind": "schedules", "modules": list(LINES), "held_out": ["matmul 32 64 64"],
            "bench_count": 8, "ppo_batch_size": 16, "entropy_coef": 0.01, "cache": str(cache),
            "imitation_coef": 0.3, "redraws": 4,
        },
        "optim": {"lr": 3e-3, "warmup": 0, "schedule": "constant", "weight_decay": 0.0},
        "run": {
            "steps": 6, "device": "cpu", "eval_every": 3, "log_every": 1, "checkpoint_every": 0,
            **run,
        },
    }  # fmt: skip
