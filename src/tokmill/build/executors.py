"""Where shards are made: in this process, or in a pool of spawned ones that end with it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol

from tokmill.build.make import Task, TimeIsUp, Work, make_in_worker, start_worker
from tokmill.errors import MachineError
from tokmill.store.manifest import Receipt

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Executor(Protocol):
    """Makes shards and yields their receipts in whatever order they are done."""

    def map(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, list[Receipt]]]:
        """Make shards; taking a task from `tasks` is the promise to finish it."""
        ...


class Here:
    """One shard after the other in this process."""

    def __init__(self, work: Work, deadline: float | None = None) -> None:
        self.work, self.deadline = work, deadline

    def map(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, list[Receipt]]]:
        """Make shards in order."""
        start_worker(self.work)
        for number, task in enumerate(tasks):
            try:
                # The first is always finished: without a shard there is no rate to speak of.
                made = make_in_worker(task, self.deadline if number else None)
            except TimeIsUp:
                return
            yield task, made


class Pool:
    """Several spawned processes; they die when this one does, however it dies."""

    def __init__(self, work: Work, workers: int, deadline: float | None = None) -> None:
        self.work, self.workers, self.deadline = work, workers, deadline

    def map(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, list[Receipt]]]:
        """Make shards, one more than there are workers under way.

        At the deadline those under way are given up, if at least one is finished.
        """
        waiting = iter(tasks)
        pool = ProcessPoolExecutor(
            self.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(start_worker, self.work),
        )
        running: dict[Future[list[Receipt]], Task] = {}
        finished = 0
        try:
            while True:
                while len(running) < self.workers + 1:
                    task = next(waiting, None)
                    if task is None:
                        break
                    with _signals_wait():
                        running[pool.submit(make_in_worker, task)] = task
                if not running:
                    break
                left = None
                if self.deadline is not None and finished:
                    left = max(0.0, self.deadline - time.monotonic())
                done = wait(running, timeout=left, return_when=FIRST_COMPLETED).done
                if not done:
                    return
                for future in done:
                    task = running.pop(future)
                    finished += 1
                    yield task, future.result()
        except BrokenProcessPool:
            raise MachineError(
                "a worker process was killed",
                hint="most often memory ran out: try --preset memory or --memory 1GB; "
                "run the same command again and it continues",
            ) from None
        finally:
            # Whatever is finished is committed, and an idle worker has nothing to say goodbye to.
            _kill(pool)
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    # A process that is started inherits this, so that Ctrl-C finds none that is not ready for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(start: Callable[[Work], None], work: Work) -> None:
    # The terminal sends Ctrl-C to the whole group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.set_threshold(200_000, 50, 50)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start(work)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _kill(pool: ProcessPoolExecutor) -> None:
    # A writer that is killed leaves a private file, which the next build removes.
    for process in list((pool._processes or {}).values()):
        process.kill()
