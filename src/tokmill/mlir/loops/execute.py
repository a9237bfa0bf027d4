"""Run in a child: compile a module with and without a schedule, time both, compare what they give.

Buffers are page-aligned, as alignment alone changes the time of a vector kernel by a third, and
hold random numbers: pages of zeros that were never written share one page of memory, which
flatters whatever is bound by memory. Outputs are poisoned before each run, so that what a kernel
does not write is seen. Times are CPU time of the thread; the least of several runs, baseline and
candidate in turns.
"""

import ctypes
import mmap
import time
from collections import OrderedDict
from typing import Any, Protocol

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.mlir.loops import lower
from tokmill.mlir.modules import dtypes, operations, toolkit

NAME = "tokmill_kernel"
KEPT, KEPT_BYTES = 32, 256 << 20
"""Baselines that stay compiled, and the bytes of their buffers: a policy schedules many modules."""
SHORTEST = 200_000
"""Nanoseconds that one timing takes at least: shorter kernels are run several times in it."""
MOST_REPEATS = 1000
FEWEST = 3
"""Runs, whatever is asked for: one alone would say that there is no noise."""
_baselines: OrderedDict[str, "Kernel"] = OrderedDict()


class Timed(Protocol):
    """What can be timed."""

    def run(self, times: int = 1) -> float:
        """Run so many times; return the time of one run in nanoseconds."""
        ...


class Kernel:
    """A compiled module and its buffers."""

    def __init__(self, text: str, schedule: str | None, seed: int) -> None:
        inside = toolkit.context()
        module = toolkit.parse(text, inside, "module")
        with inside, toolkit.ir().Location.unknown():
            operations.find(module, "module")
            function = operations.entry(module, "module")
            kind = function.function_type.value
            shapes = [operations.type_of(one, "module") for one in (*kind.inputs, *kind.results)]
            self.inputs = len(kind.inputs)
            # `main` would be the one of this process.
            function.attributes["sym_name"] = toolkit.ir().StringAttr.get(NAME)
            function.attributes["llvm.emit_c_interface"] = toolkit.ir().UnitAttr.get()
            _protect(function)
            if schedule is not None:
                lower.transform(module, schedule)
            lower.lower(module)
            self.engine = lower.compiled(module)
        self.buffers = [_aligned(shape, dtypes.of(element)) for shape, element in shapes]
        dtypes.fill(self.buffers[: self.inputs], seed, text)
        descriptor = plugins.require("torch_mlir.runtime").get_ranked_memref_descriptor
        self._descriptors = [descriptor(buffer) for buffer in self.buffers]
        # The engine's calling convention: an array of pointers to arguments, which are themselves
        # pointers to descriptors.
        self._pointers = [ctypes.pointer(one) for one in self._descriptors]
        self._packed = (ctypes.c_void_p * len(self._pointers))(
            *[ctypes.addressof(one) for one in self._pointers]
        )
        try:
            # Only here LLVM makes code; what it cannot make is not there.
            self._call = self.engine.lookup(NAME)
        except RuntimeError as error:
            raise lower.Refused(
                f"LLVM makes no code of the module: {error}",
                hint="another schedule of this operation may pass",
            ) from None

    def run(self, times: int = 1) -> float:
        """Run so many times; return the CPU time of one in nanoseconds."""
        since = time.thread_time_ns()
        for _ in range(times):
            self._call(self._packed)
        return (time.thread_time_ns() - since) / times

    def poison(self) -> None:
        dtypes.poison(self.outputs)

    @property
    def outputs(self) -> list[np.ndarray[Any, Any]]:
        return self.buffers[self.inputs :]


def _protect(function: Any) -> None:
    """Forbid to write results over arguments: the next run reads them again."""
    bindings = toolkit.ir()
    unwritable = {"bufferization.writable": bindings.BoolAttr.get(False)}
    function.arg_attrs = [
        bindings.DictAttr.get({one.name: one.attr for one in given} | unwritable)
        for given in function.arg_attrs
    ]


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Time a schedule of a module beside the module as it is.

    `request`: `module`, `schedule` (texts), `runs`, `seed`, `length` (longest sum of additions),
    `most_seconds` of CPU for all runs. The answer: `status` (`ok`, `wrong` or `refused`),
    `reason`, and for what ran `times` and `baseline` (ns, a run each), `error` and
    `allowed`, the largest difference found and allowed, in units of the largest result.
    """
    module, seed = request["module"], request["seed"]
    base = _baseline(module, seed)
    try:
        kernel = Kernel(module, request["schedule"], seed)
    except lower.Refused as refused:
        return {"status": "refused", "reason": refused.what}
    for one in (base, kernel):
        one.poison()
        one.run()
    error, allowed = dtypes.difference(base.outputs, kernel.outputs, request["length"])
    answer = {"error": error, "allowed": allowed}
    if not error <= allowed:
        return answer | {"status": "wrong", "reason": f"results differ by {error:.2g}"}
    times, baseline = in_turns(base, kernel, request["runs"], request["most_seconds"])
    return answer | {"status": "ok", "reason": "", "times": times, "baseline": baseline}


def _baseline(module: str, seed: int) -> Kernel:
    key = f"{seed} {module}"
    if key not in _baselines:
        try:
            _baselines[key] = Kernel(module, None, seed)
        except lower.Refused as refused:
            raise TokmillError(
                f"the module cannot be compiled without a schedule: {refused.what}",
                hint="other operations, or another way to write them, may pass",
            ) from None
        while len(_baselines) > 1 and (len(_baselines) > KEPT or _buffer_bytes() > KEPT_BYTES):
            _baselines.popitem(last=False)
    _baselines.move_to_end(key)
    return _baselines[key]


def _buffer_bytes() -> int:
    return sum(buffer.nbytes for kernel in _baselines.values() for buffer in kernel.buffers)


def in_turns(
    base: Timed, kernel: Timed, runs: int, most_seconds: float
) -> tuple[list[float], list[float]]:
    """Return times and those of the baseline, in ns: each run long enough for the clock."""
    times: list[float] = []
    baseline: list[float] = []
    since = time.thread_time()
    often = [repeats(one) for one in (base, kernel)]
    while len(times) < max(runs, FEWEST) and (
        len(times) < FEWEST or time.thread_time() - since < most_seconds
    ):
        pair = base.run(often[0]), kernel.run(often[1])
        # The clock of a virtual machine may stand still for a while.
        if min(pair) > 0:
            baseline.append(pair[0])
            times.append(pair[1])
    return times, baseline


def repeats(one: Timed) -> int:
    """Run once; return how many runs make one timing long enough for the clock."""
    return max(1, min(MOST_REPEATS, int(SHORTEST / max(one.run(), 1))))


def _aligned(shape: tuple[int, ...], kind: Any) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
    pages = mmap.mmap(-1, max(size, 1))
    buffer: np.ndarray[Any, Any] = np.frombuffer(pages, np.uint8, size).view(kind)
    return buffer.reshape(shape)
