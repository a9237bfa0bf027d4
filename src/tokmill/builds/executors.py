"""Where shards are made: in this process, or in a pool of spawned ones that end with it."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Generator, Iterable
from multiprocessing.sharedctypes import Synchronized
from typing import Protocol

from tokmill.builds.make_shard import ShardJob, Work, make_in_worker, start_worker
from tokmill.builds.processes import in_processes
from tokmill.store.manifest import Receipt

Made = Generator[tuple[ShardJob, list[Receipt]], None, None]
Report = Callable[[int], None]


class Executor(Protocol):
    """Makes shards and yields their receipts in whatever order they are done.

    While it does, it tells a `Report` the input bytes of all items that it has read to their end,
    those of shards that are not done yet with them.
    """

    def map(self, tasks: Iterable[ShardJob]) -> Made:
        """Make shards; taking a task from `tasks` is the promise to finish it."""
        ...


class Here:
    """One shard after the other in this process."""

    def __init__(
        self, work: Work, deadline: float | None = None, report: Report | None = None
    ) -> None:
        self.work, self.deadline, self.report = work, deadline, report
        self.read = 0

    def map(self, tasks: Iterable[ShardJob]) -> Made:
        """Make shards in order."""
        start_worker(self.work, self._count)
        for task in tasks:
            yield task, make_in_worker(task, self.deadline)

    def _count(self, size: int) -> None:
        self.read += size
        if self.report is not None:
            self.report(self.read)


class Pool:
    """Several spawned processes; they die when this one does, however it dies."""

    def __init__(
        self,
        work: Work,
        workers: int,
        deadline: float | None = None,
        report: Report | None = None,
        grace: float = 1.0,
    ) -> None:
        self.work, self.workers, self.deadline, self.report = work, workers, deadline, report
        self.grace = grace

    def map(self, tasks: Iterable[ShardJob]) -> Made:
        """Make shards, one more than there are workers under way.

        At the deadline each commits what is whole. One that does not within the time that there
        is for it, as it is within a long step, is given up.
        """
        read = multiprocessing.get_context("spawn").Value("q")
        report = self.report
        yield from in_processes(
            functools.partial(make_in_worker, deadline=self.deadline),
            tasks,
            self.workers,
            start=_start,
            argument=(self.work, read),
            deadline=None if self.deadline is None else self.deadline + self.grace,
            patience=0,
            tick=None if report is None else lambda: report(reached(read)),
            hint="most often memory ran out: try --preset memory or --memory 1GB; "
            "run the same command again and it continues",
        )


def reached(read: Synchronized[int]) -> int:
    """Return the bytes that workers have counted, without waiting for one that is counting.

    A worker that was killed while it counted never gives the lock back.
    """
    value: int = read.get_obj().value
    return value


def _start(given: tuple[Work, Synchronized[int]]) -> None:
    work, read = given

    def count(size: int) -> None:
        with read.get_lock():
            read.value += size

    start_worker(work, count)
