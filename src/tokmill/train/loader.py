"""A thread that makes the next batches, as tensors, while the device works."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch

from tokmill.ahead import ahead as ahead_of
from tokmill.feed.feed import Batch, Feed
from tokmill.models.model import Tensors
from tokmill.tasks.task import Task, to_tensors


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
        self._micro_tokens, self._device, self._most = micro_tokens, device, ahead

    def __enter__(self) -> Loader:
        self._batches = ahead_of(self._make(), self._most)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._batches.close()

    def next(self) -> tuple[list[Tensors], int]:
        """Return the next step's micro-batches and their count; errors of the thread come here.

        They are tensors in the memory of the CPU, pinned where the device is CUDA.
        """
        return next(self._batches)

    def _make(self) -> Iterator[tuple[list[Tensors], int]]:
        for step in self._steps:
            batch = self._task.prepare(self._feed.batch(step, self._rank, self._world))
            parts = micro_batches(batch, self._micro_tokens)
            yield [to_tensors(part, self._device) for part in parts], self._task.count(batch)


def micro_batches(batch: Batch, tokens: int) -> Iterator[Batch]:
    """Cut a prepared batch into parts of at most so many tokens, one row at least."""
    rows = max(1, tokens // max(1, batch.document.shape[1]))
    for start in range(0, len(batch), rows):
        yield batch.rows(start, start + rows)
