"""Modules of several operations as single problems, each counted; what is skipped says why."""

import random
from collections import Counter

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.mlir import random_schedules as draws
from tokmill.mlir import search
from tokmill.mlir.loops import execute
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.modules.cut import MOST_RUNS, Cut, NotSchedulable, cut

T = "tensor<8x8xf32>"
SAME = "affine_map<(d0, d1) -> (d0, d1)>"
MATMUL = "linalg.matmul ins(%a, %b : {t}, {t}) outs({o} : {t}) -> {t}"
HEAD = f"""
  %c0 = arith.constant 0.0 : f32
  %e = tensor.empty() : {T}
  %f = linalg.fill ins(%c0 : f32) outs(%e : {T}) -> {T}
"""


def matmul(out: str = "%f") -> str:
    return MATMUL.format(t=T, o=out)


def generic(body: str, result: str = "%r", extra: str = "", source: str = "%a") -> str:
    return (
        f'linalg.generic {{indexing_maps = [{SAME}, {SAME}], iterator_types = ["parallel", '
        f'"parallel"]{extra}}} ins({source} : {T}) outs(%e : {T}) {{\n^bb0(%x: f32, %y: f32):\n'
        f"{body}\nlinalg.yield {result} : f32\n}} -> {T}"
    )


def function(lines: str, result: str, name: str = "main", private: str = "") -> str:
    return (
        f"func.func {private} @{name}(%a: {T}, %b: {T}, %n: index, %v: f32) -> {T} {{{HEAD}\n"
        f"{lines}\nreturn {result} : {T}\n}}\n"
    )


def summary(found: Cut) -> list[tuple[str, tuple[int, ...], int]]:
    return [
        (one.operations[0].name, one.operations[0].bounds, count)
        for one, count in zip(found.problems, found.counts, strict=True)
    ]


def test_equal_operations_are_one_with_a_count() -> None:
    text = function(
        f"%0 = {matmul()}\n%1 = {matmul()}\n%2 = {matmul('%0')}\n"
        f"%3 = {generic('%r = arith.addf %x, %c0 : f32')}",
        "%3",
    )
    found = cut(text, "model.mlir")
    assert summary(found) == [
        ("linalg.matmul", (8, 8, 8), 2),
        ("linalg.matmul", (8, 8, 8), 1),
        ("linalg.generic", (8, 8), 1),
    ]
    assert found.skipped == []
    assert found.problems[0].name == "model.mlir: 0 matmul 8x8x8"
    assert "linalg.fill" in found.problems[0].text
    # The second adds to what is given.
    assert "linalg.fill" not in found.problems[1].text


def test_notes_of_other_tools_make_no_other_operation() -> None:
    body = "%r = arith.addf %x, %c0 : f32"
    noted = generic(body, extra=', tag = "op_9", lowering_config = 3, some.note = unit')
    found = cut(function(f"%0 = {generic(body)}\n%1 = {noted}", "%1"), "x")
    assert found.counts == [2]


def test_constants_of_a_body_come_along_and_values_do_not() -> None:
    lines = "\n".join(
        (
            "%c3 = arith.constant 3.0 : f32",
            "%c4 = arith.addf %c3, %c3 : f32",
            f"%0 = {generic('%r = arith.mulf %x, %c4 : f32')}",
            f"%1 = {generic('%r = arith.mulf %x, %v : f32')}",
            f"%2 = {generic('%r = tensor.extract %b[%n, %n] : ' + T)}",
        )
    )
    found = cut(function(lines, "%2"), "x")
    assert found.counts == [1]
    assert "3.000000e+00" in found.problems[0].text
    assert [why for _, why in found.skipped] == [
        "its body reads a f32 that is computed before it",
        f"its body reads a {T} that is computed before it",
    ]


def test_an_operand_that_stands_twice_is_one_argument() -> None:
    text = function(f"%0 = linalg.add ins(%a, %a : {T}, {T}) outs(%e : {T}) -> {T}", "%0")
    (one,) = cut(text, "x").problems
    assert one.text.count("%arg1") == 0


def test_functions_count_as_often_as_they_are_called() -> None:
    call = f"func.call @{{}}(%a, %b, %n, %v) : ({T}, {T}, index, f32) -> {T}"
    text = (
        function(f"%0 = {call.format('twice')}\n%1 = {call.format('twice')}", "%1", "main")
        + function(f"%0 = {call.format('last')}\n%1 = {call.format('last')}", "%1", "twice",
                   "private")
        + function(f"%0 = {matmul()}", "%0", "last", "private")
        + function(f"%0 = {matmul()}", "%0", "dead", "private")
        + function(f"%0 = {call.format('around')}\n%1 = {matmul()}", "%0", "around")
    )  # fmt: skip
    found = cut(text, "x")
    assert summary(found) == [("linalg.matmul", (8, 8, 8), 4)]
    assert Counter(why for _, why in found.skipped) == {
        "nobody calls its function": 1,
        "control flow: its function calls itself": 1,
    }


def doubling(functions: int) -> str:
    """Return functions of which each calls the next one twice; the last one, `f…`, is left out."""
    call = f"func.call @f{{}}(%a, %b, %n, %v) : ({T}, {T}, index, f32) -> {T}"
    return "".join(
        function(
            f"%0 = {call.format(i + 1)}\n%1 = {call.format(i + 1)}", "%1", f"f{i}",
            "private" * (i > 0),
        )
        for i in range(functions)
    )  # fmt: skip


@pytest.mark.parametrize("functions", [20, 70])
def test_a_chain_of_calls_that_doubles_is_counted_without_overflow(functions: int) -> None:
    name = f"f{functions}"
    text = doubling(functions)
    found = cut(text + function(f"%0 = {matmul()}\n%1 = {matmul()}", "%0", name, "private"), "x")
    assert found.counts == [min(2 ** (functions + 1), MOST_RUNS)]
    # What is skipped has one entry too, not one a run.
    large = SKIPPED["too large"][0]
    found = cut(text + function(large, "%0", name, "private"), "x")
    assert len(found.skipped) == 1 and found.skipped_counts == [min(2**functions, MOST_RUNS)]
    large = large.partition("\n")[2]
    with pytest.raises(NotSchedulable, match=f"{min(2**functions, MOST_RUNS):,} × linalg.exp"):
        cut(text + function(large, "%a", name, "private"), "x")


SKIPPED = {
    "loop": (
        f"%0 = {matmul()}\n%c1 = arith.constant 1 : index\n"
        f"%1 = scf.for %i = %c1 to %n step %c1 iter_args(%t = %a) -> ({T}) {{\n"
        f"%2 = {matmul('%t')}\nscf.yield %2 : {T}\n}}",
        "control flow: inside of scf.for",
    ),
    "blocks": (
        f"%0 = {matmul()}\ncf.br ^next\n^next:",
        "its function has 2 blocks",
    ),
    "not linalg": (
        f"%0 = {matmul()}\n%1 = tensor.pad %0 low[1, 1] high[1, 1] {{\n^bb0(%i: index, %j: index):"
        f"\ntensor.yield %c0 : f32\n}} : {T} to tensor<10x10xf32>",
        "not an operation of linalg",
    ),
    "dynamic": (
        f"%0 = {matmul()}\n%1 = tensor.cast %a : {T} to tensor<?x8xf32>\n%2 = linalg.matmul "
        f"ins(%1, %b : tensor<?x8xf32>, {T}) outs(%1 : tensor<?x8xf32>) -> tensor<?x8xf32>",
        "not known before the module runs",
    ),
    "too large": (
        f"%0 = {matmul()}\n%1 = tensor.empty() : tensor<99999x99999xf32>\n"
        "%2 = linalg.exp ins(%1 : tensor<99999x99999xf32>) outs(%1 : tensor<99999x99999xf32>) "
        "-> tensor<99999x99999xf32>",
        "MiB",
    ),
    "eight bits": (
        f"%0 = {matmul()}\n%1 = tensor.empty() : tensor<4xf8E5M2>\n"
        "%2 = linalg.exp ins(%1 : tensor<4xf8E5M2>) outs(%1 : tensor<4xf8E5M2>) "
        "-> tensor<4xf8E5M2>",
        "tensor<4xf8E5M2>",
    ),
    "no loops": (
        f"%0 = {matmul()}\n%1 = tensor.empty() : tensor<f32>\n"
        "%2 = linalg.exp ins(%1 : tensor<f32>) outs(%1 : tensor<f32>) -> tensor<f32>",
        "no loops",
    ),
    "memory": (
        f"%0 = {matmul()}\n%1 = memref.alloc() : memref<4x4xf32>\n"
        "linalg.exp ins(%1 : memref<4x4xf32>) outs(%1 : memref<4x4xf32>)",
        "memory",
    ),
    "softmax": (
        f"%0 = {matmul()}\n%1 = linalg.softmax dimension(1) ins(%0 : {T}) outs(%e : {T}) -> {T}",
        "no loops of its own",
    ),
    "scalar": (
        f"%0 = {matmul()}\n%1 = linalg.generic {{indexing_maps = [affine_map<(d0, d1) -> ()>, "
        f'{SAME}], iterator_types = ["parallel", "parallel"]}} ins(%v : f32) outs(%e : {T}) {{\n'
        f"^bb0(%x: f32, %y: f32):\nlinalg.yield %x : f32\n}} -> {T}",
        "takes a f32",
    ),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_skipped_says_why(name: str) -> None:
    lines, says = SKIPPED[name]
    text = function(lines, "%0") + function(f"%0 = {matmul()}", "%0", "other")
    found = cut(text, "x")
    assert [why for _, why in found.skipped if says in why], found.skipped
    assert found.counts in ([1], [2])


IREE = """
"util.global"() <{sym_name = "w", sym_visibility = "private", type = tensor<8x4xf32>,
  initial_value = #flow.parameter.named<"model"::"w"> : tensor<8x4xf32>}> : () -> ()
"util.func"() <{sym_name = "main$async", function_type = (!hal.buffer_view) -> !hal.buffer_view}> ({
^bb0(%a: !hal.buffer_view):
  %0 = "hal.tensor.import"(%a) : (!hal.buffer_view) -> tensor<8x8xf32>
  %w = "util.global.load"() <{global = @w}> : () -> tensor<8x4xf32>
  %c0 = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<8x4xf32>
  %f = linalg.fill ins(%c0 : f32) outs(%e : tensor<8x4xf32>) -> tensor<8x4xf32>
  %1 = linalg.matmul ins(%0, %w : tensor<8x8xf32>, tensor<8x4xf32>)
    outs(%f : tensor<8x4xf32>) -> tensor<8x4xf32>
  %2 = "hal.tensor.export"(%1) : (tensor<8x4xf32>) -> !hal.buffer_view
  "util.return"(%2) : (!hal.buffer_view) -> ()
}) : () -> ()
"util.func"() <{sym_name = "main", function_type = (!hal.buffer_view) -> !hal.buffer_view}> ({
^bb0(%a: !hal.buffer_view):
  %0 = "util.call"(%a) <{callee = @main$async}> : (!hal.buffer_view) -> !hal.buffer_view
  "util.return"(%0) : (!hal.buffer_view) -> ()
}) : () -> ()
"""


def test_dialects_that_are_not_known_frame_operations_that_are() -> None:
    found = cut(IREE, "iree.mlir")
    assert summary(found) == [("linalg.matmul", (8, 4, 8), 1)]
    assert found.skipped == []


@pytest.mark.parametrize(
    "text",
    ["", "module {}", "func.func @f() { return }", "\0" * 99, "module {" * 999, '"x"() : () -> ()']
    + [function("%c1 = arith.constant 1 : index", "%a")],
)
def test_modules_without_an_operation_are_refused(text: str) -> None:
    with pytest.raises(TokmillError) as caught:
        cut(text, "given.mlir")
    assert str(caught.value).startswith("given.mlir")
    assert caught.value.hint


def test_nothing_that_is_given_is_overwritten() -> None:
    """A sum on top of an argument is the same in each run."""
    (_, one) = cut(function(f"%0 = {matmul()}\n%1 = {matmul('%0')}", "%1"), "x").problems
    assert one.text.count("tensor<8x8xf32>,") >= 2
    for text in (one.text, one.text.replace(
        f"%arg2: {T}", f"%arg2: {T} {{llvm.noalias}}", 1)):  # fmt: skip
        kernel = execute.Kernel(text, None, 0)
        kernel.run()
        first = kernel.outputs[0].copy()
        kernel.run()
        assert np.array_equal(first, kernel.outputs[0])


def test_problems_of_a_chain_are_those_of_its_parts() -> None:
    chain = problem.of_line("conv_2d_nchw 1 3 18 4 3, relu, pooling 2 2")
    found = cut(chain.text, "x")
    for each, alone in zip(chain.operations, found.problems, strict=True):
        (operation,) = alone.operations
        assert (operation.name, operation.bounds) == (each.name, each.bounds)
    with Measurements(Settings(runs=1, most_seconds=0.2)) as measurements:
        for alone in found.problems:
            drawn = draws.draw(alone, random.Random(1))
            assert search.measured(alone, drawn, measurements).result.status in ("ok", "refused")
