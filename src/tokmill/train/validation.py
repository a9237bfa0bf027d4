"""The validation store as batches: every token once, or evenly spaced rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tokmill.feed.feed import Batch, Feed
from tokmill.tasks.task import Task
from tokmill.train.config import TrainConfig
from tokmill.train.data import open_store
from tokmill.train.run import Facts, check_store


@dataclass(frozen=True)
class Validation:
    """The feed of a validation store. `rows`: how many are taken, 0: all of them."""

    feed: Feed
    rows: int
    bytes_per_token: float
    """Bytes of input a token, 0 where that is not known."""

    def batches(self, task: Task, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield the prepared batches of one process; the last one may be smaller."""
        available = len(self.feed.row_source)
        size = min(self.rows or available, available)
        rows = (np.arange(size) * available // size)[rank::world]
        for start in range(0, len(rows), self.feed.batch_size):
            part = rows[start : start + self.feed.batch_size]
            yield task.prepare(self.feed.make(np.zeros_like(part), part))


def open_validation(config: TrainConfig, facts: Facts, task: Task) -> Validation | None:
    """Open the validation store, whose ids must mean what the run's mean; None: there is none."""
    if not config.data.val:
        return None
    store = open_store(config.data.val, config.data)
    check_store(facts, store)
    feed = Feed(
        task.evaluation_rows(store), config.data.batch, shuffle=False, columns=list(facts.columns)
    )
    return Validation(feed, config.run.eval_rows, store.bytes_per_token() or 0.0)
