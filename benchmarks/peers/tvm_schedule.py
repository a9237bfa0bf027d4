"""An operation tuned by TVM's MetaSchedule, on one thread. Run by a Python that has apache-tvm.

    TVM_NUM_THREADS=1 python tvm_schedule.py TRIALS SEED FOLDER LINE

The line is one of `tokmill.mlir.modules.problem`. What is tuned is compared with TVM's unscheduled
loops, then timed: CPU time of this thread, the least of rounds. The last line that is printed is
JSON: `ns`, `trials`, `seconds` of tuning, `largest_difference` relative to the largest result.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import te
from tvm.s_tir import meta_schedule

ROUNDS = 15


def matmul(rows: int, columns: int, depth: int) -> list[Any]:
    """Return arguments and result: (rows, depth) by (depth, columns)."""
    left, right = te.placeholder((rows, depth)), te.placeholder((depth, columns))
    k = te.reduce_axis((0, depth))
    made = te.compute((rows, columns), lambda i, j: te.sum(left[i, k] * right[k, j], k))
    return [left, right, made]


def batch_matmul(batch: int, rows: int, columns: int, depth: int) -> list[Any]:
    """Return arguments and result of one product for each of a batch."""
    left = te.placeholder((batch, rows, depth))
    right = te.placeholder((batch, depth, columns))
    k = te.reduce_axis((0, depth))
    made = te.compute(
        (batch, rows, columns), lambda b, i, j: te.sum(left[b, i, k] * right[b, k, j], k)
    )
    return [left, right, made]


def conv_2d_nchw(n: int, c: int, size: int, f: int, kernel: int, stride: int = 1) -> list[Any]:
    """Return arguments and result of a convolution without padding."""
    image, weights = te.placeholder((n, c, size, size)), te.placeholder((f, c, kernel, kernel))
    out = (size - kernel) // stride + 1
    axes = [te.reduce_axis((0, extent)) for extent in (c, kernel, kernel)]
    made = te.compute(
        (n, f, out, out),
        lambda b, o, y, x: te.sum(
            image[b, axes[0], y * stride + axes[1], x * stride + axes[2]]
            * weights[o, axes[0], axes[1], axes[2]],
            axes,
        ),
    )
    return [image, weights, made]


def conv_2d_nhwc(n: int, c: int, size: int, f: int, kernel: int, stride: int = 1) -> list[Any]:
    """Return arguments and result of a convolution with channels last, kernels (h, w, c, f)."""
    image, weights = te.placeholder((n, size, size, c)), te.placeholder((kernel, kernel, c, f))
    out = (size - kernel) // stride + 1
    axes = [te.reduce_axis((0, extent)) for extent in (kernel, kernel, c)]
    made = te.compute(
        (n, out, out, f),
        lambda b, y, x, o: te.sum(
            image[b, y * stride + axes[0], x * stride + axes[1], axes[2]]
            * weights[axes[0], axes[1], axes[2], o],
            axes,
        ),
    )
    return [image, weights, made]


def pooling(n: int, c: int, size: int, window: int, stride: int) -> list[Any]:
    """Return argument and result of a maximum over windows."""
    image = te.placeholder((n, c, size, size))
    out = (size - window) // stride + 1
    axes = [te.reduce_axis((0, window)) for _ in range(2)]
    made = te.compute(
        (n, c, out, out),
        lambda b, o, y, x: te.max(image[b, o, y * stride + axes[0], x * stride + axes[1]], axes),
    )
    return [image, made]


def reduce(*sizes: int) -> list[Any]:
    """Return argument and result of a sum over the last dimension."""
    given, k = te.placeholder(sizes), te.reduce_axis((0, sizes[-1]))
    return [given, te.compute(sizes[:-1], lambda *at: te.sum(given[(*at, k)], k))]


def softmax(rows: int, columns: int) -> list[Any]:
    """Return argument and result of exponentials by their sum, no largest taken away."""
    given, k = te.placeholder((rows, columns)), te.reduce_axis((0, columns))
    powers = te.compute((rows, columns), lambda i, j: te.exp(given[i, j]))
    sums = te.compute((rows,), lambda i: te.sum(powers[i, k], k))
    return [given, te.compute((rows, columns), lambda i, j: powers[i, j] / sums[i])]


OPERATIONS = {
    one.__name__: one
    for one in (matmul, batch_matmul, conv_2d_nchw, conv_2d_nhwc, pooling, reduce, softmax)
}


def main(trials: int, seed: int, folder: Path, line: str) -> dict[str, Any]:
    """Tune, compare, and time an operation."""
    name, *sizes = line.split()
    arguments = OPERATIONS[name](*map(int, sizes))
    module = tvm.IRModule({"main": te.create_prim_func(arguments)})
    cpu = tvm.get_global_func("target.llvm_get_system_cpu")()
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": 1})
    since = time.perf_counter()
    database = meta_schedule.tune_tir(
        module,
        target,
        work_dir=str(folder),
        max_trials_global=trials,
        num_trials_per_iter=16,
        cost_model="xgb",
        num_tuning_cores=1,
        seed=seed,
    )
    seconds = time.perf_counter() - since
    scheduled = meta_schedule.tir_integration.compile_tir(database, module, target)
    if scheduled is None:
        raise SystemExit(f"no schedule of {line} was found in {trials} trials")
    tuned = tvm.compile(scheduled.mod, target=target)["main"]
    plain = tvm.compile(module, target=target)["main"]
    draw = np.random.default_rng(0)
    inputs = [
        tvm.runtime.tensor(draw.standard_normal([int(n) for n in one.shape], np.float32))
        for one in arguments[:-1]
    ]
    shape = [int(n) for n in arguments[-1].shape]
    outputs = [tvm.runtime.tensor(np.zeros(shape, np.float32)) for _ in range(2)]
    tuned(*inputs, outputs[0])
    plain(*inputs, outputs[1])
    results = [one.numpy() for one in outputs]
    difference = float(np.abs(results[0] - results[1]).max() / np.abs(results[1]).max())
    if not difference < 1e-4:
        raise SystemExit(f"{line}: what was tuned differs by {difference:g}")
    least = math.inf
    for _ in range(ROUNDS):
        since_ns = time.thread_time_ns()
        tuned(*inputs, outputs[0])
        times = max(1, min(200, int(1e6 / max(time.thread_time_ns() - since_ns, 1))))
        since_ns = time.thread_time_ns()
        for _ in range(times):
            tuned(*inputs, outputs[0])
        least = min(least, (time.thread_time_ns() - since_ns) / times)
    return {
        "ns": least,
        "trials": len(database),
        "seconds": seconds,
        "largest_difference": difference,
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])))
