"""What schedules are compared with: numpy, torch, IREE with its best flags.

All run on one thread, in CPU time, on the inputs that schedules are measured on. IREE's flags run
in turns in one child.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.mlir.iree import tune
from tokmill.mlir.iree.compiler import generalized
from tokmill.mlir.modules import problem as problems

IREE = "IREE, best flags"
SECONDS = 600
"""For the flags of one module."""
SEED = 0
"""Of the inputs, as `measure.Settings` has it."""
Gains = dict[str, dict[str, float]]
"""Peer → module → how many times as fast as the baseline it is."""


def gains(base: Mapping[str, float]) -> Gains:
    """Return what all peers gain over the milliseconds of the baseline."""
    lines = list(base)
    found = {
        name: {line: base[line] / one for line, one in times.items()}
        for name, times in timed(lines).items()
    }
    flags = {line: best_flags(line) for line in lines}
    found[IREE] = {line: base[line] / one for line, one in flags.items() if one is not None}
    return {name: times for name, times in found.items() if times}


def best_flags(line: str) -> float | None:
    """Return the milliseconds by IREE's best flags; None if IREE does not compile the module."""
    given, until = problems.of_line(line), time.monotonic() + SECONDS
    try:
        found = tune.tune(generalized(given.text), until=until, length=given.length)
    except TokmillError as error:
        print(f"{line}: {error}", file=sys.stderr, flush=True)
        return None
    flags = [one.nanoseconds for one in found.tried if one.status == "ok" and not one.way.last]
    return min(flags) / 1e6


def timed(lines: Sequence[str]) -> Gains:
    """Return numpy's and torch's milliseconds, of a process with one thread.

    Which kernels OpenBLAS takes is left to it.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, "1")
    environment.pop("OPENBLAS_CORETYPE", None)
    command = [sys.executable, __file__, *lines]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    found: Gains = json.loads(done.stdout)
    return found


def time_here(lines: Sequence[str]) -> None:
    """Print the CPU times of numpy and torch in this process as JSON."""
    import torch

    torch.set_num_threads(1)
    found: Gains = {"numpy": {}, "torch": {}}
    with torch.inference_mode():
        for line in lines:
            given = inputs(line)
            for name, made in (("numpy", numpy_of(line, given)), ("torch", torch_of(line, given))):
                if made is not None:
                    found[name][line] = least(made)
    print(json.dumps(found))


def inputs(line: str) -> list[np.ndarray[Any, Any]]:
    from tokmill.mlir.iree import executor

    return executor.inputs(problems.of_line(line).text, SEED)[1]


def least(function: Callable[[], Any]) -> float:
    """Return the least CPU milliseconds of a call, over half a second."""
    function()
    times, begun = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begun < 0.5:
        start = time.thread_time_ns()
        function()
        times.append(time.thread_time_ns() - start)
    return min(times) / 1e6


def parts_of(line: str) -> tuple[str, list[int], bool] | None:
    """Return operation, sizes, and whether a relu follows; None for other chains."""
    first, *others = [part.split() for part in line.split(",")]
    if others not in ([], [["relu"]]):
        return None
    return first[0], [int(one) for one in first[1:]], bool(others)


def numpy_of(line: str, given: Sequence[np.ndarray[Any, Any]]) -> Callable[[], Any] | None:
    """Return a module in numpy; None: numpy has no such operation."""
    parts = parts_of(line)
    if parts is None:
        return None
    name, _, clipped = parts
    plain: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
        "matmul": lambda out: np.matmul(*given, out=out),
        "batch_matmul": lambda out: np.matmul(*given, out=out),
        "add": lambda out: np.add(*given, out=out),
        "relu": lambda out: np.maximum(*given, 0, out=out),
        "exp": lambda out: np.exp(*given, out=out),
        "reduce": lambda out: np.sum(*given, axis=-1, out=out),
    }
    if name not in plain:
        return None
    run, shape = plain[name], given[0].shape
    if "matmul" in name:
        shape = (*shape[:-1], given[1].shape[-1])
    result = np.empty(shape[:-1] if name == "reduce" else shape, np.float32)
    if clipped:
        return lambda: np.maximum(run(result), 0, out=result)
    return lambda: run(result)


def torch_of(line: str, given: Sequence[np.ndarray[Any, Any]]) -> Callable[[], Any] | None:
    """Return a module in torch; None: it is not written here.

    Convolutions with channels last give the view (N, F, H, W) of their results.
    """
    import torch
    from torch.nn import functional as F

    parts = parts_of(line)
    if parts is None:
        return None
    name, sizes, clipped = parts
    one, *others = [torch.from_numpy(array) for array in given]
    plain: dict[str, Callable[[], Any]] = {
        "matmul": lambda: one @ others[0],
        "batch_matmul": lambda: one @ others[0],
        "add": lambda: one + others[0],
        "relu": lambda: one.relu(),
        "exp": lambda: one.exp(),
        "reduce": lambda: one.sum(-1),
        # The module has no subtraction of the largest, so torch's softmax would do more.
        "softmax": lambda: (powers := one.exp()) / powers.sum(-1, keepdim=True),
    }
    if name.startswith("conv_2d"):
        image, kernel, stride = one, others[0], sizes[5] if len(sizes) > 5 else 1
        if name.endswith("nhwc"):
            # Of the shapes that torch wants, the image in the same order in memory.
            image = image.permute(0, 3, 1, 2)
            kernel = kernel.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        plain[name] = lambda: F.conv2d(image, kernel, stride=stride)
    if name == "pooling":
        stride = sizes[4] if len(sizes) > 4 else 1
        plain[name] = lambda: F.max_pool2d(one, sizes[3], stride)
    if name not in plain:
        return None
    run = plain[name]
    return (lambda: run().relu_()) if clipped else run


if __name__ == "__main__":
    time_here(sys.argv[1:])
