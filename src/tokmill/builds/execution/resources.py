"""Workers and block sizes from presets and a memory budget; they never change a byte of a store."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tokmill.base.errors import UsageError

TIMES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

PARENT_BYTES = 120 << 20
WORKER_BYTES = 260 << 20
"""Memory of the parent and of one worker for text, measured (benchmarks/RESULTS.md), rounded up."""


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Speed and memory of a build; no field may change a byte of the store."""

    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto"
    threads: bool = True
    own_process: bool = False
    """The process runs nothing but this build, so settings of the whole process may be changed."""
    block_bytes: int = 2 << 20
    scratch: str = ""
    """Folder for files that may be lost, shared by all processes of the build; empty: none."""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the machine that a build may use."""

    workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of processes; 0: only this one; None: chosen by the preset."""
    preset: Literal["memory", "balanced", "speed"] = "balanced"
    memory: int | None = None
    """Bytes that the build and its workers may use together."""
    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto"
    executor: str = "auto"
    """Where shards are made: on this machine (`auto`), or a line of `plugins.EXECUTORS`."""
    address: str = ""
    """Address of the cluster of an executor of a plug-in."""
    own_process: bool = False
    """Whether the process runs only this build (the command, not a library call)."""

    def resources(self) -> Resources:
        """Return the block size and engine of one process."""
        block = {"memory": 1 << 20, "balanced": 2 << 20, "speed": 8 << 20}[self.preset]
        return Resources(engine=self.engine, block_bytes=block, own_process=self.own_process)


def choose(amount: Amount, shards: int) -> tuple[int, Resources]:
    """Return (workers, resources) for a number of shards; 0 workers: in this process.

    Raises `UsageError` if the memory is too small for one worker.
    """
    resources = amount.resources()
    cores = len(os.sched_getaffinity(0))
    workers = amount.workers
    if workers is None and amount.executor != "auto":
        # Executors of plug-ins limit this by the cores of their cluster.
        workers = shards
    elif workers is None:
        workers = 0 if amount.preset == "memory" or min(cores, shards) < 2 else cores
    workers = min(workers, shards)
    if amount.memory is not None:
        if amount.memory < PARENT_BYTES + WORKER_BYTES:
            raise UsageError(
                f"--memory {amount.memory >> 20} MiB is too little",
                hint=f"one worker needs {(PARENT_BYTES + WORKER_BYTES) >> 20} MiB",
            )
        fitting = (amount.memory - PARENT_BYTES) // WORKER_BYTES
        least = 0 if amount.executor == "auto" else 1
        workers = min(workers, fitting) if fitting > 1 else min(workers, least)
        resources = msgspec.structs.replace(resources, block_bytes=1 << 20)
    # Several workers use all cores anyway; without workers the encoder may use threads.
    return workers, msgspec.structs.replace(
        resources, threads=workers == 0, own_process=amount.own_process or workers > 0
    )


def parse_seconds(text: str) -> float:
    """Return the seconds of a text such as 90s, 10m or 1.5h."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if not match:
        raise UsageError(f"{text!r} is not a time", hint="write it as 90s, 10m or 1.5h")
    return float(match[1]) * TIMES[match[2]]


def machine_memory(machine: Path = Path("/")) -> tuple[int, int]:
    """Return (total, free) bytes that this process may use: the machine's or its cgroups'."""
    total = free = 0
    try:
        lines = (machine / "proc/meminfo").read_text().splitlines()
        table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        total, free = table["MemTotal"], table["MemAvailable"]
        for line in (machine / "proc/self/cgroup").read_text().splitlines():
            _, kind, inner = line.split(":", 2)
            if kind in CGROUP_FILES:
                root = machine / "sys/fs/cgroup" / kind
                group = root / inner.lstrip("/")
                # In a container the path may be one outside of it; the root is its own group.
                for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
                    total, free = _in_group(folder, CGROUP_FILES[kind], total, free)
    except (OSError, KeyError, ValueError, IndexError):
        pass
    return total, free


CGROUP_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Controller in /proc/self/cgroup (of version 2, of 1) → files of the limit and of what is used."""


def _in_group(folder: Path, names: tuple[str, str], total: int, free: int) -> tuple[int, int]:
    with contextlib.suppress(FileNotFoundError):
        limit, used = ((folder / name).read_text().strip() for name in names)
        if limit.isdigit():
            return min(total, int(limit)), min(free, max(0, int(limit) - int(used)))
    return total, free
