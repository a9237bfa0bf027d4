"""A store to evaluate on: every token once, or evenly spaced rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from tokmill.feed.feed import Batch, Feed
from tokmill.store.mask import leaves_out
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.tasks.inputs import Facts
from tokmill.tasks.task import Task
from tokmill.training.data import columns_to_read, open_to_evaluate
from tokmill.training.engines.engine import Engine
from tokmill.training.engines.reduce import add, most, over_processes
from tokmill.training.loader import evened, micro_batches, to_micro
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import check_store


@dataclass(frozen=True)
class Validation:
    """The feed of a store. `rows`: how many are taken, evenly spaced; 0: all of them."""

    feed: Feed
    rows: int
    bytes_per_token: float
    """Bytes of input a token; 0 where that is not known, as of tokens that a mask chose."""
    trim: bool = True
    """Whether rows are trimmed to what stands in them (`micro_batches`)."""

    @property
    def size(self) -> int:
        """Number of rows that are taken."""
        available = len(self.feed.sources[0])
        return min(self.rows or available, available)

    def numbers(self, rank: int = 0, world: int = 1) -> Iterator[Array]:
        """Yield the rows of one process (int64), a batch at a time, the last one may be smaller.

        Each process gets as many; where rows are too few, -1 stands for one that teaches nothing.
        """
        rows = (np.arange(self.size) * len(self.feed.sources[0]) // self.size)[rank::world]
        share = -(-self.size // world)
        rows = np.append(rows, np.full(share - len(rows), -1))
        for start in range(0, share, self.feed.batch_size):
            yield rows[start : start + self.feed.batch_size]

    def batches(self, task: Task, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield the prepared batches of one process."""
        for rows in self.numbers(rank, world):
            batch = task.prepare(self.feed.make(np.zeros_like(rows), rows.clip(min=0)))
            idle = rows < 0
            yield task.nothing(batch, idle) if idle.any() else batch

    def measure(
        self, task: Task, engine: Engine, micro_tokens: int
    ) -> tuple[dict[str, float], int]:
        """Return (metrics, targets); each process takes its part of the rows."""
        sums: dict[str, Tensor] = {}
        count = 0
        for batch in self.batches(task, engine.rank, engine.world):
            count += task.count(batch)
            cut = micro_batches(batch, micro_tokens, trim=self.trim)
            parts = [to_micro(part, engine.device) for part in cut]
            # A forward may be one of all processes: each does as many.
            for part in evened(task, parts, most(engine, len(parts))):
                add(sums, engine.evaluate(part.tensors))
        total = int(engine.total([count])[0])
        return task.report(over_processes(engine, sums), total, self.bytes_per_token), total


def open_validation(
    store: Store, facts: Facts, task: Task, *, batch: int, rows: int, extra: Sequence[str] = ()
) -> Validation:
    """Open a store, whose ids must mean what the run's mean; `extra`: columns to read besides."""
    check_store(facts, store)
    columns = columns_to_read(task, [store], extra)
    feed = Feed(task.evaluation_rows(store), batch, shuffle=False, columns=columns)
    # Bytes are known of whole documents, not of the tokens in them that a mask leaves.
    bytes_ = 0.0 if leaves_out(store) else store.bytes_per_token() or 0.0
    return Validation(feed, rows, bytes_)


def validation_of(config: TrainConfig, facts: Facts, task: Task) -> Validation | None:
    """Open the validation store of a recipe; None: it names none."""
    if not config.data.val:
        return None
    store = open_to_evaluate(config.data.val, config.data)
    rows = config.run.eval_rows
    found = open_validation(store, facts, task, batch=config.data.batch, rows=rows)
    return replace(found, trim=not config.run.compile)
