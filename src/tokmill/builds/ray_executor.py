"""Make shards as tasks of a Ray cluster, with a file system that all nodes share.

When a worker or a node is lost, others make its unfinished shards again. Two writers of a shard
write the same bytes, so a worker that was given up does no harm.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokmill.builds import make_shard as make
from tokmill.builds.executors import Made, Terms
from tokmill.builds.make_shard import ShardJob, Work, make_in_worker, start_worker
from tokmill.errors import MachineError, UsageError
from tokmill.files import private_path, remove, write_file
from tokmill.progress import human_count
from tokmill.store.manifest import Receipt
from tokmill.version import __version__

TRIES = 3
"""Lost workers with the same shard after which the build ends: the shard may be the reason."""
TICK = 1.0
"""Seconds between two checks of the cluster."""
TELL = 0.5
"""Seconds between two messages of a worker about what it has read."""
ANSWER = 5.0
"""Seconds in which a cluster must accept a connection."""
CHECK = 120.0
"""Seconds in which every node must have checked the folders."""
END = 10.0
"""Seconds to wait for workers that were told to end."""
OBJECTS = 80 << 20
"""Bytes of the object store of a Ray that is started here; only receipts go through it."""
LOST = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.ObjectLostError,
)
"""Errors of a task whose worker or node is gone."""


class Shared(NamedTuple):
    """What every node must see: the file `proof` in the store's folder, and the inputs."""

    proof: str
    content: str
    inputs: list[str]
    version: str


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
        return f"{_size_of(self._nodes)}, {human_count(len(self._running), 'shard')} under way"

    def map(self, tasks: Iterable[ShardJob]) -> Made:
        """Make shards on all nodes; see `Pool.map` for what the deadline means."""
        with _cluster(self.terms), _proof(self.work) as shared:
            self._nodes = _workers()
            self.terms.say(f"Ray: {_size_of(self._nodes)}")
            _check_nodes(self._nodes, shared)
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), False)
            board = ray.remote(num_cpus=0)(Board).options(scheduling_strategy=here)
            self._board = board.remote(self.terms.deadline)
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
                elif (found := next(waiting, None)) is not None:
                    task, tries = found, 1
                else:
                    break
                made = self._function.remote(self._work, self._board, task)
                self._running[made] = task, tries
            if not self._running:
                return
            left = self._seconds_left()
            done, _ = ray.wait(list(self._running), timeout=min(left, TICK))
            self._tick()
            if not done and left <= TICK:
                return
            for made in done:
                task, tries = self._running.pop(made)
                try:
                    receipts = ray.get(made)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except LOST as error:
                    again.append((task, self._lost(task, tries, error)))
                else:
                    yield task, receipts

    def _room(self) -> int:
        """Return how many shards may be under way: one a core, and one waiting for each node."""
        cores = _cores(self._nodes)
        # With no node left, one task waits for a node to join.
        return min(self.terms.workers, max(1, cores + len(self._nodes)))

    def _seconds_left(self) -> float:
        if self.terms.deadline is None:
            return float("inf")
        return max(0.0, self.terms.deadline + self.terms.grace - time.monotonic())

    def _tick(self) -> None:
        before, self._nodes = self._nodes, _workers()
        names = {node["NodeID"] for node in self._nodes}
        for node in before:
            if node["NodeID"] not in names:
                self.terms.say(f"Ray: node {_name(node)} is gone, {_size_of(self._nodes)} left")
        if self.terms.report is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                self.terms.report(ray.get(self._board.total.remote(), timeout=TICK))

    def _lost(self, task: ShardJob, tries: int, error: Exception) -> int:
        """Say that a worker was lost and return the number of the next try."""
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

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.read: dict[str, int] = {}
        self.working: dict[str, tuple[str, int]] = {}
        """Shard → (node, process) that make it."""
        self.stopped = False

    def begin(self, shard: str, node: str, pid: int) -> float | None:
        """Begin a shard, perhaps again; return the seconds until the deadline.

        Seconds, as the clocks of two machines cannot be compared.
        """
        if self.stopped:
            raise RuntimeError("the build has ended")
        self.read[shard] = 0
        self.working[shard] = node, pid
        return None if self.deadline is None else self.deadline - time.monotonic()

    def reach(self, shard: str, read: int) -> None:
        """Note the bytes that have been read of a shard's items."""
        self.read[shard] = read

    def done(self, shard: str) -> None:
        """Note that a shard is no longer being made."""
        self.working.pop(shard, None)

    def stop(self) -> dict[str, list[int]]:
        """Refuse to begin any more shards; return node → processes that are making one."""
        self.stopped = True
        found: dict[str, list[int]] = {}
        for node, pid in self.working.values():
            found.setdefault(node, []).append(pid)
        return found

    def total(self) -> int:
        """Return the bytes that have been read of all shards."""
        return sum(self.read.values())


class _Count:
    """Reports to the board how much of a shard this process has read, every `TELL` seconds."""

    def __init__(self) -> None:
        self.board: Any = None
        self.shard = ""
        self.read = 0
        self.told = 0.0

    def begin(self, board: Any, shard: str) -> float | None:
        self.board, self.shard, self.read = board, shard, 0
        node = ray.get_runtime_context().get_node_id()
        left: float | None = ray.get(board.begin.remote(shard, node, os.getpid()))
        return left

    def __call__(self, size: int) -> None:
        self.read += size
        if time.monotonic() - self.told > TELL:
            self.tell()

    def tell(self) -> None:
        self.told = time.monotonic()
        self.board.reach.remote(self.shard, self.read)


_count = _Count()
_begun = ""
"""The content of the proof file of the build for which this process works."""


def make_on_node(given: tuple[Work, Shared], board: Any, task: ShardJob) -> list[Receipt]:
    """Make one shard in a worker of Ray."""
    global _begun
    work, shared = given
    if _begun != shared.content:
        # A node may have joined after the others were checked.
        if problem := problem_here(shared):
            raise _refused(ray.util.get_node_ip_address(), problem, shared)
        gc.set_threshold(200_000, 50, 50)
        start_worker(work, _count)
        _begun = shared.content
    left = _count.begin(board, task.shard)
    try:
        return make_in_worker(task, None if left is None else make.clock() + left)
    finally:
        _count.tell()
        board.done.remote(task.shard)


def end_workers(pids: list[int]) -> None:
    """Kill workers on this node."""
    for pid in pids:
        with contextlib.suppress(OSError):
            # It may have ended meanwhile, and another process may have its number.
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(pid, signal.SIGKILL)


def problem_here(shared: Shared) -> str:
    """Return why this machine cannot work for a build, or ""."""
    if shared.version != __version__:
        return f"has tokmill {__version__}, not {shared.version}"
    proof = Path(shared.proof)
    try:
        if proof.read_text() != shared.content:
            return f"sees another folder {proof.parent}"
    except OSError as error:
        return f"does not see the folder {proof.parent} ({error.strerror})"
    try:
        mine = private_path(proof)
        mine.write_bytes(b"")
        mine.unlink()
    except OSError as error:
        return f"cannot write to the folder {proof.parent} ({error.strerror})"
    for path in shared.inputs:
        if not os.path.exists(path):
            return f"does not see the input {path}"
    return ""


def _refused(node: str, problem: str, shared: Shared) -> MachineError:
    return MachineError(
        f"the node {node} {problem}",
        hint=f"pip install tokmill=={shared.version} on all nodes"
        if problem.startswith("has")
        else "all nodes must see the store and its inputs under the same paths, as on a shared "
        "file system (docs/clusters.md)",
    )


@contextlib.contextmanager
def _proof(work: Work) -> Iterator[Shared]:
    """Write a file that all nodes must see, and remove it after the build."""
    content = secrets.token_hex(16)
    path = private_path(Path(work.store) / "cluster")
    write_file(path, content.encode())
    try:
        inputs = [path for path in work.roots if os.path.exists(path)]
        yield Shared(str(path), content, inputs, __version__)
    finally:
        remove(path)


def _check_nodes(nodes: list[dict[str, Any]], shared: Shared) -> None:
    """Check the folders on every node; raise `MachineError` for the first node with a problem."""
    check = ray.remote(num_cpus=0, max_retries=0)(problem_here)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[check.options(scheduling_strategy=there).remote(shared)] = node
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=CHECK)
    for answer in done:
        try:
            problem = ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            # Most often an import that fails.
            problem = f"cannot run tokmill: {error.cause}"
        except (*LOST, ray.exceptions.TaskUnschedulableError):
            continue
        if problem:
            raise _refused(_name(asked[answer]), problem, shared)
    if late:
        raise _refused(_name(asked[late[0]]), f"has not answered for {CHECK:.0f} seconds", shared)


@contextlib.contextmanager
def _cluster(terms: Terms) -> Iterator[None]:
    """Connect to a cluster, or start Ray on this machine if none is named."""
    if ray.is_initialized():
        yield
        return
    address = terms.address or os.environ.get("RAY_ADDRESS", "")
    _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with _signals_kept():
            _connect(address, terms.workers)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MachineError(
            f"the Ray cluster cannot be used: {reason}",
            where=address,
            hint="`ray status` on one of its machines says how it is; this machine must be one of "
            "them, and have the same versions of Ray and Python",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str, workers: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        ray.init(address=address, **quiet)
        return
    # Ray starts a process for each core at once, also for cores that the build will not use.
    cores = min(len(os.sched_getaffinity(0)), max(1, workers))
    quiet |= {"num_cpus": cores, "object_store_memory": OBJECTS, "include_dashboard": False}
    ray.init(address="local", **quiet)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM, as Ray installs its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_address(address: str) -> None:
    """Raise `UsageError` unless it is HOST:PORT, `MachineError` if nothing answers there."""
    if address in ("", "auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(
            f"{address!r} is no address of a cluster",
            hint="HOST:PORT as `ray start --head` prints it, such as 10.0.0.1:6379; run the "
            "command on a machine of the cluster",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER).close()
    except OSError as error:
        raise MachineError(
            f"no Ray cluster answers at {address} ({error.strerror or error})",
            hint="`ray start --head` starts one and prints its address",
        ) from None


def _workers() -> list[dict[str, Any]]:
    """Return the nodes that are alive and have cores for tasks."""
    return [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]


def _cores(nodes: list[dict[str, Any]]) -> int:
    return sum(int(node["Resources"]["CPU"]) for node in nodes)


def _size_of(nodes: list[dict[str, Any]]) -> str:
    return f"{human_count(len(nodes), 'node')} with {human_count(_cores(nodes), 'core')}"


def _name(node: dict[str, Any]) -> str:
    name, address = node["NodeName"], node["NodeManagerAddress"]
    return str(address) if name == address else f"{name} ({address})"
