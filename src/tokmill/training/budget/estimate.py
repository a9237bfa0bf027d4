"""What `--dry-run` reports of a training: shapes, sizes, work and memory."""

import time
from typing import Any

import numpy as np
import torch

from tokmill import plugins
from tokmill.feed.feed import Feed
from tokmill.feed.rows import Rows
from tokmill.models.model import Inputs
from tokmill.tasks.task import Task
from tokmill.training.budget.memory import (
    example_loss,
    judge,
    memory_of,
    parameter_count,
    step_bytes,
    whole_bytes,
)
from tokmill.training.data import (
    inputs_of_start,
    make_feed,
    micro_batches,
    open_stores,
    with_epochs,
)
from tokmill.training.engines.devices.device import Precision, moved, pick_device
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import make_task, task_type

SAMPLE = 1000
"""Rows of a store from which the share of padding is estimated."""
SAMPLE_STEPS = 8
"""Steps from which the share of positions that are computed is estimated."""
MOST_FLOPS = {"cpu": 2e11, "cuda": 1e14}
"""Operations of a pass that is measured: some seconds."""
SHARE = 0.1
"""Share of the memory that weights and gradients may take for that."""


def estimate(
    config: TrainConfig, processes: int = 1, local: int = 0, *, timed: bool = False
) -> dict[str, Any]:
    """Return the facts that `--dry-run` prints; weights are never made.

    `tensor_bytes`: of one process, for whole rows of one document (`memory.tensor_bytes`).
    `memory_bytes`: an estimate of all that the process takes, or of its GPU's memory.
    `memory_warning`: a text if that is much for the `local` processes of this machine (0: all).

    `timed`: measure how long a step takes (`pace`), with weights that are made for that;
    `seconds_per_step` is None where it is not measured, as without stores.
    """
    config = with_epochs(config, processes)
    kind = plugins.load(plugins.LOOPS, task_type(config).loop)
    stores = open_stores(config.data) if kind.reads_stores else []
    inputs = inputs_of_start(config, stores)
    with torch.device("meta"):
        task = make_task(config, inputs)
    environment = kind.check(config)
    feed = make_feed(config, task, stores, processes) if stores else None
    each = task.entry_rows(config.task)
    batch: int = kind.rows_a_step(config, processes)
    share = batch // processes
    micro = min(share, each * max(1, config.run.micro_tokens // (task.length * each)))
    a_step = batch * task.length
    flops = task.flops_per_token(task.length)
    tensors = step_bytes(config, inputs, micro, -(-share // micro))
    one, needed = whole_bytes(config, tensors, len(inputs.embedded), share, local or processes)
    pace: dict[str, Any] = {"seconds_per_step": None} if timed else {}
    # A step in an environment takes as long as the environment does.
    if timed and kind.reads_stores:
        seconds = seconds_a_step(config, inputs, micro, -(-share // micro), flops * task.length)
        part = computed(feed, task, config, processes) if seconds is not None and feed else 1.0
        pace["seconds_per_step"] = seconds and seconds * part
    return {
        "model": config.model.kind,
        "task": config.task.kind,
        "columns": inputs.embedded,
        "environment": dict(environment),
        "parameters": task.parameter_count(),
        "tensors": {name: list(tensor.shape) for name, tensor in task.named_parameters()},
        "batch": [batch, task.length],
        "micro_batch": [micro, task.length],
        "tokens_per_step": a_step,
        "steps": config.run.steps,
        "tokens": a_step * config.run.steps,
        "epochs": config.run.steps * feed.batch_size / max(1, feed.rows_in_all) if feed else 0.0,
        "store_tokens": sum(store.tokens for store in stores),
        "rows": sum(map(len, feed.sources)) if feed else 0,
        "rows_kind": getattr(config.task, "rows", ""),
        "overlays": list(config.data.overlays),
        "stores": stores_of(feed, config.data.weights) if feed else [],
        "flops_per_token": flops,
        "flops": flops * a_step * config.run.steps,
        **pace,
        "tensor_bytes": tensors,
        "memory_bytes": round(one),
        "memory_warning": judge(config, needed)[1],
    }


def computed(feed: Feed, task: Task, config: TrainConfig, processes: int) -> float:
    """Return the share of a step's positions that are left when padding is trimmed."""
    whole = left = 0
    for step in range(min(config.run.steps, SAMPLE_STEPS)):
        batch = task.prepare(feed.batch(step, 0, processes))
        whole += batch.document.size
        left += sum(part.document.size for part in micro_batches(batch, config.run.micro_tokens))
    return left / whole


def stores_of(feed: Feed, weights: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return each store's share of a training, and how much of its rows is padding."""
    parts = weights or [source.tokens for source in feed.sources]
    return [
        {
            "store": str(source.store.path),
            "tokens": source.store.tokens,
            "rows": len(source),
            "share": part / sum(parts),
            "padding": padding(source),
            "cut_records": getattr(source, "cut_records", 0),
            "cut_tokens": getattr(source, "cut_tokens", 0),
        }
        for source, part in zip(feed.sources, parts, strict=True)
    ]


def padding(source: Rows) -> float:
    """Return the share of positions that are padding, from a sample if there are many rows."""
    count = min(len(source), SAMPLE)
    sample = np.arange(count) * len(source) // count
    spans, sizes = source.spans(sample, 0), source.sizes(sample)
    rows = count if sizes is None else int(sizes.sum())
    return 1 - int((spans.stop - spans.start).sum()) / (rows * source.length)


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
