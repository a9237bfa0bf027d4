"""What a training reads: the stores of a recipe, their rows as one feed, batches ahead of time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.prefetch import prefetch
from tokmill.base.progress import human_count
from tokmill.feed.feed import Batch, Feed, nearest_sizes, rows_per_process
from tokmill.feed.rows import Rows
from tokmill.models.model import Inputs, Tensors
from tokmill.store.checks.background_check import same_engine
from tokmill.store.overlay import LOSS, check_mask_of, leaves_out, overlay_names
from tokmill.store.schema import Array, ranges
from tokmill.store.store import Store
from tokmill.tasks.task import Task, to_tensors
from tokmill.training.recipe.config import DataConfig, TrainConfig
from tokmill.training.runs.run import facts_from, inputs_of, make_task, task_type
from tokmill.training.runs.weights import start_facts


def open_store(path: str, config: DataConfig, overlays: Sequence[str] = ()) -> Store:
    """Open a store with some overlays; one that is not finished only where the recipe says so."""
    store = Store(path, overlays)
    hint = "finish it with the same `tokmill build`, or train on what is there: --partial"
    return store if config.partial else store.whole(hint)


def open_stores(config: DataConfig) -> list[Store]:
    """Open the stores to learn from, in the recipe's order."""
    stores = [open_store(path, config, config.overlays) for path in config.stores]
    same_engine(stores)
    parts = [part for one in stores for part in (one, *one.overlays.values())]
    if remote := [(one.remote, one.shards) for one in parts if one.remote is not None]:
        from tokmill.store.remote_store import check_space

        check_space(remote, config.shards)
    return stores


def open_to_evaluate(path: str, config: DataConfig) -> Store:
    overlays = overlay_names(Store(path).path)
    return open_store(path, config, [name for name in config.overlays if name in overlays])


def overlay_notes(store: Store, config: DataConfig) -> list[str]:
    """Return notes on the overlays of a store to evaluate on, and on the tokens they leave out."""
    notes = [
        f"the store has no overlay {name!r}, with which the run has learned"
        for name in config.overlays
        if name not in store.overlays
    ]
    several = "s" if len(store.overlays) > 1 else ""
    read = f"read with the overlay{several} {', '.join(store.overlays)}" if store.overlays else ""
    left_out = ""
    if leaves_out(store):
        left_out = f"tokens whose {LOSS!r} is 0 are left out"
        if "bytes" in store.schema:
            left_out += ", so there are no bits_per_byte: the bytes of the rest are not known"
    if read or left_out:
        notes.append(": ".join(filter(None, (read, left_out))))
    return notes


def cut_notes(rows: Rows) -> list[str]:
    """Return a note on records that are longer than the rows, and so are not read whole."""
    records, tokens = (int(getattr(rows, name, 0)) for name in ("cut_records", "cut_tokens"))
    if not records:
        return []
    what = f"{human_count(tokens, 'token')} of {human_count(records, 'record')}"
    return [f"{rows.store.path}: {what} are in no row: a longer task.length reads more"]


def make_feed(
    config: TrainConfig,
    task: Task,
    stores: Sequence[Store],
    world: int = 1,
) -> Feed:
    data = config.data
    return Feed(
        [task.rows(store, data.seed, data.shards) for store in stores],
        entries_per_step(data, task.length * task.entry_rows(config.task), world),
        weights=data.weights,
        seed=data.seed,
        shuffle=data.shuffle,
        columns=columns_to_read(task, stores),
        vectors=[task.vectors(config.task, store) for store in stores],
    )


def columns_to_read(task: Task, stores: Sequence[Store]) -> list[str]:
    """Return the model's columns, and those that the task wants to see in any of the stores.

    Raises `TokmillError` for a column `loss` that is no mask, or masks every token of a store.
    """
    extra: list[str] = []
    for store in stores:
        wanted = task.extra_columns({**task.token_store(task.config, store).schema, **store.schema})
        if LOSS in wanted:
            check_mask_of(store)
        extra += wanted
    return list(dict.fromkeys([*task.sizes, *extra]))


def entries_per_step(data: DataConfig, length: int, world: int = 1) -> int:
    """Return the entries of a step over all processes, from `data.batch` or `data.batch_tokens`.

    An entry is a row, unless the task says otherwise. `length`: positions of an entry. Raises
    `UsageError` with the nearest possible sizes if `world` processes cannot get equal numbers of
    whole entries.
    """
    if not data.batch_tokens:
        rows_per_process(data.batch, world)
        return data.batch
    if data.batch_tokens % (length * world):
        each = f" for each of {world} processes" if world > 1 else ""
        raise UsageError(
            f"{data.batch_tokens} tokens per step cannot be split into whole rows of {length} "
            f"positions{each}",
            where="data.batch_tokens",
            hint=nearest_sizes(data.batch_tokens, length * world),
        )
    return data.batch_tokens // length


def inputs_of_start(config: TrainConfig, stores: Sequence[Store]) -> Inputs:
    """Return the inputs of the model of a run before it begins, also of one with a start."""
    facts = facts_from(config, stores)
    if config.run.start:
        facts = start_facts(Path(config.run.start), facts)
    return inputs_of(config, facts)


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
    with torch.device("meta"):
        task = make_task(config, inputs_of_start(config, stores))
    feed = make_feed(config, task, stores, world)
    entries = config.run.epochs * feed.rows_in_all
    steps = max(1, math.ceil(entries / feed.batch_size - 1e-9))
    run = msgspec.structs.replace(config.run, steps=min(config.run.steps, steps))
    return msgspec.structs.replace(config, run=run)


STEP = 16
"""Rows are trimmed to a multiple of this length: there are few shapes, so few kernels are made."""
PartLoss = tuple[Array, Tensor]
"""The entry of each row of a micro-batch (a number within the process's share); its summed loss."""


class Micro(NamedTuple):
    """A micro-batch, in the memory of the CPU; pinned where the device is CUDA."""

    entries: Array
    """int64: the number of each row's entry; empty in a micro-batch without targets (`evened`)."""
    tensors: Tensors


class Loader:
    """The prepared batches of `steps`, for one process of `world`, cut into micro-batches.

    A batch is a pure function of the step, so there is nothing to save: a resumed run starts a
    loader at its step. Use it in a `with` block, which ends the thread.
    """

    def __init__(
        self,
        feed: Feed,
        task: Task,
        steps: range,
        rank: int = 0,
        world: int = 1,
        *,
        micro_tokens: int,
        device: torch.device,
        ahead: int = 2,
    ) -> None:
        self._feed, self._task = feed, task
        self._steps, self._rank, self._world = steps, rank, world
        self._micro_tokens, self._device, self._ahead = micro_tokens, device, ahead

    def __enter__(self) -> Loader:
        self._ended, self._at = Event(), self._steps.start
        if any(store.remote is not None for store in self._feed.stores):
            Thread(target=self._fetch_ahead, name="tokmill-fetch", daemon=True).start()
        self._batches = prefetch(self._make(), self._ahead)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._batches.close()

    def _fetch_ahead(self) -> None:
        """Fetch the shards of stores at addresses in the order in which the steps need them.

        With a limit of the cache, as far ahead as a third of it has room for. An error is left to
        who needs the shard.
        """
        from tokmill.store.remote_store import cache_limit

        most, last = cache_limit() // 3 or math.inf, dict[tuple[Store, int], int]()
        total = sum(len(store.shards) for store in self._feed.stores)
        for step in self._steps:
            for store, number in self._feed.shards_of(step, self._rank, self._world):
                if store.remote is not None:
                    with suppress(TokmillError):
                        store.remote.file(store.shards[number])
                last[store, number] = step
            while sum(
                s.shards[n].bytes for (s, n), at in last.items() if at > self._at
            ) > most and not self._ended.wait(0.1):
                pass
            if self._ended.is_set() or (len(last) == total and most == math.inf):
                return

    def next(self) -> tuple[list[Micro], int]:
        """Return the next step's micro-batches and their count; errors of the thread come here."""
        return next(self._batches)

    def _make(self) -> Iterator[tuple[list[Micro], int]]:
        for step in self._steps:
            self._at = step
            batch = self._task.prepare(self._feed.batch(step, self._rank, self._world))
            parts = micro_batches(batch, self._micro_tokens)
            yield [to_micro(part, self._device) for part in parts], self._task.count(batch)


def to_micro(part: Batch, device: torch.device) -> Micro:
    return Micro(part.entry, to_tensors(part, device))


def micro_batches(batch: Batch, tokens: int) -> Iterator[Batch]:
    """Cut a prepared batch into parts of at most `tokens` positions.

    A part has whole entries, at least one. Entries are ordered by their longest row, the longest
    first, and a part is as long as its longest row without padding, rounded up to a multiple of
    `STEP`: so little padding is computed.
    """
    length = batch.document.shape[1]
    lengths = np.full(len(batch), length)
    if (batch.document[:, -1] < 0).any():
        filled = np.count_nonzero(batch.document >= 0, axis=1).clip(min=1)
        lengths = np.minimum(-(-filled // STEP) * STEP, length)
    # Rows that are in no entry (-1) may be parted.
    new = np.ones(len(batch), bool)
    new[1:] = (np.diff(batch.entry) != 0) | (batch.entry[1:] < 0)
    first = np.flatnonzero(new)
    sizes = np.diff(first, append=len(batch))
    longest = np.maximum.reduceat(lengths, first)
    order = np.argsort(-longest, kind="stable")
    rows_before = np.concatenate([[0], np.cumsum(sizes[order])])
    # A slice of rows in their order is a view.
    as_they_are = len(first) == len(batch) and bool((lengths == length).all())
    start = 0
    while start < len(order):
        width = int(longest[order[start]])
        most = rows_before[start] + tokens // max(1, width)
        stop = max(start + 1, int(np.searchsorted(rows_before, most, side="right")) - 1)
        here = order[start:stop]
        rows = slice(start, stop) if as_they_are else ranges(first[here], sizes[here])
        yield batch.rows(rows, width)
        start = stop


def evened(task: Task, parts: list[Micro], number: int) -> list[Micro]:
    """Return `number` micro-batches: those given, then some without targets (`Task.idle`).

    Processes may exchange data in each forward or backward pass, so all must do equally many.
    """
    lacking = number - len(parts)
    if not lacking:
        return parts
    return parts + [Micro(np.zeros(0, np.int64), task.idle(parts[0].tensors))] * lacking
