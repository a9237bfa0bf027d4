"""A loop over the rows of stores, and a store to evaluate on."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.base.progress import Progress
from tokmill.feed.feed import Batch, Feed
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.overlay import leaves_out
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import Facts
from tokmill.training.data import (
    Loader,
    PartLoss,
    columns_to_read,
    cut_notes,
    entries_per_step,
    evened,
    make_feed,
    micro_batches,
    open_to_evaluate,
    to_micro,
)
from tokmill.training.engines.compared_step import results_of_all
from tokmill.training.engines.engine import Engine, add, most, on_first, over_processes
from tokmill.training.launch import place
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import check_store, check_vectors, task_type
from tokmill.training.session import Session

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
        return each * entries_per_step(config.data, config.task.length * each, world)

    @staticmethod
    def check(config: TrainConfig) -> Mapping[str, Any]:
        """Return nothing: a recipe names stores alone."""
        return {}

    @property
    def validated_on(self) -> str:
        """Return on what `measure` measures: a store, and the number of its rows; "": nothing."""
        if self.validation is None:
            return ""
        return f"{Store(self.config.data.val).fingerprint} {self.validation.size}"

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


AT_ONCE = 1 << 16
"""Entries whose tokens are counted at a time."""


@dataclass(frozen=True)
class Validation:
    """The feed of a store. `rows`: number of entries that are taken, evenly spaced; 0: all."""

    feed: Feed
    rows: int
    bytes_per_token: float
    """Bytes of input a token; 0: not known, as for tokens that a mask selects."""
    bar: Progress | None = None
    """Counts this process's entries."""

    @property
    def size(self) -> int:
        available = len(self.feed.sources[0])
        return min(self.rows or available, available)

    @property
    def tokens(self) -> int:
        rows, count = self.feed.sources[0], 0
        for start in range(0, self.size, AT_ONCE):
            entries = np.arange(start, min(start + AT_ONCE, self.size))
            spans = rows.spans(entries * len(rows) // self.size, 0)
            count += int((spans.stop - spans.start).sum())
        return count

    def numbers(self, rank: int = 0, world: int = 1) -> Iterator[Array]:
        """Yield the numbers of one process's entries (int64), a batch at a time.

        Every process gets equally many; -1 fills up a share that is too small. The last batch may
        be smaller.
        """
        entries = (np.arange(self.size) * len(self.feed.sources[0]) // self.size)[rank::world]
        share = -(-self.size // world)
        entries = np.append(entries, np.full(share - len(entries), -1))
        for start in range(0, share, self.feed.batch_size):
            yield entries[start : start + self.feed.batch_size]
            if self.bar:
                self.bar.advance(min(self.feed.batch_size, share - start))

    def shared_numbers(self, rank: int = 0, world: int = 1) -> Iterator[Array]:
        """Yield numbers as `numbers` does, of batches that do not depend on `world`.

        All processes share a batch; the first process gets its first entries.
        """
        entries = np.arange(self.size) * len(self.feed.sources[0]) // self.size
        for start in range(0, self.size, self.feed.batch_size):
            batch = entries[start : start + self.feed.batch_size]
            share = -(-len(batch) // world)
            padded = np.append(batch, np.full(share * world - len(batch), -1))
            yield padded[rank * share : (rank + 1) * share]
            if self.bar:
                self.bar.advance(share)

    def batches(self, task: Task, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        together = task.compares or task.collects
        for entries in (self.shared_numbers if together else self.numbers)(rank, world):
            batch = task.prepare(self.feed.make(np.zeros_like(entries), entries.clip(min=0)))
            idle = (entries < 0)[batch.entry]
            yield task.nothing(batch, idle) if idle.any() else batch

    def measure(
        self, task: Task, engine: Engine, micro_tokens: int, tables: bool = False
    ) -> tuple[dict[str, Any], int]:
        """Return (metrics, targets); each process takes its part of the entries.

        `tables`: also those of `Task.tables`.
        """
        sums: dict[str, Tensor] = {}
        kept: list[dict[str, Tensor]] = []
        count = 0
        for batch in self.batches(task, engine.rank, engine.world):
            count += task.count(batch)
            cut = micro_batches(batch, micro_tokens)
            parts = [to_micro(part, engine.device) for part in cut]
            # Processes may exchange data in a forward pass, so all must do equally many.
            tensors = [part.tensors for part in evened(task, parts, most(engine, len(parts)))]
            if task.compares or task.collects:
                kept.append(results_of_all(engine, tensors))
            if task.compares:
                add(sums, on_first(engine, compared(task, kept[-1])))
            else:
                for part in tensors:
                    add(sums, engine.evaluate(part))
        total = int(engine.total([count])[0])
        metrics = task.report(over_processes(engine, sums), total, self.bytes_per_token)
        if task.collects:
            results = joined(kept)
            metrics |= {**task.measure(results), **(task.tables(results) if tables else {})}
        return metrics, total


def compared(task: Task, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of a comparison of the entries of a batch (`Task.compare`)."""
    rest = dict(results)
    return task.compare(rest.pop("vectors"), rest)[1]


def joined(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the results of several batches as those of one; entries are renumbered."""
    ends = np.cumsum([0, *(int(one["entry"].max()) + 1 for one in batches)]).tolist()
    numbered = [
        {**one, "entry": one["entry"] + end} for one, end in zip(batches, ends[:-1], strict=True)
    ]
    return {name: torch.cat([one[name].cpu() for one in numbered]) for name in batches[0]}


def open_validation(store: Store, facts: Facts, task: Task, *, batch: int, rows: int) -> Validation:
    """Open a store, whose ids must mean what the run's mean."""
    check_store(facts, task.token_store(task.config, store))
    vectors = task.vectors(task.config, store)
    check_vectors(facts, vectors)
    columns = columns_to_read(task, [store])
    feed = Feed(
        task.evaluation_rows(store),
        batch,
        shuffle=False,
        columns=columns,
        vectors=[vectors],
    )
    # The bytes of whole documents are known, not those of some of their tokens; nor does a model
    # predict what a tokenizer loses.
    whole = task.predicts_first(store) and not leaves_out(store)
    bytes_ = store.bytes_per_token() or 0.0 if whole else 0.0
    if bytes_ and task.loses_text(store):
        bytes_ = 0.0
    validation = Validation(feed, rows, bytes_)
    check_targets(task, validation.batches(task), str(store.path))
    return validation


def check_targets(task: Task, batches: Iterable[Batch], where: str) -> None:
    """Refuse rows in which a task has nothing to predict: their loss would be 0."""
    if not any(task.count(batch) for batch in batches):
        raise TokmillError(
            f"the task {task.config.kind} has nothing to predict in the rows of the store",
            where=where,
            hint="a record of one token has no next token; missing labels, and a column `loss` of "
            "0, leave out more",
        )


def validation_of(config: TrainConfig, facts: Facts, task: Task) -> Validation | None:
    """Open the validation store of a recipe; None: it names none."""
    if not config.data.val:
        return None
    store = open_to_evaluate(config.data.val, config.data)
    rows = config.run.eval_rows
    return open_validation(store, facts, task, batch=config.data.batch, rows=rows)
