"""Where shards are made: in this process, or in a pool of spawned ones that end with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from tokmill.build.make import Task, TimeIsUp, Work, make_in_worker, start_worker
from tokmill.build.processes import in_processes
from tokmill.store.manifest import Receipt


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
        yield from in_processes(
            make_in_worker,
            tasks,
            self.workers,
            start=start_worker,
            argument=self.work,
            deadline=self.deadline,
            hint="most often memory ran out: try --preset memory or --memory 1GB; "
            "run the same command again and it continues",
        )
