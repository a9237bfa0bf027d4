"""Tuning: layout and flags are compared on the whole model, and what fails is named."""

import time
from pathlib import Path
from typing import Any

import pytest

from tokmill.base.children.child import Ended
from tokmill.base.children.child_calls import ChildDied
from tokmill.base.errors import TokmillError
from tokmill.mlir.iree import executor, layout, tune
from tokmill.mlir.iree.tune import FLAGS, Timed, Way
from tokmill.mlir.modules import problem

PRODUCT = problem.of_line("matmul 8 8 8").text


def died(code: int, passed: str = "") -> ChildDied:
    ended = Ended(code, passed, b"", "")
    error = ChildDied(f"the process that calls some:function {ended.why()}", hint="none")
    error.ended = ended
    return error


def dying(bad: str) -> Any:
    """Return a child: what is compiled or run is decided by the flags, and some end the process."""

    def ask(request: dict[str, Any], until: float) -> Any:
        if request["ask"] == "compile":
            if bad == "late":
                raise died(-9, "3 seconds")
            if bad == "compile" and "--iree-opt-level=O3" in request["flags"]:
                raise died(-11)
            Path(request["path"]).write_text(" ".join(request["flags"]))
            return {}
        flags = [Path(path).read_text() for _, path in request["programs"]]
        if bad == "run" and any("data-tiling" in one for one in flags):
            raise died(-11)
        return [
            {
                "times": [2.0 - ("O3" in one) + ("tiling" in one) / 2] * 3,
                "error": 2.0 * (bad == "wrong" and "O3" in one), "allowed": 1.0, "moved": 9.0,
            }
            for one in flags
        ]  # fmt: skip

    return ask


CRASHED = "crashed: was killed by SIGSEGV"


@pytest.mark.parametrize(
    ("bad", "statuses", "best"),
    [
        ("compile", ["ok", CRASHED, CRASHED], "default"),
        ("run", ["ok", "ok", CRASHED], "O3"),
        ("wrong", ["ok", "wrong", "wrong"], "default"),
        ("", ["ok", "ok", "ok"], "O3"),
    ],
)
def test_a_candidate_that_ends_the_compiler_has_failed_and_is_named(
    bad: str, statuses: list[str], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_ask", dying(bad))
    found = tune.tune(PRODUCT, until=time.monotonic() + 60)
    assert [one.status for one in found.tried] == statuses
    assert found.best.way.name == best


def test_an_engine_that_fails_is_named_and_is_never_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = dying("")

    def with_engines(request: dict[str, Any], until: float) -> Any:
        name = request["programs"][-1][0] if request["ask"] == "race" else "iree"
        if name == "openvino":
            raise died(-11)
        if name == "onnxruntime":
            return [
                {"times": [one], "error": 0.0, "allowed": 1.0, "moved": 9.0} for one in (2, 0.1)
            ]
        return ask(request, until)

    monkeypatch.setattr(tune, "_ask", with_engines)
    found = tune.tune(PRODUCT, until=time.monotonic() + 60, onnx=tmp_path / "model.onnx")
    assert [one.status for one in found.engines] == ["ok", CRASHED]
    assert found.engines[0].nanoseconds == 0.1
    assert found.best.way.name == "O3"


def test_a_default_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokmillError, match="timeout: no time is left"):
        tune.tune(PRODUCT, until=time.monotonic() - 1)
    monkeypatch.setattr(tune, "_ask", dying("late"))
    with pytest.raises(TokmillError, match="timeout: took more than 3 seconds"):
        tune.tune(PRODUCT, until=time.monotonic() + 60)


def test_a_candidate_for_which_no_time_is_left_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, child = tune._ask, dying("")

    def ask(request: dict[str, Any], until: float) -> Any:
        late = "--iree-opt-data-tiling" in request.get("flags", ())
        return asked(request, 0.0) if late else child(request, until)

    monkeypatch.setattr(tune, "_ask", ask)
    found = tune.tune(PRODUCT, until=time.monotonic() + 60)
    assert [one.status for one in found.tried] == ["ok", "ok", "timeout: no time is left"]


@pytest.mark.parametrize(
    ("flags", "status", "noise", "best"),
    [
        (0.5, "ok", 0.0, "O3"),
        (0.5, "ok", 0.9, "O3"),
        (0.5, "ok", 1.1, "default"),
        (0.99, "ok", 0.0, "default"),
        (1.2, "ok", 0.0, "default"),
        (0.1, "wrong", 0.0, "default"),
        (float("nan"), "refused: some", 0.0, "default"),
    ],
)
def test_flags_that_gain_too_little_are_not_chosen(
    flags: float, status: str, noise: float, best: str
) -> None:
    default = Timed(way=Way("default", ()), nanoseconds=1e6, noise=noise)
    other = Timed(way=Way("O3", FLAGS["O3"]), nanoseconds=flags * 1e6, status=status)
    assert tune.settled([default, other]).way.name == best


def test_results_that_differ_are_wrong(tmp_path: Path) -> None:
    paths = []
    for number, line in enumerate(("matmul 16 16 16", "matmul 16 16 16, relu")):
        paths.append(tmp_path / f"{number}.vmfb")
        request = {"module": problem.of_line(line).text, "flags": []}
        executor.compiled(request | {"path": str(paths[-1])})
    request = {
        "programs": [("iree", str(path)) for path in paths],
        "module": "",
        "parameters": "",
        "runs": 1,
    }
    same, other = executor.race(request | {"seed": 0, "length": 16})
    assert same["error"] == 0
    assert other["error"] > other["allowed"]
    assert same["moved"] > same["allowed"]


CONSTANT = """
func.func @main(%image: tensor<16x16xf32>) -> tensor<16x16xf32> {
  %one = arith.constant dense<1.0> : tensor<16x16xf32>
  %empty = tensor.empty() : tensor<16x16xf32>
  %sum = linalg.add ins(%one, %one : tensor<16x16xf32>, tensor<16x16xf32>)
                    outs(%empty : tensor<16x16xf32>) -> tensor<16x16xf32>
  return %sum : tensor<16x16xf32>
}
"""


def test_results_that_no_input_changes_prove_little(tmp_path: Path) -> None:
    path = tmp_path / "0.vmfb"
    executor.compiled({"module": CONSTANT, "flags": [], "path": str(path)})
    request = {"programs": [("iree", str(path))], "module": "", "parameters": "", "runs": 1}
    (only,) = executor.race(request | {"seed": 0, "length": 16})
    assert only["moved"] == 0


IMAGES = "conv_2d_nchw 1 3 18 16 3, relu, conv_2d_nchw 24 1, pooling 2 2"


def test_convolutions_work_on_channels_last_and_give_the_same() -> None:
    text = problem.of_line(IMAGES).text
    found = tune.tune(text, until=time.monotonic() + 600, length=64)
    last = [one for one in found.tried if one.way.last]
    assert [one.way.name for one in last] == ["channels last, O3", "channels last, data tiling"]
    assert [one.status for one in last] == ["ok", "ok"]
    made, changed = layout.channels_last(text)
    assert found.module == (made if found.best.way.last else text)
    assert "nchw" not in made and made.count('"linalg.conv_2d_nhwc_hwcf"') == changed == 2
    # Behind the image and behind both filters, which are arguments here.
    assert made.count('"util.optimization_barrier"') == 3
    # The image once, each filter once, and the result once.
    assert made.count('"linalg.transpose"') == 4


FILTERS = """
func.func @main(%image: tensor<1x3x8x8xf32>) -> tensor<1x4x6x6xf32> {
  %filters = arith.constant dense<0.5> : tensor<4x3x3x3xf32>
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<1x4x6x6xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<1x4x6x6xf32>) -> tensor<1x4x6x6xf32>
  %sum = linalg.conv_2d_nchw_fchw
      ins(%image, %filters : tensor<1x3x8x8xf32>, tensor<4x3x3x3xf32>)
      outs(%start : tensor<1x4x6x6xf32>) -> tensor<1x4x6x6xf32>
  return %sum : tensor<1x4x6x6xf32>
}
"""


def test_constant_filters_are_transposed_when_they_are_loaded() -> None:
    """A barrier behind them would transpose them in each run; behind the image one stays."""
    made, changed = layout.channels_last(FILTERS)
    assert changed == 1
    assert made.count('"util.optimization_barrier"') == 1


def test_an_image_that_something_else_reads_stays_as_it_is_there() -> None:
    """The result of the function keeps its shape; what has no convolution is left."""
    text = problem.of_line("conv_2d_nchw 2 4 8 8 3").text
    made, changed = layout.channels_last(text)
    assert changed == 1
    assert made.count("-> tensor<2x8x6x6xf32>") >= 1
    same, none = layout.channels_last(problem.of_line("matmul 8 8 8").text)
    assert none == 0 and "linalg.matmul" in same
    with pytest.raises(TokmillError, match="cannot be read"):
        layout.channels_last("func.func")
