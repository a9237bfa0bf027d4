"""What a step of a run reads, computed from the plan of its feed: nothing has to be logged.

The rows of a step are a pure function of the step (`feed/feed.py`). Only the number of processes
is none, which the run keeps in `sessions.jsonl`: it decides where rows are, and not which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.feed.feed import Batch
from tokmill.feed.rows import Rows
from tokmill.store.schema import Array
from tokmill.store.store import Spans, Store
from tokmill.training.data import make_feed, micro_batches, open_stores
from tokmill.training.runs import run as runs
from tokmill.training.runs.trackers import read_metrics

PLACE, ROW = "(place)", "(row)"
"""Columns beside those of the store: each token's place in its row from 1, each row's number."""
SLOTS = 1 << 16
"""Rows that are searched at a time."""


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
    sessions.jsonl; without that `processes` is the number of processes of all steps, else 1.

    Raises:
        UsageError: the run learns from no store.
        TokmillError: a store is missing, or another one than the run began with.
    """

    def __init__(self, run: Path | str, processes: int = 0) -> None:
        self.path, self.processes = Path(run), processes
        self.config, _ = runs.read_run(self.path)
        kind = runs.task_type(self.config)
        loop = plugins.load(plugins.LOOPS, kind.loop)
        if not loop.reads_stores or not any(self.config.data.stores):
            raise UsageError(
                f"the run of the task {self.config.task.kind} has learned from no store here",
                where=str(self.path),
                hint="only rows of stores can be traced",
            )
        stores = open_stores(self.config.data)
        facts = runs.facts_of(self.path, self.config, stores)
        with torch.device("meta"):
            self.task = runs.make_task(self.config, runs.inputs_of(self.config, facts))
        self.feed = make_feed(self.config, self.task, stores)
        self.stores = [rows.store for rows in self.feed.sources]
        file = self.path / runs.SESSIONS
        self.sessions = read_metrics(file) if file.exists() else []
        self.steps = self.config.run.steps

    def processes_of(self, step: int) -> int:
        """Return how many processes do a step; a session repeats what was done after its start."""
        worlds = [int(one["processes"]) for one in self.sessions if one["step"] < step]
        return self.processes or (worlds[-1] if worlds else 1)

    def step(self, step: int) -> list[Seen]:
        """Return what the model reads in a step, by process, micro-batch, row and position."""
        if not 1 <= step <= self.steps:
            raise UsageError(
                f"there is no step {step}",
                where=str(self.path),
                hint=f"the run has the steps 1 to {self.steps:,}, counted as in its metrics",
            )
        world = self.processes_of(step)
        return [seen for rank in range(world) for seen in self._of_process(step - 1, rank, world)]

    def _of_process(self, step: int, rank: int, world: int) -> Iterator[Seen]:
        batch = self.feed.batch(step, rank, world)
        place = np.arange(1, batch.document.shape[1] + 1) * (batch.document >= 0)
        batch = dataclasses.replace(batch, columns={**batch.columns, PLACE: place})
        placed, prepared = self.task.placed(batch), self.task.prepare(batch)
        self._check_places(placed, prepared)
        spans, epoch, source = self._spans(step, rank, world)
        micro, row = np.zeros((2, len(batch)), np.int64)
        values = {**prepared.values, ROW: np.arange(len(batch))}
        prepared = dataclasses.replace(prepared, values=values)
        parts = micro_batches(prepared, self.config.run.micro_tokens)
        for number, part in enumerate(parts, 1):
            micro[part.values[ROW]], row[part.values[ROW]] = number, np.arange(len(part))
        # Tokens of the store by their number in the batch, and the spans that they are of.
        ends = np.cumsum(spans.stop - spans.start)
        before = np.concatenate([[0], ends])[np.searchsorted(spans.row, np.arange(len(batch)))]
        of, position = np.nonzero(placed.columns[PLACE])
        token = before[of] + placed.columns[PLACE][of, position] - 1
        span = np.searchsorted(ends, token, side="right")
        new = np.ones(len(of), bool)
        new[1:] = (np.diff(span) != 0) | (np.diff(token) != 1) | (np.diff(position) != 1)
        new[1:] |= np.diff(of) != 0
        first = np.flatnonzero(new)
        count = np.diff(first, append=len(of))
        of, position, token, span = (part[first] for part in (of, position, token, span))
        start = spans.stop[span] - (ends[span] - token)
        columns = (micro[of], row[of], position, epoch[of], source[of], spans.record[span], start)
        order = np.lexsort((position, row[of], micro[of]))
        listed = zip(*(part[order].tolist() for part in (*columns, start + count)), strict=True)
        for one, line, at, era, store, record, begin, end in listed:
            yield Seen(rank, one, line, at, era, self.stores[store], record, begin, end)

    def _check_places(self, placed: Batch, prepared: Batch) -> None:
        """Refuse a task that moves tokens and does not say where to (`Task.placed`)."""
        document, width = placed.document, prepared.document.shape[1]
        if not np.array_equal(document[:, :width] >= 0, prepared.document >= 0):
            raise TokmillError(
                f"the task {self.config.task.kind} moves the tokens of a row, and does not say "
                "where to: its steps cannot be traced",
                where=str(self.path),
                hint="a task of a plug-in says it in `placed`",
            )

    def _spans(self, step: int, rank: int, world: int) -> tuple[Spans, Array, Array]:
        """Return the spans of the rows of a batch, and the epoch and source of each row."""
        epoch, entry, source = self.feed.rows_of(step, rank, world)
        sizes = np.ones(len(entry), np.int64)
        groups = []
        for number, era in dict.fromkeys(zip(source.tolist(), epoch.tolist(), strict=True)):
            here = np.flatnonzero((source == number) & (epoch == era))
            rows = self.feed.sources[number]
            sizes[here] = rows_of_entries(rows, entry[here])
            groups.append((here, rows.spans(entry[here], era)))
        begins = np.cumsum(sizes) - sizes
        parts = []
        for here, spans in groups:
            own = np.concatenate([begins[one] + np.arange(sizes[one]) for one in here])
            parts.append([own[spans.row], spans.record, spans.document, spans.start, spans.stop])
        joined = np.concatenate(parts, axis=1)
        joined = joined[:, np.argsort(joined[0], kind="stable")]
        return Spans(*joined), np.repeat(epoch, sizes), np.repeat(source, sizes)

    def holding(self, records: Mapping[int, Array]) -> Iterator[Held]:
        """Yield where records are read, in the order of the steps.

        `records`: number of the store → its records, int64 in rising order. All rows of the run
        are looked at, without their tokens.
        """
        feed, slots = self.feed, self.steps * self.feed.batch_size
        for first in range(0, slots, SLOTS):
            found: list[tuple[int, Held]] = []
            for number, (slot, start) in enumerate(
                feed.mix.split(first, min(first + SLOTS, slots))
            ):
                if (wanted := records.get(number)) is None:
                    continue
                rows, order, done = feed.sources[number], feed.orders[number], 0
                for epoch, block, a, b in order.parts(start, start + len(slot)):
                    entry = order.block(epoch, block)[a:b]
                    of_row = np.repeat(np.arange(b - a), rows_of_entries(rows, entry))
                    spans = rows.spans(entry, epoch)
                    here = np.flatnonzero(
                        np.isin(spans.record, wanted) & (spans.stop > spans.start)
                    )
                    at = first + slot[done:][of_row[spans.row[here]]]
                    columns = (at, spans.record[here], spans.start[here], spans.stop[here])
                    for place, record, begin, end in zip(
                        *(c.tolist() for c in columns), strict=True
                    ):
                        step = place // feed.batch_size + 1
                        held = Held(step, epoch, self.stores[number], record, begin, end)
                        found.append((place, held))
                    done += b - a
            yield from (held for _, held in sorted(found, key=lambda one: one[0]))


def rows_of_entries(rows: Rows, entries: Array) -> Array:
    """Return how many rows each of some entries has."""
    sizes = rows.sizes(entries)
    return np.ones(len(entries), np.int64) if sizes is None else sizes
