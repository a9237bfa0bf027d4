"""Make shards as tasks of a Ray cluster, with a file system that all nodes share.

When a worker or a node is lost, others make its unfinished shards again. Two writers of a shard
write the same bytes, so a worker that was given up does no harm.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokmill.base.errors import MachineError
from tokmill.base.progress import human_count
from tokmill.builds import make_shard as make
from tokmill.builds.execution.executors import Made, Terms
from tokmill.builds.make_shard import ShardJob, Work, make_in_worker, start_worker
from tokmill.store.manifest import Receipt
from tokmill_ray.cluster import (
    LOST,
    Shared,
    check_nodes,
    cluster,
    cores_of,
    name_of,
    nodes_of_cluster,
    problem_here,
    proof_file,
    refused,
    size_of,
)

TRIES = 3
"""Lost workers with the same shard after which the build ends: the shard may be the reason."""
TICK = 1.0
"""Seconds between two checks of the cluster."""
TELL = 0.5
"""Seconds between two messages of a worker about what it has read."""
END = 10.0
"""Seconds to wait for workers that were told to end."""


class RayExecutor:
    """The machines of a Ray cluster, a shard a core."""

    def __init__(self, work: Work, terms: Terms) -> None:
        # Other machines have other working folders.
        self.work = msgspec.structs.replace(work, store=os.path.abspath(work.store))
        self.terms = terms
        self._nodes: list[dict[str, Any]] = []
        self._running: dict[Any, tuple[ShardJob, int]] = {}

    def text(self) -> str:
        """Return how many machines and cores there are, and how many shards are under way."""
        if not self._nodes:
            return ""
        return f"{size_of(self._nodes)}, {human_count(len(self._running), 'shard')} under way"

    def map(self, tasks: Iterable[ShardJob]) -> Made:
        """Make shards on all nodes; see `Pool.map` for what the deadline means."""
        with cluster(self.terms), proof_file(self.work) as shared:
            self._nodes = nodes_of_cluster()
            self.terms.say(f"Ray: {size_of(self._nodes)}")
            check_nodes(self._nodes, shared)
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), False)
            board = ray.remote(num_cpus=0)(Board).options(scheduling_strategy=here)
            self._board = board.remote(self.terms.deadline.value)
            self._work = ray.put((self.work, shared))
            self._function = ray.remote(num_cpus=1, max_retries=0)(make_on_node)
            try:
                yield from self._map(iter(tasks))
            finally:
                self._end()

    def _map(self, waiting: Iterator[ShardJob]) -> Made:
        again: deque[tuple[ShardJob, int]] = deque()
        while True:
            while len(self._running) < self._room():
                if again:
                    task, tries = again.popleft()
                elif (fresh := next(waiting, None)) is not None:
                    task, tries = fresh, 1
                else:
                    break
                future = self._function.remote(self._work, self._board, task)
                self._running[future] = task, tries
            if not self._running:
                return
            left = self._seconds_left()
            done, _ = ray.wait(list(self._running), timeout=min(left, TICK))
            self._tick()
            if not done and left <= TICK:
                return
            for future in done:
                task, tries = self._running.pop(future)
                try:
                    receipts = ray.get(future)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except LOST as error:
                    again.append((task, self._lost(task, tries, error)))
                else:
                    yield task, receipts

    def _room(self) -> int:
        """Return how many shards may be under way: one a core, and one waiting for each node."""
        cores = cores_of(self._nodes)
        # With no node left, one task waits for a node to join.
        return min(self.terms.workers, max(1, cores + len(self._nodes)))

    def _seconds_left(self) -> float:
        return max(0.0, self.terms.deadline.value + self.terms.grace - time.monotonic())

    def _tick(self) -> None:
        before, self._nodes = self._nodes, nodes_of_cluster()
        names = {node["NodeID"] for node in self._nodes}
        for node in before:
            if node["NodeID"] not in names:
                self.terms.say(f"Ray: node {name_of(node)} is gone, {size_of(self._nodes)} left")
        if self.terms.report is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                total = self._board.total.remote(self.terms.deadline.value)
                self.terms.report(ray.get(total, timeout=TICK))

    def _lost(self, task: ShardJob, tries: int, error: Exception) -> int:
        if tries == TRIES:
            raise MachineError(
                f"{tries} workers were lost while they made the shard {task.shard}, which begins "
                f"with {task.items[0].name} ({type(error).__name__})",
                hint="most often memory ran out: try --preset memory or fewer cores a node; "
                "run the same command again and it continues",
            ) from None
        self.terms.say(f"Ray: a worker was lost; its shard {task.shard} is made again")
        return tries + 1

    def _end(self) -> None:
        """End all running tasks, so that nothing is written after the build has returned.

        `ray.cancel` is not used: with it, Ray 2.60 sometimes ends this process too, when a task
        that it counts as cancelled has finished.
        """
        with contextlib.suppress(ray.exceptions.RayError):
            working = ray.get(self._board.stop.remote(), timeout=END) if self._running else {}
            end = ray.remote(num_cpus=0, max_retries=0)(end_workers)
            for node, pids in working.items():
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                end.options(scheduling_strategy=there).remote(pids)
            if self._running:
                ray.wait(list(self._running), num_returns=len(self._running), timeout=END)
        self._running.clear()
        ray.kill(self._board)


class Board:
    """An actor beside the build: bytes that all workers have read, and the time that is left."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.read: dict[str, int] = {}
        self.working: dict[str, tuple[str, int]] = {}
        """Shard → (node, process) that make it."""
        self.stopped = False

    def begin(self, shard: str, node: str, pid: int) -> None:
        if self.stopped:
            raise RuntimeError("the build has ended")
        self.read[shard] = 0
        self.working[shard] = node, pid

    def left(self) -> float:
        """Return the seconds until the deadline, as clocks of two machines cannot be compared."""
        return self.deadline - time.monotonic()

    def reach(self, shard: str, read: int) -> None:
        """Note the bytes that have been read of a shard's items."""
        self.read[shard] = read

    def done(self, shard: str) -> None:
        """Note that a shard is no longer being made."""
        self.working.pop(shard, None)

    def stop(self) -> dict[str, list[int]]:
        """Refuse to begin any more shards; return node → processes that are making one."""
        self.stopped = True
        result: dict[str, list[int]] = {}
        for node, pid in self.working.values():
            result.setdefault(node, []).append(pid)
        return result

    def total(self, deadline: float) -> int:
        """Return the bytes that have been read of all shards; a signal may change the deadline."""
        self.deadline = deadline
        return sum(self.read.values())


class _Count:
    """Reports to the board how much of a shard this process has read, every `TELL` seconds."""

    def __init__(self) -> None:
        self.board: Any = None
        self.shard = ""
        self.read = 0
        self.told = 0.0

    def begin(self, board: Any, shard: str) -> None:
        self.board, self.shard, self.read = board, shard, 0
        node = ray.get_runtime_context().get_node_id()
        ray.get(board.begin.remote(shard, node, os.getpid()))

    def __call__(self, size: int) -> None:
        self.read += size
        if time.monotonic() - self.told > TELL:
            self.tell()

    def tell(self) -> None:
        self.told = time.monotonic()
        self.board.reach.remote(self.shard, self.read)


class _Left:
    """The deadline, asked of the board every `TELL` seconds."""

    def __init__(self, board: Any) -> None:
        self.board, self.asked, self.value = board, -TELL, 0.0

    def __call__(self) -> float:
        if make.clock() - self.asked >= TELL:
            self.asked = make.clock()
            self.value = self.asked + ray.get(self.board.left.remote())
        return self.value


_count = _Count()
_begun = ""
"""The content of the proof file of the build for which this process works."""


def make_on_node(given: tuple[Work, Shared], board: Any, task: ShardJob) -> list[Receipt]:
    global _begun
    work, shared = given
    if _begun != shared.content:
        # A node may have joined after the others were checked.
        if problem := problem_here(shared):
            raise refused(ray.util.get_node_ip_address(), problem, shared)
        gc.set_threshold(200_000, 50, 50)
        start_worker(work, _count, _Left(board))
        _begun = shared.content
    _count.begin(board, task.shard)
    try:
        return make_in_worker(task)
    finally:
        _count.tell()
        board.done.remote(task.shard)


def end_workers(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            # It may have ended meanwhile, and another process may have its number.
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(pid, signal.SIGKILL)
