"""Modules as MLIR-RL, tpp-mlir and torch-mlir have them: what is taken out, what is refused."""

import random
from pathlib import Path

import numpy as np
import pytest
from test_cut_modules import T

from tokmill.base.errors import TokmillError
from tokmill.mlir import random_schedules as draws
from tokmill.mlir import search
from tokmill.mlir.loops import execute, legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import problem
from tokmill.rl import modules
from tokmill.rl.commands import rl_problems
from tokmill.rl.policy import PolicyConfig

TIMED = f"""
module attributes {{torch.debug_module_name = "Net"}} {{
  func.func private @nanoTime() -> i64 attributes {{ llvm.emit_c_interface }}
  func.func private @printFlops(f64)
  func.func @main(%a: {T}, %b: {T}, %c: {T}) -> ({T}, i64) attributes {{ llvm.emit_c_interface }} {{
    %t0 = func.call @nanoTime() : () -> (i64)
    %r = linalg.matmul {{tag = "operation_0"}} ins(%a, %b : {T}, {T}) outs(%c : {T}) -> {T}
    %t = func.call @nanoTime() : () -> (i64)
    %d = arith.subi %t, %t0 : i64
    return %r, %d : {T}, i64
  }}
}}
"""


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "matmul_8.mlir").write_text(TIMED)
    (path / "other.mlir").write_text(TIMED)
    (path / "broken.mlir").write_text("module {")
    (path / "times.json").write_text('{"matmul_8": 146000000}')
    return path


def test_the_clock_is_taken_out() -> None:
    found = problem.of_text(TIMED, "x")
    assert "nanoTime" not in found.text
    assert "i64" not in found.text
    assert [each.bounds for each in found.operations] == [(8, 8, 8)]
    with Measurements(Settings(runs=1, most_seconds=0.2)) as measurements:
        for _ in range(2):
            taken = (actions.Tile("op_0", (4, 4, 4)),)
            result = search.measured(found, taken, measurements).result
            assert result.status == "ok", result


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("return %r, %d", "%e = arith.addi %d, %d : i64\n return %r, %e"), "subi"),
        (("arith.subi %t, %t0", "arith.addi %t, %t0"), "arith.addi"),
        (("module attr", "module x attr"), "not a valid MLIR"),
    ],
)
def test_other_uses_of_the_clock_are_refused(change: tuple[str, str], says: str) -> None:
    with pytest.raises(TokmillError, match=says) as caught:
        problem.of_text(TIMED.replace(*change), "given.mlir")
    assert caught.value.hint


def test_refused_modules_are_named_by_one_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(tmp_path / "b")
    for number in range(8):
        (place / f"broken{number}.mlir").write_text("module {")
    lines = problem.of_folder(place).notes(str(place))
    # Times of another machine are not read.
    assert lines[0] == f"{place}: 1 entry left out: not named .mlir, or no file"
    assert sum("refused, " in line for line in lines) == problem.SHOWN
    assert lines[-1] == f"{place}: 9 modules refused in all"
    rl_problems.problems_of([str(place)])
    shown = capsys.readouterr().err
    assert shown == "".join(f"note: {line}\n" for line in lines)
    modules.named([], str(place), PolicyConfig().sizes)
    assert capsys.readouterr().err == shown


def test_a_folder_without_a_sound_module_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.mlir").write_text("module {")
    (tmp_path / "b.mlir").write_text("module {}")
    with pytest.raises(TokmillError, match="and so 1 others"):
        problem.of_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokmillError, match=r"no \.mlir file"):
        problem.of_folder(tmp_path / "empty")


MATRIX, FILLED = "tensor<8x8xf32>", "%f = linalg.fill ins(%z : f32) outs(%e : tensor<8x8xf32>)"
ENTRY = f"""
func.func @entry(%a: {MATRIX}) -> {MATRIX} {{
  %w = GLOBAL
  %z = arith.constant 0.0 : f32
  %e = EMPTY : {MATRIX}
  {FILLED} -> {MATRIX}
  %r = linalg.matmul ins(%a, %w : {MATRIX}, {MATRIX}) outs(%f : {MATRIX}) -> {MATRIX}
  return %r : {MATRIX}
}}
"""
PLAIN = ENTRY.replace("GLOBAL", f"arith.constant dense<2.0> : {MATRIX}").replace(
    "EMPTY", "tensor.empty()"
)
GLOBAL = f"ml_program.global private @w(dense<2.0> : {MATRIX}) : {MATRIX}\n"
SEED = "ml_program.global private mutable @seed(dense<0> : tensor<i64>) : tensor<i64>\n"
MAIN = f"""
func.func private @printMemrefF32(tensor<*xf32>)
func.func @main() {{
  %c = arith.constant dense<1.0> : {MATRIX}
  %r = func.call @entry(%c) : ({MATRIX}) -> {MATRIX}
  %u = tensor.cast %r : {MATRIX} to tensor<*xf32>
  func.call @printMemrefF32(%u) : (tensor<*xf32>) -> ()
  return
}}
"""
READ = ENTRY.replace("EMPTY", "tensor.empty()")
FORMS = {
    "main beside it": MAIN + PLAIN,
    "a module in a module": f"module {{ module {{ {PLAIN} }} }}",
    "a global that is read": GLOBAL
    + READ.replace("GLOBAL", f"ml_program.global_load_const @w : {MATRIX}"),
    "one that may change and does not": SEED
    + GLOBAL.replace("private", "private mutable")
    + READ.replace("GLOBAL", f"ml_program.global_load @w : {MATRIX}"),
    "all of it": GLOBAL
    + MAIN
    + READ.replace("GLOBAL", f"ml_program.global_load_const @w : {MATRIX}"),
}


@pytest.mark.parametrize("name", FORMS)
def test_modules_of_other_projects_are_the_function_that_computes(name: str) -> None:
    found, plain = (problem.of_text(text, "m") for text in (FORMS[name], PLAIN))
    kernels = [execute.Kernel(one.text, None, 3) for one in (found, plain)]
    for one in kernels:
        one.poison()
        one.run()
    # Twice the sums of rows, by numpy.
    given = kernels[0].buffers[0]
    expected = np.repeat(2 * given.sum(axis=1, keepdims=True), 8, axis=1)
    for one in kernels:
        np.testing.assert_allclose(one.outputs[0], expected, atol=1e-5)


STORED = GLOBAL.replace("private", "private mutable") + READ.replace(
    "GLOBAL", f"ml_program.global_load @w : {MATRIX}"
).replace("  return", f"  ml_program.global_store @w = %r : {MATRIX}\n  return")
TWICE = MAIN.replace("  return", f"  %s = func.call @entry(%r) : ({MATRIX}) -> {MATRIX}\n  return")
MEMORY = f"func.func @f(%a: memref<8x8xf32>) -> {MATRIX} {{\n" + (
    f"  %t = bufferization.to_tensor %a : memref<8x8xf32> to {MATRIX}\n"
    f"  %r = linalg.exp ins(%t : {MATRIX}) outs(%t : {MATRIX}) -> {MATRIX}\n"
    f"  return %r : {MATRIX}\n}}"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (STORED, "ml_program.global.* is not allowed"),
        (TWICE + PLAIN, "2 functions with a body"),
        (MEMORY, "takes or gives a memref<8x8xf32>"),
    ],
)
def test_what_is_more_than_that_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(TokmillError, match=says) as caught:
        problem.of_text(text, "m")
    assert caught.value.hint


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    older = ENTRY.replace("GLOBAL", f"arith.constant dense<2.0> : {MATRIX}").replace(
        "EMPTY", "linalg.init_tensor [8, 8]"
    )
    (tmp_path / "a.mlir").write_text(older)
    assert problem.of_file(tmp_path / "a.mlir").operations[0].name == "linalg.matmul"
    packed = f"""
func.func @main(%a: {MATRIX}, %b: tensor<2x2x4x4xf32>) -> tensor<2x2x4x4xf32> {{
  %r = tensor.pack %a inner_dims_pos = [0, 1] inner_tiles = [4, 4] into %b
    : {MATRIX} -> tensor<2x2x4x4xf32>
  return %r : tensor<2x2x4x4xf32>
}}
"""
    (tmp_path / "b.mlir").write_text(packed)
    with pytest.raises(TokmillError, match="linalg.pack has no loops of its own"):
        problem.of_file(tmp_path / "b.mlir")


REVERSED = """
func.func @main(%a: tensor<16x8xbf16>, %b: tensor<4x8x2xbf16>, %i: tensor<16xbf16>)
    -> (tensor<16x8xbf16>, tensor<16xbf16>) {
  %z = arith.constant 0.0 : bf16
  %e = tensor.empty() : tensor<16x8xbf16>
  %f = linalg.fill ins(%z : bf16) outs(%e : tensor<16x8xbf16>) -> tensor<16x8xbf16>
  %r = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>,
      affine_map<(d0, d1, d2) -> (d2 floordiv 2, d1, d2 mod 2)>,
      affine_map<(d0, d1, d2) -> (d0, d1)>],
      iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a, %b : tensor<16x8xbf16>, tensor<4x8x2xbf16>) outs(%f : tensor<16x8xbf16>) {
    ^bb0(%x: bf16, %y: bf16, %o: bf16):
      %m = arith.mulf %x, %y : bf16
      %s = arith.addf %o, %m : bf16
      linalg.yield %s : bf16
  } -> tensor<16x8xbf16>
  %g = tensor.empty() : tensor<16xbf16>
  %v = linalg.generic {indexing_maps = [affine_map<(d0) -> (-d0 + 15)>, affine_map<(d0) -> (d0)>],
      iterator_types = ["parallel"]} ins(%i : tensor<16xbf16>) outs(%g : tensor<16xbf16>) {
    ^bb0(%x: bf16, %o: bf16):
      linalg.yield %x : bf16
  } -> tensor<16xbf16>
  return %r, %v : tensor<16x8xbf16>, tensor<16xbf16>
}
"""


def test_loops_of_odd_indices_stay_whole_and_the_others_are_right() -> None:
    """MLIR computes wrong which part of an operand such a tile reads."""
    given = problem.of_text(REVERSED, "m")
    first, second = given.operations
    assert (first.whole, second.whole) == ({2}, {0})
    # A negative factor is one of its own.
    assert second.loads[0].matrix.tolist() == [[-1, 15]] and second.loads[0].plain
    state = legal.begin(first)
    turned = legal.take(state, actions.Interchange("op_0", (2, 0, 1)))
    for whole, one, loop in (
        (True, state, 2),
        (False, state, 0),
        (True, turned, 0),
        (False, turned, 2),
    ):
        assert any(legal.tiles(one, loop)[1:]) != whole
    assert not legal.allowed(legal.begin(second))["tile"]
    chance = random.Random(0)
    with Measurements(Settings(runs=1, most_seconds=0.1)) as measurements:
        for _ in range(6):
            result = measurements(given, draws.draw(given, chance))
            assert result.status in ("ok", "refused"), result
