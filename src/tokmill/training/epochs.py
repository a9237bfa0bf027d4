"""The steps of a recipe that says how many epochs."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import torch

from tokmill import plugins
from tokmill.errors import UsageError
from tokmill.training.data import make_feed, open_stores
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import facts_from, inputs_of, make_task, task_type
from tokmill.training.runs.warm_start import start_facts


def with_epochs(config: TrainConfig, world: int = 1) -> TrainConfig:
    """Return a recipe whose `run.steps` are at most those of its epochs (`run.epochs`).

    An epoch is as many entries as the stores have; the last step may begin another one. `world`:
    processes that share a step. Raises `UsageError` for a task that learns from no store.
    """
    if not config.run.epochs:
        return config
    if not plugins.load(plugins.LOOPS, task_type(config).loop).reads_stores:
        raise UsageError(
            f"the task {config.task.kind} learns from no store, which an epoch could be of",
            where="run.epochs",
            hint="--set run.epochs=0 --steps N",
        )
    stores = open_stores(config.data)
    facts = facts_from(config, stores)
    if config.run.start:
        facts = start_facts(Path(config.run.start), facts)
    with torch.device("meta"):
        task = make_task(config, inputs_of(config, facts))
    feed = make_feed(config, task, stores, world)
    entries = config.run.epochs * feed.rows_in_all
    steps = max(1, math.ceil(entries / feed.batch_size - 1e-9))
    run = msgspec.structs.replace(config.run, steps=min(config.run.steps, steps))
    return msgspec.structs.replace(config, run=run)
