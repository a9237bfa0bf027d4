"""Modules and schedules that were written to do harm: refused, and the parent lives."""

import os
from pathlib import Path

import pytest

from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir.loops import legal, schedule
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import generators, guard, problem

TENSOR = "tensor<8x8xf32>"
HEAD = f"func.func @main(%a: {TENSOR}, %o: {TENSOR}) -> {TENSOR} {{\n"
TAIL = (
    f"%0 = linalg.add ins(%a, %a : {TENSOR}, {TENSOR}) outs(%o : {TENSOR}) -> {TENSOR}\n"
    f"return %0 : {TENSOR}\n}}\n"
)
DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    [
        "module {" * DEEP,
        "module {" * DEEP + "}" * DEEP,
        "module attributes {a = " + "[" * DEEP,
        "func.func @main(%a: " + "tuple<" * DEEP,
        "#m = affine_map<(d0) -> (" + "(" * DEEP,
    ],
)
def test_brackets_without_end_cost_a_child_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.mlir").write_text(text)
    (tmp_path / "b.mlir").write_text(HEAD + TAIL)
    with pytest.raises(TokmillError, match="was killed by SIGSEGV") as raised:
        problem.of_file(tmp_path / "a.mlir")
    assert raised.value.where == str(tmp_path / "a.mlir")
    with pytest.raises(TokmillError, match="was killed by SIGSEGV"):
        guard.check(text, "a", whole=False)
    folder = problem.of_folder(tmp_path)
    assert [Path(one.name).name for one in folder.problems] == ["b.mlir"]
    assert len(folder.refused) == 1


@pytest.mark.parametrize(
    ("before", "inside", "named"),
    [
        ("func.func private @abort()\n", "func.call @abort() : () -> ()\n", "func.call"),
        (
            "llvm.func @getpid() -> i32\n",
            "%p = llvm.call @getpid() : () -> i32\n",
            "llvm.func",
        ),
        ("", 'llvm.inline_asm has_side_effects "int3", "" : () -> ()\n', "llvm.inline_asm"),
        ("", "%i = arith.constant 0 : i32\nvector.print %i : i32\n", "vector.print"),
        (
            "",
            f"%q = func.call @main(%a, %o) : ({TENSOR}, {TENSOR}) -> {TENSOR}\n",
            "func.call",
        ),
    ],
)
def test_a_module_calls_nothing(before: str, inside: str, named: str) -> None:
    with pytest.raises(TokmillError, match=f"{named} is not allowed"):
        problem.of_text(before + HEAD + inside + TAIL, "module")


def test_a_pipe_in_a_folder_is_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.mlir")
    (tmp_path / "b.mlir").write_text(generators.chain("add 4"))
    folder = problem.of_folder(tmp_path)
    assert len(folder.problems) == 1
    assert folder.notes("b") == ["b: 1 entry left out: not named .mlir, or no file"]


def test_a_module_that_cannot_be_compiled_says_its_name() -> None:
    # No pass lowers complex numbers.
    numbers = (
        "%i = arith.constant 0 : index\n"
        f"%r = tensor.extract %a[%i, %i] : {TENSOR}\n"
        "%c = complex.create %r, %r : complex<f32>\n"
        "%x = complex.abs %c : complex<f32>\n"
        f"%t = tensor.splat %x : {TENSOR}\n"
    )
    text = HEAD + numbers + TAIL.replace("%a, %a", "%a, %t")
    made = problem.of_text(text, "the module")
    with (
        Measurements(Settings(runs=1)) as measure,
        pytest.raises(TokmillError, match="cannot be compiled without a schedule") as raised,
    ):
        measure(made, ())
    assert raised.value.where == "the module"


def test_a_schedule_names_producers_that_there_are() -> None:
    made = problem.of_line("matmul 16 16 16, relu")
    evil = schedule.Fuse("op_1", (8, 8), 'op_0"} in %module : (!transform.any_op) //')
    with pytest.raises(UsageError, match="not a producer of op_1") as raised:
        legal.replay(made.operations, [evil])
    assert raised.value.hint == "it has op_0"


@pytest.mark.parametrize("line", ["", "[", '{"action"', "[" * DEEP + "]" * DEEP])
def test_damaged_actions_are_told(line: str) -> None:
    with pytest.raises(TokmillError, match="cannot be read") as raised:
        schedule.read(schedule.HEADER + line, "S.mlir")
    assert "substring" not in raised.value.what
