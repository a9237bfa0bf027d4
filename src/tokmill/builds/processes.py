"""Apply a function to many tasks in spawned processes that end with this one."""

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

from tokmill.base import bounds
from tokmill.base.bounds import explain_crashes
from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.base.stop import SIGNALS

T = TypeVar("T")
R = TypeVar("R")
EVERY = 1.0
"""Seconds between two calls of `tick`."""


def in_processes(
    function: Callable[[T], R],
    tasks: Iterable[T],
    workers: int,
    *,
    hint: str,
    start: Callable[[Any], None] | None = None,
    argument: Any = None,
    name: Callable[[T], str] = lambda task: "",
    deadline: Callable[[], float] | None = None,
    tick: Callable[[], None] | None = None,
) -> Iterator[tuple[T, R]]:
    """Yield each task and its result, in the order in which they are finished.

    There is always one more task than workers; every task taken from `tasks` must be finished.
    `start` prepares a process with `argument`; meanwhile signals wait. At `deadline()` (monotonic
    seconds, asked once a second) unfinished tasks are given up. `tick` is called once a second. The
    processes end when this one ends, in whatever way. If a worker is killed, a `MachineError` with
    `hint` and the `name` of each unfinished task is raised.
    """
    waiting = iter(tasks)
    pool = _pool(workers, start, argument)
    started = pool._processes
    running: dict[Future[R], T] = {}
    done: set[Future[R]] = set()
    try:
        while True:
            while len(running) < workers + 1:
                try:
                    task = next(waiting)
                except StopIteration:
                    break
                with signals_wait():
                    running[pool.submit(function, task)] = task
            if not running:
                break
            left = max(0.0, deadline() - time.monotonic()) if deadline else math.inf
            pause = min(left, EVERY)
            done = wait(running, timeout=pause, return_when=FIRST_COMPLETED).done
            if tick is not None:
                tick()
            if not done and left <= pause:
                return
            while done:
                yield _taken(running, done)
    except BrokenProcessPool:
        if _worker_reported(pool, started):
            hint = "the line above says why"
        names = ", ".join(dict.fromkeys(filter(None, map(name, running.values()))))
        raise MachineError("a worker process was killed", where=names, hint=hint) from None
    finally:
        # Finished tasks are committed, so workers can simply be killed. A signal meanwhile would
        # leave their semaphores.
        with signals_wait():
            _kill(pool)
            pool.shutdown(wait=True, cancel_futures=True)
            # A future holds its error, and the error this frame with all semaphores.
            running.clear()
            done.clear()


def _worker_reported(pool: ProcessPoolExecutor, started: Any) -> bool:
    """End a broken pool; return whether a worker has printed why it ended."""
    # The pool's thread waits for its processes: a second wait may miss how one ended. It ends them
    # by SIGTERM, which one that just starts blocks.
    _kill(pool)
    pool.shutdown(wait=True)
    codes = {MachineError.exit_code, TokmillError.exit_code, UsageError.exit_code}
    return bool(codes & {process.exitcode for process in (started or {}).values()})


def _pool(workers: int, start: Callable[[Any], None] | None, argument: Any) -> ProcessPoolExecutor:
    with signals_wait():
        return ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(start, argument),
        )


def _taken(running: dict[Future[R], T], done: set[Future[R]]) -> tuple[T, R]:
    future = done.pop()
    try:
        return running.pop(future), future.result()
    finally:
        del future


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let signals wait for the end of the `with` block.

    A new process inherits that they are blocked: Ctrl-C cannot hit it before it is ready, and
    Python's resource tracker, which the first semaphore starts, outlives a terminal that closes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(start: Callable[[Any], None] | None, argument: Any) -> None:
    # The terminal sends Ctrl-C to the whole group, as when it closes; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.set_threshold(200_000, 50, 50)
    bounds.own_process = True
    explain_crashes()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(argument)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _kill(pool: ProcessPoolExecutor) -> None:
    # A writer that is killed leaves a private file, which the next build removes.
    for process in list((pool._processes or {}).values()):
        process.kill()
