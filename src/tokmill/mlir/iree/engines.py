"""Other engines that run an ONNX model on one thread: onnxruntime and OpenVINO, if installed."""

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from tokmill.mlir.modules import dtypes

Arrays = Sequence[np.ndarray[Any, Any]]


def installed() -> list[str]:
    return [name for name in ENGINES if find_spec(name)]


class Engine:
    """A model that an engine has loaded, and its inputs."""

    def __init__(self, name: str, path: str, inputs: Arrays) -> None:
        """Load an ONNX file; raises the engine's own error if it cannot run it."""
        self.outputs = ENGINES[name](path, inputs)

    def run(self, times: int = 1) -> float:
        """Run so many times; return the CPU time of this process for one, in nanoseconds.

        OpenVINO computes in a thread of its own.
        """
        since = time.process_time_ns()
        for _ in range(times):
            self.outputs()
        return (time.process_time_ns() - since) / times


def _onnxruntime(path: str, inputs: Arrays) -> Callable[[], Any]:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    given = {
        one.name: _unsigned(array) if one.type.startswith("tensor(uint") else array
        for one, array in zip(session.get_inputs(), inputs, strict=True)
    }
    return lambda: session.run(None, given)


def _openvino(path: str, inputs: Arrays) -> Callable[[], Any]:
    # Importing OpenVINO sends a message to its makers, unless this package is missing.
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = importlib.import_module("openvino").compile_model(path, "CPU", options)
    request = model.create_infer_request()
    # It gives the bits of bf16 as numbers of another type of two bytes.
    half = [one.element_type.get_type_name() == "bf16" for one in model.outputs]

    def run() -> list[np.ndarray[Any, Any]]:
        results = request.infer(list(inputs), share_inputs=True).values()
        return [
            one.view(dtypes.of("bf16")) if is_half else one
            for one, is_half in zip(results, half, strict=True)
        ]

    return run


def _unsigned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return whole numbers as unsigned ones: IREE's types have no sign."""
    return array.view(f"u{array.dtype.itemsize}")


ENGINES: dict[str, Callable[[str, Arrays], Callable[[], Any]]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
"""Package → what loads a model with its inputs and returns a function that runs it."""
