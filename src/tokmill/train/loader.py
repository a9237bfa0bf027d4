"""A thread that makes the next batches while the device works."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType

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
        self._queue: queue.Queue[tuple[Batch, int] | BaseException] = queue.Queue(ahead)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tokmill-loader", daemon=True)

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join()

    def next(self) -> tuple[Batch, int]:
        """Return the next step's prepared batch and its count; errors of the thread come here."""
        result = self._queue.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _work(self) -> None:
        try:
            for step in self._steps:
                batch = self._task.prepare(self._feed.batch(step, self._rank, self._world))
                if not self._put((batch, self._task.count(batch))):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, result: tuple[Batch, int] | BaseException) -> bool:
        while not self._ended.is_set():
            try:
                self._queue.put(result, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def micro_batches(batch: Batch, tokens: int) -> Iterator[Batch]:
    """Cut a prepared batch into parts of at most so many tokens, one row at least."""
    rows = max(1, tokens // max(1, batch.document.shape[1]))
    for start in range(0, len(batch), rows):
        yield batch.rows(start, start + rows)
