"""A store to evaluate on: every token once, or evenly spaced rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tokmill.feed.feed import Batch, Feed
from tokmill.store.store import Store
from tokmill.tasks.task import Task, to_tensors
from tokmill.train.config import TrainConfig
from tokmill.train.data import columns_to_read, open_store
from tokmill.train.engine import Engine
from tokmill.train.loader import micro_batches
from tokmill.train.run import Facts, check_store
from tokmill.train.sums import add, over_processes


@dataclass(frozen=True)
class Validation:
    """The feed of a store. `rows`: how many are taken, evenly spaced; 0: all of them."""

    feed: Feed
    rows: int
    bytes_per_token: float
    """Bytes of input a token, 0 where that is not known."""

    @property
    def size(self) -> int:
        """Number of rows that are taken."""
        available = len(self.feed.sources[0])
        return min(self.rows or available, available)

    def batches(self, task: Task, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield the prepared batches of one process; the last one may be smaller."""
        rows = (np.arange(self.size) * len(self.feed.sources[0]) // self.size)[rank::world]
        # A forward may be one of all processes: each does as many, of as many rows.
        most = -(-self.size // world)
        for start in range(0, most, self.feed.batch_size):
            stop = min(start + self.feed.batch_size, most)
            idle = stop - start - len(rows[start:stop])
            part = np.append(rows[start:stop], np.zeros(idle, np.int64))
            batch = task.prepare(self.feed.make(np.zeros_like(part), part))
            if idle:
                batch.targets = {name: ids.copy() for name, ids in batch.targets.items()}
                for ids in batch.targets.values():
                    ids[-idle:] = -1
            yield batch

    def measure(
        self, task: Task, engine: Engine, micro_tokens: int
    ) -> tuple[dict[str, float], int]:
        """Return (metrics, targets); each process takes its part of the rows."""
        sums: dict[str, Tensor] = {}
        count = 0
        for batch in self.batches(task, engine.rank, engine.world):
            count += task.count(batch)
            for part in micro_batches(batch, micro_tokens):
                add(sums, engine.evaluate(to_tensors(part, engine.device)))
        total = int(engine.total([count])[0])
        return task.report(over_processes(engine, sums), total, self.bytes_per_token), total


def open_validation(store: Store, facts: Facts, task: Task, *, batch: int, rows: int) -> Validation:
    """Open a store, whose ids must mean what the run's mean."""
    check_store(facts, store)
    columns = columns_to_read(task, [store], list(facts.columns))
    feed = Feed(task.evaluation_rows(store), batch, shuffle=False, columns=columns)
    return Validation(feed, rows, store.bytes_per_token() or 0.0)


def validation_of(config: TrainConfig, facts: Facts, task: Task) -> Validation | None:
    """Open the validation store of a recipe; None: it names none."""
    if not config.data.val:
        return None
    store = open_store(config.data.val, config.data)
    rows = config.run.eval_rows
    return open_validation(store, facts, task, batch=config.data.batch, rows=rows)
