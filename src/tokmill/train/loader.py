"""A thread that makes the next batches while the device works."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from tokmill.ahead import ahead as ahead_of
from tokmill.feed.feed import Batch, Feed
from tokmill.tasks.task import Task


class Loader:
    """The prepared batches of `steps`, for one process of `world`.

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
        ahead: int = 2,
    ) -> None:
        self._feed, self._task = feed, task
        self._steps, self._rank, self._world = steps, rank, world
        self._most = ahead

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

    def next(self) -> tuple[Batch, int]:
        """Return the next step's prepared batch and its count; errors of the thread come here."""
        return next(self._batches)

    def _make(self) -> Iterator[tuple[Batch, int]]:
        for step in self._steps:
            batch = self._task.prepare(self._feed.batch(step, self._rank, self._world))
            yield batch, self._task.count(batch)


def micro_batches(batch: Batch, tokens: int) -> Iterator[Batch]:
    """Cut a prepared batch into parts of at most so many tokens, one row at least."""
    rows = max(1, tokens // max(1, batch.document.shape[1]))
    for start in range(0, len(batch), rows):
        yield batch.rows(start, start + rows)
