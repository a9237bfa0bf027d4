"""What the benchmarks on a GPU share: which one it is, times of it, memory of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
from collections.abc import Callable

import torch

WARM = 3
"""Rounds that do not count: kernels are compiled in the first."""


def cuda() -> torch.device:
    """Return the device; end with a line where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: this benchmark is for GPUs")
    return torch.device("cuda")


def describe() -> str:
    """Describe device and software in a line."""
    kernels = "no fla-core"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        kernels = f"fla-core {importlib.metadata.version('fla-core')}"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {kernels}."


def in_turns(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median milliseconds of each on the device; they take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(WARM + rounds):
        for run, found in zip(runs, times, strict=True):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            run()
            ended.record()
            ended.synchronize()
            if number >= WARM:
                found.append(begun.elapsed_time(ended))
    return [statistics.median(found) for found in times]


def peak(run: Callable[[], object]) -> int:
    """Return the bytes that a run allocates on the device at a time, besides what is there."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
