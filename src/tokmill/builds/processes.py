"""A function applied to many things in spawned processes that end with this one."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tokmill.errors import MachineError

T = TypeVar("T")
R = TypeVar("R")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 10.0
"""Seconds after the deadline that a first result is waited for."""
EVERY = 1.0
"""Seconds between two looks at what goes on."""


def in_processes(
    function: Callable[[T], R],
    tasks: Iterable[T],
    workers: int,
    *,
    hint: str,
    start: Callable[[Any], None] | None = None,
    argument: Any = None,
    deadline: float | None = None,
    patience: float = PATIENCE,
    tick: Callable[[], None] | None = None,
) -> Iterator[tuple[T, R]]:
    """Yield each task and what `function` makes of it, in whatever order they are done.

    One more task than there are workers is under way; taking one from `tasks` is the promise to
    finish it. `start` prepares a process with `argument`. At `deadline` (monotonic seconds) tasks
    under way are given up, `patience` seconds later where none is finished. `tick` is called once a
    second. Processes die when this one does, however it dies. A worker that is killed is a
    `MachineError` with `hint`.
    """
    waiting = iter(tasks)
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(start, argument),
    )
    running: dict[Future[R], T] = {}
    finished = 0
    try:
        while True:
            while len(running) < workers + 1:
                try:
                    task = next(waiting)
                except StopIteration:
                    break
                with _signals_wait():
                    running[pool.submit(function, task)] = task
            if not running:
                break
            left = math.inf
            if deadline is not None:
                # Processes that have only begun get some time to have one result at all.
                until = deadline if finished else deadline + patience
                left = max(0.0, until - time.monotonic())
            pause = min(left, EVERY)
            done = wait(running, timeout=pause, return_when=FIRST_COMPLETED).done
            if tick is not None:
                tick()
            if not done and left <= pause:
                return
            for future in done:
                task = running.pop(future)
                finished += 1
                yield task, future.result()
    except BrokenProcessPool:
        raise MachineError("a worker process was killed", hint=hint) from None
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


def _begin(start: Callable[[Any], None] | None, argument: Any) -> None:
    # The terminal sends Ctrl-C to the whole group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.set_threshold(200_000, 50, 50)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(argument)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _kill(pool: ProcessPoolExecutor) -> None:
    # A writer that is killed leaves a private file, which the next build removes.
    for process in list((pool._processes or {}).values()):
        process.kill()
