"""A loop over the rows of stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokmill.base.errors import TokmillError
from tokmill.base.progress import Progress
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.store import Store
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import Facts
from tokmill.training.data import cut_notes, entries_a_step, make_feed
from tokmill.training.engines.engine import Engine
from tokmill.training.engines.reduce import most
from tokmill.training.launch import place
from tokmill.training.loader import Loader, evened
from tokmill.training.not_finite import PartLoss, not_finite
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import task_type
from tokmill.training.session import Session
from tokmill.training.validation import check_targets, validation_of

"""File of a run: the shards of its stores whose digests were right when they were read."""
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
            trim=not run.compile,  # each shape would be compiled for itself
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
            found = validation.measure(self.task, self.engine, self.config.run.micro_tokens)[0]
        return {**found, "rows": self.validation.size}
