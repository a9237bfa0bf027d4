"""What a training reads: the stores of a recipe, and their rows as one feed."""

from __future__ import annotations

from collections.abc import Sequence

from tokmill.errors import TokmillError
from tokmill.feed.feed import Feed
from tokmill.store.store import Store
from tokmill.tasks.task import Task
from tokmill.train.config import DataConfig, TrainConfig


def open_store(path: str, config: DataConfig) -> Store:
    """Open a store for training; one that is not finished only where the recipe says so."""
    store = Store(path)
    if store.partial and not config.partial:
        raise TokmillError(
            "the store is not complete",
            where=path,
            hint="finish it with the same `tokmill build`, or train on what is there: --partial",
        )
    return store


def open_stores(config: DataConfig) -> list[Store]:
    """Open the stores to learn from, in the recipe's order."""
    return [open_store(path, config) for path in config.stores]


def make_feed(
    config: TrainConfig, task: Task, stores: Sequence[Store], columns: Sequence[str]
) -> Feed:
    """Return the batches of a training."""
    data = config.data
    return Feed(
        task.rows(stores[0], data.seed),
        data.batch,
        seed=data.seed,
        shuffle=data.shuffle,
        columns=columns,
    )
