"""Where shards are made: in this process, or in a pool of spawned ones that end with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol

from tokmill.build.make import Task, Work, make_in_worker, start_worker
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

    def __init__(self, work: Work) -> None:
        self.work = work

    def map(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, list[Receipt]]]:
        """Make shards in order."""
        start_worker(self.work)
        for task in tasks:
            yield task, make_in_worker(task)


class Pool:
    """Several spawned processes; they die when this one does, however it dies."""

    def __init__(self, work: Work, workers: int) -> None:
        self.work, self.workers = work, workers

    def map(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, list[Receipt]]]:
        """Make shards; at most two a worker are under way, so that a time limit holds."""
        waiting = iter(tasks)
        pool = ProcessPoolExecutor(
            self.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(start_worker, self.work),
        )
        running: dict[Future[list[Receipt]], Task] = {}
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
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    task = running.pop(future)
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
