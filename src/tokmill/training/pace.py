"""How long a step takes, measured before a training begins."""

from __future__ import annotations

import time

import torch

from tokmill.models.inputs import Inputs
from tokmill.training.engines.device import moved, pick_device
from tokmill.training.engines.precision import Precision
from tokmill.training.memory import example_loss
from tokmill.training.memory_budget import memory_of, parameter_count
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import make_task

MOST_FLOPS = {"cpu": 2e11, "cuda": 1e14}
"""Operations of a pass that is measured: some seconds."""
SHARE = 0.1
"""Of the memory, which weights and gradients may take for that."""


def seconds_a_step(
    config: TrainConfig, inputs: Inputs, rows: int, parts: int, flops: float
) -> float | None:
    """Return the seconds of forward and backward of a step in one process; None: not measured.

    A pass over a batch of zeros is measured, of as many rows as some seconds allow. It is not where
    one row or the weights are too large for that, or the device is not here. The optimiser's own
    time is not in it.

    Args:
        config: the recipe.
        inputs: what the model reads.
        rows: of a micro-batch.
        parts: micro-batches of a step in one process.
        flops: operations of a row, forward and backward.
    """
    device = pick_device(config.run.device)
    most = MOST_FLOPS.get(device.type, 0.0)
    memory = memory_of(config)[0]
    if flops > most or not memory or 8 * parameter_count(config, inputs) > SHARE * memory:
        return None
    tried = max(1, min(rows, int(most / flops)))
    task = make_task(config, inputs).to(device).train()
    batch = moved(task.example(tried), device)
    seconds = []
    for _ in range(3):  # The first pass also finds memory, and another program may use the machine.
        begun = time.perf_counter()
        with Precision(config.run.precision, device).autocast():
            loss, _sums = example_loss(task, batch)
        torch.autograd.backward(loss)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds) * rows * parts / tried
