"""Shards are made in this process, or in a pool of spawned ones."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterable
from ctypes import c_double
from multiprocessing.sharedctypes import RawValue, Synchronized
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec

from tokmill.base.bounds import resident_bytes
from tokmill.base.errors import UsageError
from tokmill.base.files import append_line
from tokmill.base.progress import human_bytes
from tokmill.builds.execution.processes import in_processes, signals_wait
from tokmill.builds.make_shard import ShardJob, Work, make_in_worker, start_worker
from tokmill.builds.plan import Amount
from tokmill.builds.source import Resources
from tokmill.store.manifest import Receipt


class Watch:
    """Measures load, memory and disk, and logs events of a store."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.started = time.monotonic()
        self.peak_memory = 0
        """Largest memory measured, in bytes."""

    def resources(self) -> dict[str, float]:
        """Return the load of the machine, memory of this build and free disk (bytes)."""
        workers = [child.pid for child in multiprocessing.active_children()]
        memory = sum(map(resident_bytes, [os.getpid(), *filter(None, workers)]))
        self.peak_memory = max(self.peak_memory, memory)
        disk = shutil.disk_usage(self.store).free
        return {"disk_free": disk, "load": os.getloadavg()[0], "memory": memory}

    def text(self) -> str:
        disk, load, memory = self.resources().values()
        return f"load {load:.1f}, memory {human_bytes(memory)}, {human_bytes(disk)} disk free"

    def event(self, kind: str, **facts: Any) -> None:
        """Append a line to the store's `events.jsonl`."""
        line = {
            "event": kind,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.monotonic() - self.started, 3),
            **facts,
            **self.resources(),
        }
        append_line(self.store / "events.jsonl", msgspec.json.encode(line) + b"\n")


BLOCK_BYTES = {"memory": 1 << 20, "balanced": 2 << 20, "speed": 8 << 20}
PARENT_BYTES = 120 << 20
WORKER_BYTES = 260 << 20
"""Memory of the parent and of one worker for text, measured (benchmarks/RESULTS.md), rounded up."""


class Terms(NamedTuple):
    """What the making of shards keeps to; nothing of it changes a byte of the store."""

    workers: int = 0
    """Processes, at most; 0: only this one."""
    deadline: c_double = RawValue("d", math.inf)
    """Monotonic seconds at which each worker commits its whole records; a signal may change it."""
    grace: float = 1.0
    """Seconds after the deadline at which workers that have not committed are killed."""
    report: Callable[[int], None] | None = None
    """Called with the input bytes of all items that were read completely, including those of
    unfinished shards."""


def choose(amount: Amount, shards: int) -> tuple[int, Resources]:
    """Return (workers, resources) for a number of shards; 0 workers: in this process.

    Raises `UsageError` if the memory is too small for one worker.
    """
    resources = Resources(engine=amount.engine, block_bytes=BLOCK_BYTES[amount.preset])
    cores = len(os.sched_getaffinity(0))
    workers = amount.workers
    if workers is None:
        workers = 0 if amount.preset == "memory" or min(cores, shards) < 2 else cores
    workers = min(workers, shards)
    if amount.memory is not None:
        if amount.memory < PARENT_BYTES + WORKER_BYTES:
            raise UsageError(
                f"--memory {amount.memory >> 20} MiB is too little",
                hint=f"one worker needs {(PARENT_BYTES + WORKER_BYTES) >> 20} MiB",
            )
        fitting = (amount.memory - PARENT_BYTES) // WORKER_BYTES
        workers = min(workers, fitting) if fitting > 1 else 0
        resources = msgspec.structs.replace(resources, block_bytes=1 << 20)
    # Several workers use all cores anyway; without workers the encoder may use threads.
    return workers, msgspec.structs.replace(resources, threads=workers == 0)


def make_shards(
    work: Work, terms: Terms, tasks: Iterable[ShardJob]
) -> Generator[tuple[ShardJob, list[Receipt]], None, None]:
    """Make shards and yield their receipts in the order in which they are finished.

    With workers there is always one more task than workers, and every task that is taken is
    finished. At the deadline each worker commits its whole records; one that is still in a long
    step when the grace is over is killed.
    """
    report, deadline = terms.report, terms.deadline
    if not terms.workers:
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            if report is not None:
                report(done)

        start_worker(work, count, lambda: deadline.value)
        for task in tasks:
            yield task, make_in_worker(task)
        return
    with signals_wait():
        read = multiprocessing.get_context("spawn").Value("q")
    yield from in_processes(
        make_in_worker,
        tasks,
        terms.workers,
        start=_start,
        argument=(work, read, deadline),
        name=lambda task: task.items[0].path,
        deadline=lambda: deadline.value + terms.grace,
        tick=None if report is None else lambda: report(reached(read)),
        hint="most often memory ran out: try --preset memory or --memory 1GB; "
        "run the same command again and it continues",
    )


def reached(read: Synchronized[int]) -> int:
    """Return the bytes that workers have counted, without the lock.

    A worker that was killed while it held the lock never releases it.
    """
    value: int = read.get_obj().value
    return value


def _start(given: tuple[Work, Synchronized[int], c_double]) -> None:
    work, read, deadline = given

    def stop(number: int, frame: FrameType | None) -> None:
        # A signal to the whole group may reach this process before its parent.
        deadline.value = min(deadline.value, time.monotonic())

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)

    def count(size: int) -> None:
        with read.get_lock():
            read.value += size

    start_worker(work, count, lambda: deadline.value)
