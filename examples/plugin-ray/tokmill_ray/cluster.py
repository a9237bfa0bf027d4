"""A Ray cluster: connecting to it, its nodes, and whether each sees the store and the inputs."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokmill.base.errors import MachineError, UsageError
from tokmill.base.files import private_path, remove, write_file
from tokmill.base.progress import human_count
from tokmill.builds.execution.executors import Terms
from tokmill.builds.make_shard import Work
from tokmill.version import __version__

ANSWER = 5.0
"""Seconds in which a cluster must accept a connection."""
CHECK = 120.0
"""Seconds in which every node must have checked the folders."""
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


def refused(node: str, problem: str, shared: Shared) -> MachineError:
    return MachineError(
        f"the node {node} {problem}",
        hint=f"pip install tokmill=={shared.version} on all nodes"
        if problem.startswith("has")
        else "all nodes must see the store and its inputs under the same paths, as on a shared "
        "file system (docs/clusters.md)",
    )


@contextlib.contextmanager
def proof_file(work: Work) -> Iterator[Shared]:
    """Write a file that all nodes must see, and remove it after the build."""
    content = secrets.token_hex(16)
    path = private_path(Path(work.store) / "cluster")
    write_file(path, content.encode())
    try:
        inputs = [path for path in work.roots if os.path.exists(path)]
        yield Shared(str(path), content, inputs, __version__)
    finally:
        remove(path)


def check_nodes(nodes: list[dict[str, Any]], shared: Shared) -> None:
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
            raise refused(name_of(asked[answer]), problem, shared)
    if late:
        raise refused(name_of(asked[late[0]]), f"has not answered for {CHECK:.0f} seconds", shared)


@contextlib.contextmanager
def cluster(terms: Terms) -> Iterator[None]:
    """Connect to a cluster, or start Ray on this machine if none is named."""
    if ray.is_initialized():
        yield
        return
    address = terms.address or os.environ.get("RAY_ADDRESS", "")
    _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        # Ray lets workers import from the folder in which it was started.
        with _signals_kept(), contextlib.chdir(os.sep):
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
            f"{address!r} is not the address of a cluster",
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


def nodes_of_cluster() -> list[dict[str, Any]]:
    """Return the nodes that are alive and have cores for tasks."""
    return [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]


def cores_of(nodes: list[dict[str, Any]]) -> int:
    return sum(int(node["Resources"]["CPU"]) for node in nodes)


def size_of(nodes: list[dict[str, Any]]) -> str:
    """Return in words how many nodes and cores there are."""
    return f"{human_count(len(nodes), 'node')} with {human_count(cores_of(nodes), 'core')}"


def name_of(node: dict[str, Any]) -> str:
    name, address = node["NodeName"], node["NodeManagerAddress"]
    return str(address) if name == address else f"{name} ({address})"
