"""`tokmill rl tune` on a whole model, from an ONNX file to a program."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from onnx_models import small_model
from tokmill.mlir.iree.tune import FLAGS, Timed, Tuned, Way
from tokmill.mlir.modules import generators
from tokmill.rl.commands import rl_tune

Here = Callable[..., tuple[str, str]]
LOOP = """
func.func @main(%a: tensor<32x32xf32>, %b: tensor<32x32xf32>) -> tensor<32x32xf32> {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %three = arith.constant 3 : index
  %nothing = arith.constant 0.0 : f32
  %made = scf.for %i = %zero to %three step %one iter_args(%now = %a) -> tensor<32x32xf32> {
    %empty = tensor.empty() : tensor<32x32xf32>
    %begun = linalg.fill ins(%nothing : f32) outs(%empty : tensor<32x32xf32>) -> tensor<32x32xf32>
    %next = linalg.matmul ins(%now, %b : tensor<32x32xf32>, tensor<32x32xf32>)
      outs(%begun : tensor<32x32xf32>) -> tensor<32x32xf32>
    scf.yield %next : tensor<32x32xf32>
  }
  return %made : tensor<32x32xf32>
}
"""


def tuned(here: Here, model: Path | str, name: Path | str) -> Any:
    return json.loads(here("rl", "tune", model, "-o", name, "--json")[0])


def compiles(line: str, folder: Path) -> None:
    tool, *rest = shlex.split(line)
    assert tool == "iree-compile"
    module = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
    subprocess.run([*module, *rest], check=True, cwd=folder)
    assert (folder / "MODULE.vmfb").stat().st_size


def test_a_model_is_tuned_and_the_printed_line_compiles_it(tmp_path: Path, here: Here) -> None:
    told = tuned(here, small_model(tmp_path / "model.onnx", 64), tmp_path / "some")
    assert [one["name"] for one in told["tried"]] == ["default", "O3", "data tiling"]
    assert {one["status"] for one in told["tried"]} == {"ok"}
    assert told["milliseconds"] <= told["default_milliseconds"]
    assert told["other_input_difference"] > told["allowed_error"]
    assert [(one["name"], one["status"]) for one in told["engines"]] == [
        ("onnxruntime", "ok"),
        ("openvino", "ok"),
    ]
    compiles(told["compile"], tmp_path)
    assert sorted(path.name for path in tmp_path.glob("some*")) == [
        "some.model.irpa", "some.model.mlir",
    ]  # fmt: skip
    assert (tmp_path / "some.model.irpa").stat().st_size


@pytest.mark.parametrize("form", ["onnx", "iree", "linalg"])
def test_the_time_begins_before_the_model_is_read(form: str, tmp_path: Path, here: Here) -> None:
    model = tmp_path / f"model.{'onnx' if form == 'onnx' else 'mlir'}"
    if form == "onnx":
        small_model(model, 64)
    else:
        kind = "util.func public" if form == "iree" else "func.func"
        end = "util.return" if form == "iree" else "return"
        model.write_text(
            f"{kind} @f(%a: tensor<4xf32>) -> tensor<4xf32> {{ {end} %a : tensor<4xf32> }}"
        )
    said = here("rl", "tune", model, "-o", "some", "--max-time=0.006s", code=1)[1]
    assert "hint: allow more by --max-time" in said
    assert not list(tmp_path.glob("some*"))


def test_two_processes_do_not_tune_into_one_file(tmp_path: Path, here: Here) -> None:
    words = ["rl", "tune", "matmul 16 16 16", "-o", str(tmp_path / "some"), "--quiet"]
    first = subprocess.Popen(
        [sys.executable, "-m", "tokmill", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not list(tmp_path.glob(".some*.lock")):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    _, said = here(*words, code=5)
    assert "another process is writing some.model.mlir" in said and "hint:" in said
    # One that was killed does not keep others out.
    first.send_signal(signal.SIGKILL)
    first.communicate()
    here(*words)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".lock")]


def test_the_printed_line_compiles_operations_that_iree_does_not_name(
    tmp_path: Path, here: Here
) -> None:
    """`linalg.add` is written as what it computes."""
    module = tmp_path / "sum.mlir"
    module.write_text(generators.chain("add 16 64"))
    assert "linalg.add" in module.read_text()
    compiles(tuned(here, module, tmp_path / "sum")["compile"], tmp_path)


def shown(best: int, moved: float, capsys: Any, engines: Sequence[Timed] = ()) -> str:
    tried = [
        Timed(way=Way(name, FLAGS[name]), nanoseconds=ns, noise=0.0, error=0.0, allowed=1e-6,
              moved=moved)
        for name, ns in (("default", 1e6), ("O3", 5e5))
    ]  # fmt: skip
    result = Tuned(tried=tried, best=tried[best], module="", engines=list(engines))
    rl_tune._print(result, "iree-compile", False)
    said: str = capsys.readouterr().err
    return said


def test_without_a_gain_nothing_is_to_be_applied(capsys: Any) -> None:
    for best in (0, 1):
        said = shown(best, 9.0, capsys)
        assert ("to apply it" in said) == (best == 1)
        assert ("nothing is faster than IREE's default" in said) == (best == 0)


def test_an_engine_with_other_results_is_said(capsys: Any) -> None:
    other = Timed(way=Way("onnxruntime", ()), status="wrong", error=0.5, allowed=1e-6)
    assert "onnxruntime gives other results than IREE's default" in shown(1, 9.0, capsys, [other])
    other.status = "ok"
    assert "other results" not in shown(1, 9.0, capsys, [other])


@pytest.mark.parametrize("moved", [0.0, 1e-9, 0.5, float("nan")])
def test_results_that_no_input_changes_are_said(moved: float, capsys: Any) -> None:
    assert ("another input gives the same results" in shown(1, moved, capsys)) == (moved != 0.5)


def test_a_model_whose_operations_stand_in_a_loop_is_tuned_as_a_whole(
    tmp_path: Path, here: Here
) -> None:
    folder = tmp_path / "two words; true"
    folder.mkdir()
    module, name = folder / "loop.mlir", folder / "some name"
    module.write_text(LOOP)
    told = tuned(here, module, name)
    assert "default" in {one["name"] for one in told["tried"] if one["status"] == "ok"}
    # The printed line is one for a shell.
    assert shlex.split(told["compile"])[1] in (str(module), f"{name}.model.mlir")


def onnx_model(path: Path, nodes: Any, inputs: Any, outputs: Any, weights: Any = ()) -> Path:
    """Write a model of opset 18; inputs and outputs are names with their type and sizes."""
    import onnx
    from onnx import helper, numpy_helper

    kind = helper.make_tensor_value_info
    values = [[kind(*one) for one in some] for some in (inputs, outputs)]
    named = [numpy_helper.from_array(array, name) for name, array in weights]
    made = [helper.make_node(*one[:3], **(one[3] if one[3:] else {})) for one in nodes]
    graph = helper.make_graph(made, "g", *values, named)
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


def test_an_input_that_a_model_does_not_use_is_given_all_the_same(
    tmp_path: Path, here: Here
) -> None:
    from onnx import TensorProto

    kinds = [("before", TensorProto.INT64, [3]), ("x", 1, [8, 8]), ("after", 1, [2, 5])]
    model = onnx_model(tmp_path / "m.onnx", [("Relu", ["x"], ["y"])], kinds, [("y", 1, [8, 8])])
    told = tuned(here, model, tmp_path / "some")
    assert {one["status"] for one in told["tried"] + told["engines"]} == {"ok"}
    assert told["other_input_difference"] > told["allowed_error"]
    compiles(told["compile"], tmp_path)


def test_what_the_body_of_a_loop_takes_is_no_input(tmp_path: Path, here: Here) -> None:
    import numpy as np
    from onnx import TensorProto, helper

    kind = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["on"], ["further"]),
            helper.make_node("Relu", ["a"], ["b"]),
        ],
        "body",
        [
            kind("i", TensorProto.INT64, []),
            kind("on", TensorProto.BOOL, []),
            kind("a", 1, [8, 8]),
        ],
        [kind("further", TensorProto.BOOL, []), kind("b", 1, [8, 8])],
    )
    nodes = [("Loop", ["n", "t", "x"], ["y"], {"body": body})]
    weights = [("n", np.array(3)), ("t", np.array(True))]
    model = onnx_model(tmp_path / "m.onnx", nodes, [("x", 1, [8, 8])], [("y", 1, [8, 8])], weights)
    told = tuned(here, model, tmp_path / "some")
    assert {one["status"] for one in told["tried"] + told["engines"]} == {"ok"}


@pytest.mark.parametrize("form", ["onnx", "linalg"])
def test_f64_stays_f64(form: str, tmp_path: Path, here: Here) -> None:
    import numpy as np
    from onnx import TensorProto

    if form == "onnx":
        # In f32 each of these weights is 1.
        weights = 1 + np.arange(64.0).reshape(8, 8) * 1e-10
        x, y = [(name, TensorProto.DOUBLE, [8, 8]) for name in "xy"]
        nodes = [("MatMul", ["x", "w"], ["y"])]
        model = onnx_model(tmp_path / "m.onnx", nodes, [x], [y], [("w", weights)])
    else:
        model = tmp_path / "m.mlir"
        model.write_text(LOOP.replace("f32", "f64"))
    told = tuned(here, model, tmp_path / "some")
    assert {one["status"] for one in told["tried"]} == {"ok"}
    if form == "onnx":
        assert told["engines"][0] | {"milliseconds": 0} == {
            "name": "onnxruntime", "status": "ok", "milliseconds": 0,
        }  # fmt: skip
    compiles(told["compile"], tmp_path)
    assert "--iree-input-demote-f64-to-f32=false" in told["compile"]
