"""`tokmill rl tune` on a whole model, from an ONNX file to a program."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from onnx_models import small_model
from tokmill.cli import main
from tokmill.mlir.iree import tune as tuning
from tokmill.mlir.iree.tune import NOT_REACHED, Part
from tokmill.mlir.iree.tune_model import Choice
from tokmill.mlir.iree.tuned_model import FLAGS, Timed, Way
from tokmill.mlir.measure import Result
from tokmill.mlir.modules import generators
from tokmill.mlir.search import Trial
from tokmill.rl.commands import rl_tune_tables as rl_tune_shown

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


def tuned(model: Path, spec: Path, capsys: Any) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["rl", "tune", str(model), "-o", str(spec), "--evaluations", "4", "--json"])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_is_tuned_and_the_printed_line_compiles_it(tmp_path: Path, capsys: Any) -> None:
    model, spec = small_model(tmp_path / "model.onnx", 64), tmp_path / "model.spec"
    told = tuned(model, spec, capsys)
    assert [one["name"] for one in told["tried"]] == ["default", "O3", "data tiling"]
    assert sum(part["runs"] for part in told["operations"]) == 2
    assert told["whole"]["milliseconds"] <= told["whole"]["best_flags_milliseconds"]
    assert spec.exists() == bool(told["whole"]["obeyed"])
    assert told["whole"]["other_input_difference"] > told["whole"]["allowed_error"]
    tool, *rest = shlex.split(told["compile"])
    assert tool == "iree-compile"
    module = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
    subprocess.run([*module, *rest], check=True, cwd=tmp_path)
    assert (tmp_path / "MODULE.vmfb").stat().st_size
    assert (tmp_path / "model.spec.model.irpa").stat().st_size
    # What was ended goes on: times of the flags come from the cache.
    assert tuned(model, spec, capsys)["tried"] == told["tried"]


def test_two_processes_do_not_tune_into_one_file(tmp_path: Path, capsys: Any) -> None:
    spec = tmp_path / "some.spec"
    words = ["rl", "tune", "matmul 16 16 16", "-o", str(spec), "--quiet"]
    first = subprocess.Popen(
        [sys.executable, "-m", "tokmill", *words, "--minutes", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not (tmp_path / "some.spec.measurements").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--minutes", "0.01"])
    assert ended.value.code == 5
    said = capsys.readouterr().err
    assert "another process is writing some.spec" in said and "hint:" in said
    assert not spec.exists()
    # One that was killed does not keep others out.
    first.send_signal(signal.SIGKILL)
    first.communicate()
    with pytest.raises(SystemExit) as ended:
        main([*words, "--evaluations", "1"])
    assert ended.value.code == 0
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".lock")]


def test_the_printed_line_compiles_operations_that_iree_does_not_name(
    tmp_path: Path, capsys: Any
) -> None:
    """`linalg.add` is written as what it computes, which has no tiles to choose."""
    module = tmp_path / "sum.mlir"
    module.write_text(generators.chain("add 16 64"))
    assert "linalg.add" in module.read_text()
    told = tuned(module, tmp_path / "sum.spec", capsys)
    _, *rest = shlex.split(told["compile"])
    command = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
    subprocess.run([*command, *rest], check=True, cwd=tmp_path)


def test_without_a_gain_nothing_is_to_be_applied(tmp_path: Path, capsys: Any) -> None:
    default = Timed(name="default", nanoseconds=1e6, noise=0.0, error=0.0, allowed=1.0, moved=9.0)
    flags = Timed(name="O3", nanoseconds=5e5, noise=0.0, error=0.0, allowed=1.0, moved=9.0)
    for best in (default, flags):
        way = Way(best.name, FLAGS[best.name])
        choice = Choice(
            way=way, spec="", parts=[], skipped=[], flags=[default, flags], default=default,
            untuned=best, tuned=best,
        )  # fmt: skip
        rl_tune_shown.print_choice(choice, tmp_path / "spec", "iree-compile", False)
        said = capsys.readouterr().err
        assert ("to apply it" in said) == (best is flags)
        assert ("nothing is faster than IREE's default" in said) == (best is default)


@pytest.mark.parametrize("moved", [0.0, 1e-9, 0.5, float("nan")])
def test_results_that_no_input_changes_are_said(moved: float, tmp_path: Path, capsys: Any) -> None:
    one = Timed(name="default", nanoseconds=1e6, noise=0.0, error=0.0, allowed=1e-6, moved=moved)
    default = Timed(name="default", nanoseconds=2e6, noise=0.0)
    choice = Choice(
        way=Way("O3", FLAGS["O3"]),
        spec="",
        parts=[],
        skipped=[],
        flags=[default, one],
        default=default,
        untuned=one,
        tuned=one,
    )
    rl_tune_shown.print_choice(choice, tmp_path / "spec", "iree-compile", False)
    assert ("another input gives the same results" in capsys.readouterr().err) == (moved != 0.5)


def test_operations_without_a_time_are_told(capsys: Any) -> None:
    parts = [
        Part(name="matmul", count=1, evaluations=8, status="default", default=2e3, tuned=2e3),
        Part(name="conv", count=2, evaluations=0, status=NOT_REACHED),
    ]
    rl_tune_shown.print_parts(parts, [])
    out, err = capsys.readouterr()
    assert "nan" not in out and out.splitlines()[-1].split()[:4] == ["conv", "2", "-", "-"]
    assert err.startswith("1 operation not reached: the same command with more --minutes goes on")


def test_code_for_another_processor_is_tuned_as_such(tmp_path: Path, capsys: Any) -> None:
    spec, target = tmp_path / "some.spec", "--iree-llvmcpu-target-cpu=x86-64-v2"
    words = ["rl", "tune", "matmul 32 32 32", "-o", str(spec), "--evaluations", "2", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--target-cpu", "x86-64-v2"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert target in told["flags"]
    line = shlex.split(told["compile"])
    assert [word for word in line if word.startswith("--iree-llvmcpu-target-cpu")] == [target]
    module = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
    subprocess.run([*module, *line[1:]], check=True, cwd=tmp_path)
    # Times of one processor's code say nothing of another's.
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert target not in json.loads(capsys.readouterr().out)["compile"]


def test_an_unknown_processor_is_refused(tmp_path: Path, capsys: Any) -> None:
    words = ["rl", "tune", "matmul 32 32 32", "-o", str(tmp_path / "some.spec")]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--target-cpu", "8086"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--target-cpu 8086" in said and "hint:" in said


def test_the_printed_line_is_one_for_a_shell(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "two words; true"
    spec = folder / "some spec"
    words = ["rl", "tune", "matmul 32 32 32", "-o", str(spec), "--evaluations", "1", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    line = json.loads(capsys.readouterr().out)["compile"]
    assert shlex.split(line)[1] == f"{spec}.model.mlir"


def test_a_model_whose_operations_stand_in_a_loop_is_tuned_as_a_whole(
    tmp_path: Path, capsys: Any
) -> None:
    module = tmp_path / "loop.mlir"
    module.write_text(LOOP)
    spec = tmp_path / "loop.spec"
    told = tuned(module, spec, capsys)
    assert len(told["operations"]) == 1
    assert told["operations"][0]["operation"].startswith("dispatch 0_matmul")
    # They are counted where a spec is written, and whether one gains here is the machine's.
    assert bool(told["whole"]["dispatches"]) == bool(told["spec"]) == spec.exists()
    assert "default" in {one["name"] for one in told["tried"] if one["status"] == "ok"}


def test_an_operation_without_any_result_says_so() -> None:
    trial = Trial((), Result(status="timeout"))
    part = Part(name="one", count=1, evaluations=0, status="default")
    tuning._tell(part, [trial, trial, Trial((), Result(status="refused"))], None)
    assert part.status == "default: no result (2 timeout, 1 refused)"
