"""A loop over the rows of stores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.progress import Progress
from tokmill.feed.feed import Feed
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.store import Store
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import Facts
from tokmill.training.data import Loader, PartLoss, cut_notes, entries_a_step, evened, make_feed
from tokmill.training.engines.engine import Engine, most
from tokmill.training.launch import place
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import task_type
from tokmill.training.session import Session
from tokmill.training.validation import check_targets, validation_of

LOOKED_AT = 64
"""Steps of which one must have something to predict before a run begins."""


class RowLoop:
    """The rows of stores, in batches that are a pure function of the step."""

    reads_stores = True
    unit = "tokens"
    environment: Mapping[str, Any] = {}

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        stores: Sequence[Store],
        facts: Facts,
        engine: Engine,
        out: Path,
    ) -> None:
        self.config, self.task, self.engine, self.out = config, task, engine, out
        self.feed = make_feed(config, task, stores, engine.world)
        self.notes = [note for rows in self.feed.sources for note in cut_notes(rows)]
        first = map(self.feed.batch, range(min(len(self.feed), LOOKED_AT)))
        check_targets(task, map(task.prepare, first), ", ".join(config.data.stores))
        self.validation = validation_of(config, facts, task)
        self.evaluates = self.validation is not None
        feeds = [self.feed, *([self.validation.feed] if self.validation else [])]
        read = [*stores, *(store for feed in feeds for store in feed.stores)]
        self.read = list({store.path: store for store in read}.values())

    @staticmethod
    def rows_a_step(config: TrainConfig, world: int) -> int:
        each = task_type(config).entry_rows(config.task)
        return each * entries_a_step(config.data, config.task.length * each, world)

    @staticmethod
    def check(config: TrainConfig) -> Mapping[str, Any]:
        """Return nothing: a recipe names stores alone."""
        return {}

    @contextmanager
    def steps(self, steps: range) -> Iterator[None]:
        """Make batches ahead, and meanwhile compare the stores with their digests."""
        run, engine = self.config.run, self.engine
        # One process of each machine is enough.
        watched = self.read if self.config.data.verify and place().local_rank == 0 else []
        self.loader = Loader(
            self.feed,
            self.task,
            steps,
            engine.rank,
            engine.world,
            micro_tokens=run.micro_tokens,
            device=engine.device,
            ahead=run.prefetch,
        )
        with ShardCheck(watched) as self.shards:
            with self.loader:
                yield
            self.shards.finish()

    def next(self) -> tuple[float, float]:
        self.parts, count = self.loader.next()
        self.shards.tell()
        read = sum(int((part.tensors.document >= 0).sum()) for part in self.parts)
        return count, read

    def learn(self, session: Session, total: int) -> tuple[dict[str, float], int]:
        parts = evened(self.task, self.parts, most(self.engine, len(self.parts)))
        return session.update(parts, total), total

    def not_finite(self, step: int, norm: float, losses: Sequence[PartLoss]) -> TokmillError:
        where = str(self.out)
        return not_finite(self.feed, self.task, self.engine, step, norm, losses, where)

    def measure(self, quiet: bool) -> dict[str, float]:
        """Measure the weights on the validation store."""
        assert self.validation is not None
        with Progress("validation", self.validation.size, unit="rows", quiet=quiet) as bar:
            validation = replace(self.validation, bar=bar)
            metrics = validation.measure(self.task, self.engine, self.config.run.micro_tokens)[0]
        return {**metrics, "rows": self.validation.size}


def not_finite(
    feed: Feed,
    task: Task,
    engine: Engine,
    step: int,
    norm: float,
    losses: Sequence[PartLoss],
    where: str,
) -> TokmillError:
    """Return the error of a step whose loss or gradient is not finite; every process calls this.

    It names the micro-batches whose loss is not finite, with their rows. If all losses are finite,
    it names all rows, and the weights whose gradients are not finite. `step`: the number of steps
    that are done; metrics and the message count from 1. `losses`: of this process.
    """
    # The first process reports, so it needs the results of all: for each row the number of its
    # micro-batch, if the loss of that is not finite.
    flags = np.zeros((engine.world, feed.batch_size // engine.world))
    for number, (entries, loss) in enumerate(losses, 1):
        if not math.isfinite(loss.item()):
            flags[engine.rank, entries] = number
    flags = np.asarray(engine.total(flags.ravel().tolist())).reshape(flags.shape).astype(np.int64)
    named = []
    for rank, flag in enumerate(flags):
        rows_of_all = feed.rows_of(step, rank, engine.world)
        for part in np.unique(flag[flag > 0]).tolist():
            process = f"process {rank}, " if engine.world > 1 else ""
            which = f"micro-batch {part} of {len(losses)}, " if len(losses) > 1 else ""
            some = feed.describe(*(values[flag == part] for values in rows_of_all))
            named.append(process + which + some)
    what = "the loss is not finite"
    if not named:
        names = engine.bad_gradients()
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        through = f", through that of {names[0]}{more}" if names else ""
        what = f"every loss is finite, but the gradient's norm is {norm}{through}"
        named = [feed.describe(*feed.rows_of(step))]
    return TokmillError(
        f"step {step + 1}: {what} ({'; '.join(named[:4])}{'; …' if len(named) > 4 else ''})",
        where=where,
        hint="a checkpoint holds the weights from before this step; a smaller optim.lr or a longer "
        "optim.warmup helps most often: in a new run, which may begin --from this one",
    )
