"""Folders as MLIR-RL has them: the clock is taken out, published times are shown and not used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cut_modules import T

from tokmill.cli import main, rl_problems
from tokmill.errors import TokmillError
from tokmill.mlir import search
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import benchmarks, problem
from tokmill.rl import modules
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


def folder(path: Path, times: str | None = None) -> Path:
    path.mkdir()
    (path / "matmul_8.mlir").write_text(TIMED)
    (path / "other.mlir").write_text(TIMED)
    (path / "broken.mlir").write_text("module {")
    (path / "times.json").write_text(
        json.dumps({"matmul_8": 146_000_000, "gone": 5.5}) if times is None else times
    )
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
        (("module attr", "module x attr"), "no valid MLIR"),
    ],
)
def test_other_uses_of_the_clock_are_refused(change: tuple[str, str], says: str) -> None:
    with pytest.raises(TokmillError, match=says) as caught:
        problem.of_text(TIMED.replace(*change), "given.mlir")
    assert caught.value.hint


def test_a_folder_has_published_times_and_counted_refusals(tmp_path: Path) -> None:
    found = problem.of_folder(folder(tmp_path / "b"))
    assert [one.published for one in found.problems] == [146_000_000, None]
    assert len(found.refused) == 1
    assert found.refused[0][0].endswith("broken.mlir")
    assert found.notes == ["2 published times, 1 of them of modules that are not there"]


def test_of_two_files_with_times_the_first_counts_and_that_is_said(tmp_path: Path) -> None:
    place = folder(tmp_path / "b")
    (place / "a.json").write_text(json.dumps({"matmul_8": 7, "gone": 5.5, "other": 3}))
    found = problem.of_folder(place)
    assert [one.published for one in found.problems] == [7, 3]
    # Equal times are no contradiction.
    (said,) = [note for note in found.notes if "different times" in note]
    assert said == "two files have different times for matmul_8; the first file by name counts"
    many = {f"m{number:02}": number + 1 for number in range(40)}
    (place / "c.json").write_text(json.dumps(many))
    (place / "d.json").write_text(json.dumps({name: time + 1 for name, time in many.items()}))
    (said,) = [note for note in problem.of_folder(place).notes if "different times" in note]
    assert "m00, m01, m02, m03, m04 and 36 more" in said


def test_refused_modules_are_named_by_one_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(tmp_path / "b")
    for number in range(8):
        (place / f"broken{number}.mlir").write_text("module {")
    lines = problem.of_folder(place).said(str(place))
    assert sum("refused, " in line for line in lines) == problem.SHOWN
    assert lines[-1] == f"{place}: 9 modules refused in all"
    rl_problems.problems_of([str(place)])
    shown = capsys.readouterr().err
    assert shown == "".join(f"note: {line}\n" for line in lines)
    modules.named([], str(place), PolicyConfig().sizes)
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize(
    "times",
    ["", "[1]", '{"matmul_8": "x"}', '{"matmul_8": NaN}', '{"matmul_8": -1}', "[" * 99_999,
     '{"matmul_8": 1' + "0" * 400 + "}", '{"matmul_8": true}', '{"matmul_8": Infinity}'],
)  # fmt: skip
def test_files_that_hold_no_times_are_told(times: str, tmp_path: Path) -> None:
    found = problem.of_folder(folder(tmp_path / "b", times))
    assert [one.published for one in found.problems] == [None, None]
    assert any("times.json" in note for note in found.notes)


def test_a_folder_without_a_sound_module_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.mlir").write_text("module {")
    (tmp_path / "b.mlir").write_text("module {}")
    with pytest.raises(TokmillError, match="and so 1 others"):
        problem.of_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokmillError, match=r"no \.mlir file"):
        problem.of_folder(tmp_path / "empty")


def test_the_command_shows_both_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["rl", "show", str(folder(tmp_path / "b"))])
    assert not left.value.code
    shown = capsys.readouterr()
    assert "146.000" in shown.out
    assert "published ms" in shown.out
    assert "broken.mlir: refused" in shown.err
    with pytest.raises(SystemExit) as left:
        main(["rl", "search", str(tmp_path / "b"), "--evaluations", "1", "--runs", "1", "-q",
              "--json", "--with", "random"])  # fmt: skip
    assert not left.value.code
    modules = json.loads(capsys.readouterr().out)["modules"]
    assert [one.get("published_milliseconds") for one in modules] == [146, None]


def test_a_module_that_names_no_clock_is_left_alone() -> None:
    assert not benchmarks.is_timed("func.func @nanoTimes()")
    assert benchmarks.is_timed('call @"nanoTime"()')
