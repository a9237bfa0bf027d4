"""Run in a child: a kernel with a parallel loop, and the threads that the process then has."""

from __future__ import annotations

import os
from typing import Any


def threads_of(module: str, schedule: str, threads: int) -> dict[str, Any]:
    """Return the threads of this process before and after a kernel ran, and its difference."""
    from tokmill.mlir.loops import execute
    from tokmill.mlir.modules import dtypes

    base = execute.Kernel(module, None, 0)
    base.run()
    kernel = execute.Kernel(module, schedule, 0, threads)
    before = len(os.listdir("/proc/self/task"))
    kernel.poison()
    kernel.run()
    after = len(os.listdir("/proc/self/task"))
    error, allowed = dtypes.difference(base.outputs, kernel.outputs, 64)
    return {"before": before, "after": after, "right": error <= allowed}
