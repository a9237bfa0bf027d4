"""Training RWKV-7 of 12 layers, 768 wide, on a GPU: tokens and operations a second, memory.

Model, task, precision and batch are those of recipes/x86/rwkv7-12x768.toml, in one process. Rows
are random ids of six streams with documents of unequal length, made before the clock starts: no
store is needed, and none is read.

    python benchmarks/gpu/train.py
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from device import cuda, describe

from tokmill.base.recipe import merge, read_toml
from tokmill.feed.feed import Batch
from tokmill.models.model_inputs import Inputs
from tokmill.models.rwkv import rwkv7
from tokmill.models.rwkv.wkv7 import HAS_FLA, Form, wkv7
from tokmill.tasks.task import to_tensors
from tokmill.training.engines.engine import make_engine
from tokmill.training.recipe.check_recipe import from_dict
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import make_task

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "x86" / "rwkv7-12x768.toml"
STREAMS = {"asm": 1200, "mne": 900, "type": 70, "reg": 190, "rw": 12, "eflag": 60}
"""About as many ids as the columns of a store of programs have."""
DOCUMENT, INSTRUCTION = 120, 3
"""Tokens of a document on average, and of each instruction."""


def rows(count: int, length: int) -> Batch:
    """Return rows of `length` + 1 tokens, as a feed gives them."""
    random = np.random.default_rng(0)
    shape = count, length + 1
    columns = {name: random.integers(5, size, shape) for name, size in STREAMS.items()}
    border = np.zeros(shape, np.uint8)
    border[:, ::INSTRUCTION] = 1
    begins = random.random(shape) < INSTRUCTION / DOCUMENT
    document = np.cumsum(begins & (border > 0), axis=1, dtype=np.int32)
    return Batch({**columns, "border": border}, document, np.zeros(count, np.uint64))


def measure(config: TrainConfig, form: Form, steps: int) -> str:
    """Return a Markdown row: whole steps with one form of the recurrence, after two others."""
    with make_engine(config.run, config.engine) as engine:
        task = make_task(config, Inputs(STREAMS))
        rwkv7.wkv7 = partial(wkv7, form=form)  # type: ignore[assignment]
        micro = config.run.micro_tokens // task.length
        parts = config.data.batch // micro
        batch = task.prepare(rows(micro, task.length))
        made = to_tensors(batch, engine.device)
        engine.prepare(task, config.optim)

        def step() -> None:
            for number in range(parts):
                engine.micro(made, number == parts - 1, 1 / (parts * task.count(batch)))
            engine.step(config.optim.lr)

        for _ in range(2):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        spent = time.perf_counter() - begun
        rate = steps * parts * micro * task.length / spent
        share = f"{task.flops_per_token(task.length) * rate / 1e12:.1f}"
        memory = torch.cuda.max_memory_allocated() / 2**30
    return f"| {form} | {rate:,.0f} | {share} | {memory:.1f} |"


def main(steps: int = 10) -> list[str]:
    """Measure; return Markdown."""
    cuda()
    options = {"run": {"device": "cuda", "engine": "single"}}
    config = from_dict(merge(read_toml(RECIPE), options), str(RECIPE))
    forms: tuple[Form, ...] = ("fla", "chunked") if HAS_FLA else ("chunked",)
    return [
        f"{describe()} {config.run.precision}, {steps} steps.",
        "",
        "| form | tokens/s | 10¹² operations/s | GiB |",
        "|---|---|---|---|",
        *(measure(config, form, steps) for form in forms),
    ]


if __name__ == "__main__":
    print("\n".join(main(*map(int, sys.argv[1:]))))
