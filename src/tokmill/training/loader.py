"""A thread that makes the next batches, as tensors, while the device works."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokmill.base.prefetch import prefetch
from tokmill.feed.feed import Batch, Feed
from tokmill.models.model import Tensors
from tokmill.store.schema import Array
from tokmill.tasks.task import Task, to_tensors

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
        self._batches = prefetch(self._make(), self._ahead)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._batches.close()

    def next(self) -> tuple[list[Micro], int]:
        """Return the next step's micro-batches and their count; errors of the thread come here."""
        return next(self._batches)

    def _make(self) -> Iterator[tuple[list[Micro], int]]:
        for step in self._steps:
            batch = self._task.prepare(self._feed.batch(step, self._rank, self._world))
            parts = micro_batches(batch, self._micro_tokens)
            yield [to_micro(part, self._device) for part in parts], self._task.count(batch)


def to_micro(part: Batch, device: torch.device) -> Micro:
    """Return what `micro_batches` yields as tensors for a device."""
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
    even = bool((lengths == length).all())
    if (batch.entry[1:] != batch.entry[:-1]).all():
        # Each row is an entry, as nearly always.
        order = np.argsort(-lengths, kind="stable")
        start = 0
        while start < len(batch):
            longest = int(lengths[order[start]])
            stop = start + max(1, tokens // max(1, longest))
            # A slice of rows in their order is a view.
            yield batch.rows(slice(start, stop) if even else order[start:stop], longest)
            start = stop
        return
    yield from _parts_of_entries(batch, lengths, tokens)


def _parts_of_entries(batch: Batch, lengths: Array, tokens: int) -> Iterator[Batch]:
    """Yield parts of a batch with entries of several rows; `lengths`: to which rows are cut."""
    # Rows that are in no entry (-1) may be parted.
    new = np.ones(len(batch), bool)
    new[1:] = (np.diff(batch.entry) != 0) | (batch.entry[1:] < 0)
    first = np.flatnonzero(new)
    sizes = np.diff(first, append=len(batch))
    longest = np.maximum.reduceat(lengths, first)
    order = np.argsort(-longest, kind="stable")
    rows_before = np.concatenate([[0], np.cumsum(sizes[order])])
    start = 0
    while start < len(order):
        width = int(longest[order[start]])
        most = rows_before[start] + tokens // max(1, width)
        stop = max(start + 1, int(np.searchsorted(rows_before, most, side="right")) - 1)
        here = order[start:stop]
        yield batch.rows(_rows_of(first[here], sizes[here]), width)
        start = stop


def _rows_of(first: Array, sizes: Array) -> Array:
    """Return the rows of entries, from the first row of each and their number."""
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows: Array = np.repeat(first, sizes) + within
    return rows


def evened(task: Task, parts: list[Micro], number: int) -> list[Micro]:
    """Return `number` micro-batches: those given, then some without targets (`Task.idle`).

    Processes may exchange data in each forward or backward pass, so all must do equally many.
    """
    lacking = number - len(parts)
    if not lacking:
        return parts
    return parts + [Micro(np.zeros(0, np.int64), task.idle(parts[0].tensors))] * lacking
