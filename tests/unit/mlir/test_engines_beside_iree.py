"""onnxruntime and OpenVINO compute what a model says, whatever its types."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tokmill.mlir.iree.engines import ENGINES, Engine

TYPES = {
    TensorProto.FLOAT: (np.dtype(np.float32), np.dtype(np.float32)),
    TensorProto.FLOAT16: (np.dtype(np.float16), np.dtype(np.float16)),
    TensorProto.BFLOAT16: (np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.bfloat16)),
    # IREE's types of whole numbers have no sign.
    TensorProto.UINT8: (np.dtype(np.int8), np.dtype(np.uint8)),
    TensorProto.INT64: (np.dtype(np.int64), np.dtype(np.int64)),
}
"""Type in ONNX → that of the arrays that are given, and of the results."""


def difference(path: Path, kind: int) -> Path:
    """Write y = a - b, whose arguments must not be swapped."""
    given = [helper.make_tensor_value_info(name, kind, [2, 3]) for name in ("a", "b")]
    result = helper.make_tensor_value_info("y", kind, [2, 3])
    graph = helper.make_graph([helper.make_node("Sub", ["a", "b"], ["y"])], "g", given, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("kind", TYPES)
def test_results_are_those_of_numpy(name: str, kind: int, tmp_path: Path) -> None:
    given, made = TYPES[kind]
    a = np.array([[7, 6, 5], [4, 3, 2]]).astype(given)
    b = np.array([[0, 1, 0], [1, 0, 1]]).astype(given)
    path = str(difference(tmp_path / "m.onnx", kind))
    if (name, kind) == ("onnxruntime", TensorProto.BFLOAT16):
        with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
            Engine(name, path, [a, b])
        return
    engine = Engine(name, path, [a, b])
    (result,) = engine.outputs()
    expected: Any = [[7, 5, 5], [3, 3, 1]]
    assert result.astype(np.float64).tolist() == expected
    assert result.dtype.itemsize == made.itemsize
    assert engine.run(2) > 0
    assert a.astype(np.float64).tolist() == [[7, 6, 5], [4, 3, 2]]


def test_openvino_sends_nothing(tmp_path: Path) -> None:
    """Its import sends a message where it finds its package for that, which is installed here."""
    path = difference(tmp_path / "m.onnx", TensorProto.FLOAT)
    script = """if True:
        import sys
        import numpy as np
        from importlib.util import find_spec
        from tokmill.mlir.iree.engines import Engine
        assert find_spec("openvino_telemetry")
        ones = np.ones((2, 3), np.float32)
        Engine("openvino", sys.argv[1], [ones, ones]).run()
        print([name for name in sys.modules if name.startswith("openvino_telemetry.")])
    """
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
