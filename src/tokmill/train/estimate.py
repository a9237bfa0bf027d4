"""What a training will be, without doing it: shapes, sizes, work and memory."""

from __future__ import annotations

from typing import Any

import torch

from tokmill.tasks.task import column_sizes
from tokmill.train.config import TrainConfig
from tokmill.train.data import open_stores
from tokmill.train.run import make_task


def estimate(config: TrainConfig) -> dict[str, Any]:
    """Return the facts that `--dry-run` prints; weights are never made.

    Memory is an estimate: weights, gradients and two moments in float32, and for one micro-batch
    the inputs and outputs of every matrix, a token each, as autograd keeps them.
    """
    store = open_stores(config.data)[0]
    columns = column_sizes(store)
    with torch.device("meta"):
        task = make_task(config, columns)
    rows = task.rows(store, config.data.seed)
    parameters = task.parameter_count()
    a_step = config.data.batch * task.length
    micro = min(config.data.batch, max(1, config.run.micro_tokens // task.length))
    matrices = [parameter for parameter in task.parameters() if parameter.ndim == 2]
    kept = sum(parameter.shape[0] + parameter.shape[1] for parameter in matrices)
    optimiser, activations = 16 * parameters, 4 * micro * task.length * kept
    flops = task.flops_per_token(task.length)
    return {
        "model": config.model.kind,
        "task": config.task.kind,
        "columns": columns,
        "parameters": parameters,
        "tensors": {name: list(tensor.shape) for name, tensor in task.named_parameters()},
        "batch": [config.data.batch, task.length],
        "micro_batch": [micro, task.length],
        "tokens_per_step": a_step,
        "steps": config.run.steps,
        "tokens": a_step * config.run.steps,
        "epochs": config.run.steps * config.data.batch / max(1, len(rows)),
        "store_tokens": store.tokens,
        "rows": len(rows),
        "flops_per_token": flops,
        "flops": flops * a_step * config.run.steps,
        "memory_bytes": optimiser + activations,
    }
