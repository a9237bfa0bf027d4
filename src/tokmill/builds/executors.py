"""Where shards are made (`plugins.EXECUTORS`): in this process, or in a pool of spawned ones."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Generator, Iterable
from multiprocessing.sharedctypes import Synchronized
from typing import NamedTuple, Protocol

from tokmill import plugins
from tokmill.builds.make_shard import ShardJob, Work, make_in_worker, start_worker
from tokmill.builds.processes import in_processes
from tokmill.builds.resources import Amount
from tokmill.errors import UsageError
from tokmill.store.manifest import Receipt

Made = Generator[tuple[ShardJob, list[Receipt]], None, None]
Report = Callable[[int], None]


class Terms(NamedTuple):
    """On what terms shards are made; nothing of it changes a byte."""

    workers: int = 1
    """Shards at a time, at most."""
    deadline: float | None = None
    """Monotonic seconds at which each worker commits what is whole."""
    grace: float = 1.0
    """Seconds after the deadline at which a worker that has not committed is given up."""
    report: Report | None = None
    """Told the input bytes of all items that were read to their end, those of shards that are not
    done yet with them."""
    address: str = ""
    """Of a cluster."""
    say: Callable[[str], None] = print
    """Told what a user is to know."""


class Executor(Protocol):
    """Makes shards and yields their receipts in whatever order they are done."""

    def __init__(self, work: Work, terms: Terms) -> None: ...

    def map(self, tasks: Iterable[ShardJob]) -> Made:
        """Make shards; taking a task from `tasks` is the promise to finish it."""
        ...

    def text(self) -> str:
        """Return what the progress line says of the workers, "" for nothing."""
        ...


def check_executor(amount: Amount) -> None:
    """Refuse what does not go together, or an executor whose packages are missing.

    Raises `UsageError`, `MissingExtraError`.
    """
    name = amount.executor
    if name != "auto":
        plugins.load(plugins.EXECUTORS, name)
    if amount.address and name != "ray":
        raise UsageError("--address is that of a Ray cluster", hint="--executor ray")
    if name == "here" and amount.workers:
        raise UsageError(
            f"--executor here makes one shard at a time, not {amount.workers}",
            hint="--executor pool, or leave --workers out",
        )
    if name not in ("auto", "here") and amount.workers == 0:
        raise UsageError(f"--workers 0 is this process, not {name}", hint="--executor here")


def executor_of(name: str, work: Work, terms: Terms) -> Executor:
    """Make an executor; `auto` is `pool` for any workers and `here` for none."""
    if name == "auto":
        name = "pool" if terms.workers else "here"
    executor: Executor = plugins.load(plugins.EXECUTORS, name)(work, terms)
    return executor


class Here:
    """One shard after the other in this process."""

    def __init__(self, work: Work, terms: Terms) -> None:
        self.work, self.terms = work, terms
        self.read = 0

    def map(self, tasks: Iterable[ShardJob]) -> Made:
        """Make shards in order."""
        start_worker(self.work, self._count)
        for task in tasks:
            yield task, make_in_worker(task, self.terms.deadline)

    def _count(self, size: int) -> None:
        self.read += size
        if self.terms.report is not None:
            self.terms.report(self.read)

    def text(self) -> str:
        """Return nothing: there is one worker."""
        return ""


class Pool:
    """Several spawned processes; they die when this one does, however it dies."""

    def __init__(self, work: Work, terms: Terms) -> None:
        self.work, self.terms = work, terms

    def map(self, tasks: Iterable[ShardJob]) -> Made:
        """Make shards, one more than there are workers under way.

        At the deadline each commits what is whole. One that does not within the time that there
        is for it, as it is within a long step, is given up.
        """
        read = multiprocessing.get_context("spawn").Value("q")
        report, deadline = self.terms.report, self.terms.deadline
        yield from in_processes(
            functools.partial(make_in_worker, deadline=deadline),
            tasks,
            self.terms.workers,
            start=_start,
            argument=(self.work, read),
            deadline=None if deadline is None else deadline + self.terms.grace,
            patience=0,
            tick=None if report is None else lambda: report(reached(read)),
            hint="most often memory ran out: try --preset memory or --memory 1GB; "
            "run the same command again and it continues",
        )

    def text(self) -> str:
        """Return nothing: what the machine does is said of all of them."""
        return ""


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
