"""Run in a child: compile modules by IREE, time them, compare what they give.

Programs run on one thread by IREE's runtime (`local-sync`); times are CPU time of that thread, the
least of several runs in turns. Results are in buffers that IREE makes anew for each run.
"""

import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.base.files import path_from_text
from tokmill.mlir.iree import compiler, layout
from tokmill.mlir.iree.compiler import Refused
from tokmill.mlir.iree.engines import Engine
from tokmill.mlir.loops import execute
from tokmill.mlir.modules import dtypes, operations, toolkit

LEAST_SECONDS, MOST_SECONDS = 1.0, 60.0
"""CPU seconds before which rounds of whole models do not end, however many there were, and after
which none is begun: what others do to caches and memory often lasts for some tenths of a second."""


class Program:
    """A compiled module and its inputs."""

    def __init__(
        self,
        code: bytes,
        inputs: Sequence[np.ndarray[Any, Any]] | int,
        entry: str = "",
        parameters: str = "",
        text: str = "",
    ) -> None:
        """Load a program; `inputs` may be the seed of random ones, `parameters` a file.

        `text`: the module, which says what the inputs are where the program does not.
        """
        runtime, device, hal = _runtime()
        instance = runtime.VmInstance()
        module = runtime.VmModule.copy_buffer(instance, code)
        modules = [hal(instance), module]
        if parameters:
            index = runtime.ParameterIndex()
            index.load(parameters)
            provider = index.create_provider(scope="model")
            modules.insert(1, runtime.create_io_parameters_module(instance, provider))
        self._context = runtime.VmContext(instance, modules)
        self._function = module.lookup_function(entry or _entry(module))
        if isinstance(inputs, int):
            inputs = _drawn(self._function, inputs, text)
        self._runtime, self._device, self.given = runtime, device, inputs
        self._buffers = [self._buffer(one) for one in inputs]
        self._inputs = self._listed()
        self._written: list[int] | None = None

    def run(self, times: int = 1) -> float:
        """Run so many times; return the CPU time of this thread for one, in nanoseconds."""
        if self._written is None:
            self.outputs()
        spent, since = 0, time.thread_time_ns()
        for _ in range(times):
            if self._written:
                spent += time.thread_time_ns() - since
                self._restore()
                since = time.thread_time_ns()
            self._call()
        return (spent + time.thread_time_ns() - since) / times

    def _buffer(self, given: np.ndarray[Any, Any]) -> Any:
        runtime = self._runtime
        return self._device.allocator.allocate_buffer_copy(
            memory_type=runtime.MemoryType.DEVICE_LOCAL,
            allowed_usage=runtime.BufferUsage.DEFAULT | runtime.BufferUsage.MAPPING,
            device=self._device,
            buffer=given,
            element_type=runtime.array_interop.map_dtype_to_hal_element_type(given.dtype),
        )

    def _listed(self) -> Any:
        inputs = self._runtime.VmVariantList(len(self._buffers))
        for buffer in self._buffers:
            inputs.push_ref(buffer)
        return inputs

    def _changed(self) -> list[int]:
        """Return the arguments that a run has changed.

        IREE writes a result over an argument that an operation takes as its output, and the next
        run would read that. Such arguments are made anew before each run, outside of its time.
        """
        return [
            number
            for number, (given, buffer) in enumerate(zip(self.given, self._buffers, strict=True))
            if given.tobytes() != self._host(buffer).tobytes()
        ]

    def _restore(self) -> None:
        for number in self._written or ():
            self._buffers[number] = self._buffer(self.given[number])
        if self._written:
            self._inputs = self._listed()

    def _host(self, view: Any) -> np.ndarray[Any, Any]:
        return self._runtime.DeviceArray(self._device, view).to_host()

    def _call(self) -> Any:
        results = self._runtime.VmVariantList(1)
        self._context.invoke(self._function, self._inputs, results)
        return results

    def outputs(self) -> list[np.ndarray[Any, Any]]:
        """Run once more and return what it computed."""
        self._restore()
        results = self._call()
        if self._written is None:
            self._written = self._changed()
        return [
            self._host(results.get_as_object(number, self._runtime.HalBufferView))
            for number in range(len(results))
        ]


def _entry(module: Any) -> str:
    names = [
        name
        for name in module.function_names
        if not name.startswith("__") and not name.endswith("$async")
    ]
    if len(names) != 1:
        raise TokmillError(
            f"the model has {len(names)} functions: {', '.join(names[:5])}", hint="keep one of them"
        )
    return str(names[0])


def _drawn(function: Any, seed: int, text: str) -> list[np.ndarray[Any, Any]]:
    """Return random inputs for a function, by the declaration that IREE keeps of it."""
    declared = function.reflection.get("iree.abi.declaration", "")
    kinds = re.findall(r"%\w+: ([^,)]+)", declared.partition(") ->")[0])
    if not declared:
        # Modules of torch's importer have functions with fences, which are not declared.
        match = re.findall(r'"hal\.tensor\.import"\(%arg(\d+).*-> (tensor<[^>]+>)', text)
        kinds = [kind for _, kind in sorted((int(number), kind) for number, kind in match)]
    arrays = []
    for kind in kinds:
        parts = re.match(r"tensor<((?:\d+x)*)(\w+)>", kind)
        if parts is None or parts[2] not in dtypes.TYPES:
            raise TokmillError(
                f"the model takes a {kind.strip()}",
                hint=f"inputs are tensors of fixed shapes, of {', '.join(dtypes.TYPES)}",
            )
        shape = tuple(map(int, parts[1].split("x")[:-1]))
        arrays.append(np.empty(shape, dtypes.of(parts[2])))
    dtypes.fill(arrays, seed, text)
    # Whole numbers are mostly indices, such as tokens of a text.
    return [abs(one) if one.dtype.kind == "i" else one for one in arrays]


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """Compile a whole model into a file.

    `request`: `module`, `flags`, `path`. The answer is empty, or `refused` with the reason.
    """
    try:
        code = compiler.compiled(request["module"], request["flags"])
    except Refused as refused:
        return {"refused": refused.what}
    Path(request["path"]).write_bytes(code)
    return {}


def race(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Run compiled models in turns, and compare what they give with what the first one gives.

    `request`: `programs` (engine and path, IREE's first), `module` (text, which says what the
    inputs are), `parameters` (a file or ""), `runs`, `seed`, `length`. The answer is for each
    `times` (ns), `error`, `allowed`, and `moved`: the difference that another input makes to what
    the first one gives.
    """

    def compiled_by_iree(path: str, seed: int) -> Program:
        code = Path(path).read_bytes()
        return Program(code, seed, "", path_from_text(request["parameters"]), request["module"])

    default_path = request["programs"][0][1]
    first = compiled_by_iree(default_path, request["seed"])
    programs = [first] + [
        compiled_by_iree(path, request["seed"])
        if engine == "iree"
        else Engine(engine, path_from_text(path), first.given)
        for engine, path in request["programs"][1:]
    ]
    wanted = first.outputs()
    other = compiled_by_iree(default_path, request["seed"] + 1).outputs()
    moved, _ = dtypes.difference(wanted, other, request["length"])
    answer: list[dict[str, Any]] = []
    for program in programs:
        error, allowed = dtypes.difference(wanted, program.outputs(), request["length"])
        answer.append({"times": [], "error": error, "allowed": allowed, "moved": moved})
    often = [execute.repeats(one) for one in programs]
    since = time.thread_time()
    rounds = 0
    while _needs_more_rounds(rounds, request["runs"], time.thread_time() - since):
        rounds += 1
        for program, times, entry in zip(programs, often, answer, strict=True):
            # The clock of a virtual machine may stand still for a while.
            if (nanoseconds := program.run(times)) > 0:
                entry["times"].append(nanoseconds)
    return answer


def _needs_more_rounds(rounds: int, wanted: int, seconds: float) -> bool:
    if rounds < execute.FEWEST:
        return True
    return seconds < LEAST_SECONDS or (rounds < wanted and seconds < MOST_SECONDS)


@cache
def _runtime() -> Any:
    runtime = plugins.require("iree.runtime")
    device = runtime.get_device("local-sync")
    return runtime, device, lambda instance: runtime.create_hal_module(instance, device)


def answer(request: dict[str, Any]) -> Any:
    """Answer a request: what `ask` names, or what IREE's default is worth if it names nothing."""
    other: dict[str, Callable[[dict[str, Any]], Any]] = {
        "compile": compiled,
        "race": race,
        "channels last": lambda asked: layout.channels_last(asked["module"]),
    }
    asked = request.get("ask")
    return other[asked](request) if asked in other else default(request)


def default(request: dict[str, Any]) -> dict[str, Any]:
    """Time a module as IREE compiles it by default.

    Request and answer are those of `execute.measure`, without a schedule.
    """
    try:
        code = compiler.compiled(request["module"])
    except Refused as refused:
        return {"status": "refused", "reason": refused.what}
    entry, given = inputs(request["module"], request["seed"])
    program = Program(code, given, entry)
    times, baseline = execute.in_turns(program, program, request["runs"], request["most_seconds"])
    return {
        "status": "ok", "reason": "", "error": 0.0, "allowed": 0.0,
        "times": times, "baseline": baseline,
    }  # fmt: skip


def inputs(module: str, seed: int) -> tuple[str, list[np.ndarray[Any, Any]]]:
    """Return the name of a module's function, and random inputs for it."""
    inside = toolkit.context()
    parsed = toolkit.parse(module, inside, "module")
    with inside:
        function = operations.entry(parsed, "module")
        shapes = [operations.type_of(one, "module") for one in function.function_type.value.inputs]
        name = function.name.value
    arrays = [np.empty(shape, dtypes.of(element)) for shape, element in shapes]
    dtypes.fill(arrays, seed, module)
    return name, arrays
