"""What a step of a run reads, computed from the plan of its feed: nothing has to be logged.

The rows of a step are a pure function of the step (`feed/feed.py`). Only the number of processes
is none, which the run keeps in `sessions.jsonl`: it decides where rows are, and not which.
"""

import heapq
from collections.abc import Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.feed.feed import Batch, rows_per_process
from tokmill.feed.rows import Rows
from tokmill.store.gather import Spans
from tokmill.store.schema import Array, ranges
from tokmill.store.store import Store
from tokmill.training.data import make_feed, micro_batches, open_stores
from tokmill.training.runs import run as runs
from tokmill.training.runs.trackers import SESSIONS, read_metrics

PLACE, ROW = "(place)", "(row)"
"""Columns beside those of the store: each token's number in the step from 1, each row's number."""
MOST_PROCESSES = 1 << 20
LOOKED_AT = 8
"""Entries by which it is checked that the task says where it puts tokens."""


class Seen(NamedTuple):
    """Tokens `start` … `stop` - 1 of a record, and where the model saw them in a step.

    `process` counts from 0, `micro_batch` (within the process) from 1, `row` (within the
    micro-batch) and `position` (of the first of these tokens in the row) from 0. The task
    next_token only predicts the token at the last position, `task.length`.
    """

    process: int
    micro_batch: int
    row: int
    position: int
    epoch: int
    store: Store
    record: int
    start: int
    stop: int


class Held(NamedTuple):
    """Tokens `start` … `stop` - 1 of a record in a row of a step; the task may leave some out."""

    step: int
    epoch: int
    store: Store
    record: int
    start: int
    stop: int


class Trace:
    """The steps of a run, which count from 1 as in its metrics.

    The run needs its recipe and its facts (recipe.json, schema.json), its stores, unchanged, and
    sessions.jsonl; without that all steps are traced as those of one process.

    Raises:
        UsageError: the run learns from no store.
        TokmillError: a store is missing, or another one than the run began with.
    """

    def __init__(self, run: Path | str) -> None:
        self.path = Path(run)
        self.config, facts = runs.read_run(self.path)
        kind = runs.task_type(self.config)
        loop = plugins.load(plugins.LOOPS, kind.loop)
        if not loop.reads_stores or not any(self.config.data.stores):
            raise UsageError(
                f"the run of the task {self.config.task.kind} has learned from no store here",
                where=str(self.path),
                hint="only rows of stores can be traced",
            )
        stores = open_stores(self.config.data)
        runs.check_fingerprint(self.path, self.config, stores, facts)
        with torch.random.fork_rng([]), torch.device("meta"):
            self.task = runs.make_task(self.config, runs.inputs_of(self.config, facts))
        self.feed = make_feed(self.config, self.task, stores)
        self.stores = [rows.store for rows in self.feed.sources]
        self.sessions = read_sessions(self.path / SESSIONS)
        self.steps = self.config.run.steps
        self._check_places()

    def processes_of(self, step: int) -> int:
        """Return how many processes do a step; a session repeats what was done after its start."""
        worlds = [world for before, world in self.sessions if before < step]
        return worlds[-1] if worlds else 1

    def step(self, step: int) -> list[Seen]:
        """Return what the model reads in a step, by process, micro-batch, row and position."""
        if not 1 <= step <= self.steps:
            raise UsageError(
                f"there is no step {step}",
                where=str(self.path),
                hint=f"the run has the steps 1 to {self.steps:,}, counted as in its metrics",
            )
        epoch, entry, source = self.feed.rows_of(step - 1)
        spans, sizes = self._spans(epoch, entry, source)
        batch = self._batch(spans, sizes)
        if self.task.places_by_value:
            batch.columns.update(self.feed.batch(step - 1).columns)
        placed = self.task.placed(batch)
        process, micro, row = self._micro_batches(placed, sizes, self.processes_of(step))
        # A piece is of one span, and its tokens are neighbours in the store and in the row.
        ends = np.cumsum(spans.stop - spans.start)
        begins = np.zeros(int(ends[-1]), bool)
        begins[(ends - (spans.stop - spans.start))[spans.stop > spans.start]] = True
        at = np.flatnonzero(placed.columns[PLACE])
        token = placed.columns[PLACE].ravel()[at] - 1
        new = begins[token]
        new[:1] = True
        new[1:] |= (np.diff(token) != 1) | (np.diff(at) != 1)
        first = np.flatnonzero(new)
        lengths = np.diff(first, append=len(at))
        token, (of, position) = token[first], np.divmod(at[first], placed.document.shape[1])
        span = np.searchsorted(ends, token, side="right")
        start = spans.stop[span] - (ends[span] - token)
        era, number = np.repeat(epoch, sizes)[of], np.repeat(source, sizes)[of]
        columns = (process[of], micro[of], row[of], position, era, number, spans.record[span])
        order = np.lexsort((position, row[of], micro[of], process[of]))
        listed = (part[order].tolist() for part in (*columns, start, start + lengths))
        return [
            Seen(p, m, r, at, era, self.stores[number], *tokens)
            for p, m, r, at, era, number, *tokens in zip(*listed, strict=True)
        ]

    def _spans(self, epoch: Array, entry: Array, source: Array) -> tuple[Spans, Array]:
        sizes = np.ones(len(entry), np.int64)
        groups = []
        for number, era in dict.fromkeys(zip(source.tolist(), epoch.tolist(), strict=True)):
            here = np.flatnonzero((source == number) & (epoch == era))
            rows = self.feed.sources[number]
            sizes[here] = rows_of_entries(rows, entry[here])
            groups.append((here, rows.spans(entry[here], era)))
        begins, parts = np.cumsum(sizes) - sizes, []
        for here, spans in groups:
            own = ranges(begins[here], sizes[here])
            parts.append([own[spans.row], spans.record, spans.document, spans.start, spans.stop])
        joined = np.concatenate(parts, axis=1)
        return Spans(*joined[:, np.argsort(joined[0], kind="stable")]), sizes

    def _batch(self, spans: Spans, sizes: Array) -> Batch:
        """Return the rows of these spans with the column `PLACE` in place of tokens."""
        count, lengths = int(sizes.sum()), spans.stop - spans.start
        filled = np.bincount(spans.row, lengths, count).astype(np.int64)
        inside = np.arange(self.feed.length) < filled[:, None]
        place = np.zeros(inside.shape, np.int64)
        place[inside] = np.arange(1, int(lengths.sum()) + 1)
        document = np.full(inside.shape, -1, np.int32)
        document[inside] = np.repeat(spans.document, lengths)
        entry = np.repeat(np.arange(len(sizes)), sizes)
        return Batch({PLACE: place}, document, np.zeros(count, np.uint64), entry=entry)

    def _micro_batches(self, batch: Batch, sizes: Array, world: int) -> Array:
        """Return the process of each row, its micro-batch and its number there, (3, rows)."""
        ends = np.cumsum(np.append(0, sizes))[:: rows_per_process(len(sizes), world)].tolist()
        numbers = np.zeros((3, len(batch)), np.int64)
        document, values = batch.document[:, : self.task.length], {ROW: np.arange(len(batch))}
        whole = Batch({}, document, batch.key, values, entry=batch.entry)
        for process, (first, last) in enumerate(pairwise(ends)):
            own = whole.rows(slice(first, last))
            for micro, part in enumerate(micro_batches(own, self.config.run.micro_tokens), 1):
                rows = part.values[ROW]
                numbers[:, rows] = [[process] * len(rows), [micro] * len(rows), range(len(rows))]
        return numbers

    def _check_places(self) -> None:
        """Refuse a task that moves tokens and does not say where to (`Task.placed`)."""
        some = slice(0, LOOKED_AT)
        batch = self.feed.make(*(part[some] for part in self.feed.rows_of(0)))
        document, prepared = self.task.placed(batch).document, self.task.prepare(batch).document
        if not np.array_equal(document[:, : self.task.length] >= 0, prepared >= 0):
            raise TokmillError(
                f"the task {self.config.task.kind} moves the tokens of a row, and does not say "
                "where to: its steps cannot be traced",
                where=str(self.path),
                hint="a task of a plug-in says it in `placed`",
            )

    def holding(self, records: Mapping[int, Array]) -> Iterator[Held]:
        """Yield where records are read, in the order of the steps.

        `records`: number of the store → its records, int64.
        """
        parts = [self._holding(number, wanted) for number, wanted in records.items()]
        return (held for _, held in heapq.merge(*parts, key=lambda one: one[0]))

    def _holding(self, number: int, records: Array) -> Iterator[tuple[int, Held]]:
        """Yield slot and place of the records of one store, epoch after epoch."""
        mix, size = self.feed.mix, self.feed.batch_size
        rows, order, store = (
            self.feed.sources[number], self.feed.orders[number], self.stores[number]
        )  # fmt: skip
        for epoch in count() if len(records) else ():
            if mix.slots(number, [epoch * order.count])[0] >= self.steps * size:
                return
            entries = rows.holding(records, epoch)
            slots = np.asarray(mix.slots(number, order.numbers(epoch, entries).tolist()), np.int64)
            entries, slots = (part[slots < self.steps * size] for part in (entries, slots))
            spans = rows.spans(entries, epoch)
            slots = np.repeat(slots, rows_of_entries(rows, entries))[spans.row]
            here = np.flatnonzero(np.isin(spans.record, records) & (spans.stop > spans.start))
            here = here[np.argsort(slots[here], kind="stable")]
            parts = (part[here].tolist() for part in (slots, spans.record, spans.start, spans.stop))
            for slot, *tokens in zip(*parts, strict=True):
                yield slot, Held(slot // size + 1, epoch, store, *tokens)


def read_sessions(file: Path) -> list[tuple[int, int]]:
    """Return the steps that were done when each session of a run began, and its processes."""
    lines: list[dict[str, Any]] = [*read_metrics(file)] if file.exists() else []
    sessions: list[tuple[int, Any]] = [(line["step"], line.get("processes")) for line in lines]
    if not all(type(world) is int and 0 < world <= MOST_PROCESSES for _, world in sessions):
        raise TokmillError(
            "a line says no number of processes",
            where=str(file),
            hint="remove the line",
        )
    return sessions


def rows_of_entries(rows: Rows, entries: Array) -> Array:
    sizes = rows.sizes(entries)
    return np.ones(len(entries), np.int64) if sizes is None else sizes
