"""Where shards are made: in this process, or in a pool of spawned ones that end with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterable
from multiprocessing.sharedctypes import Synchronized
from typing import Protocol

from tokmill.build.make import Task, TimeIsUp, Work, make_in_worker, start_worker
from tokmill.build.processes import in_processes
from tokmill.store.manifest import Receipt

Made = Generator[tuple[Task, list[Receipt]], None, None]
Report = Callable[[int], None]


class Executor(Protocol):
    """Makes shards and yields their receipts in whatever order they are done.

    While it does, it tells a `Report` the input bytes of all items that it has read to their end,
    those of shards that are not done yet with them.
    """

    def map(self, tasks: Iterable[Task]) -> Made:
        """Make shards; taking a task from `tasks` is the promise to finish it."""
        ...


class Here:
    """One shard after the other in this process."""

    def __init__(
        self, work: Work, deadline: float | None = None, report: Report | None = None
    ) -> None:
        self.work, self.deadline, self.report = work, deadline, report
        self.read = 0

    def map(self, tasks: Iterable[Task]) -> Made:
        """Make shards in order."""
        start_worker(self.work, self._count)
        for number, task in enumerate(tasks):
            try:
                # The first is always finished: without a shard there is no rate to speak of.
                made = make_in_worker(task, self.deadline if number else None)
            except TimeIsUp:
                return
            yield task, made

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
    ) -> None:
        self.work, self.workers, self.deadline, self.report = work, workers, deadline, report

    def map(self, tasks: Iterable[Task]) -> Made:
        """Make shards, one more than there are workers under way.

        At the deadline those under way are given up, if at least one is finished.
        """
        read = multiprocessing.get_context("spawn").Value("q")
        report = self.report
        yield from in_processes(
            make_in_worker,
            tasks,
            self.workers,
            start=_start,
            argument=(self.work, read),
            deadline=self.deadline,
            tick=None if report is None else lambda: report(read.value),
            hint="most often memory ran out: try --preset memory or --memory 1GB; "
            "run the same command again and it continues",
        )


def _start(given: tuple[Work, Synchronized[int]]) -> None:
    work, read = given

    def count(size: int) -> None:
        with read.get_lock():
            read.value += size

    start_worker(work, count)
