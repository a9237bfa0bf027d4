"""Element types of tensors: each runs, and what is wrong is seen."""

import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.mlir import random_schedules as draws
from tokmill.mlir import search
from tokmill.mlir.loops import legal, lower
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.loops.execute import Kernel
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import dtypes, problem, toolkit

QUICK = Settings(runs=2, most_seconds=0.5)
SHAPE = (32, 64, 48)
PRODUCT = """func.func @main(%a: tensor<32x48xIN>, %b: tensor<48x64xIN>) -> tensor<32x64xOUT> {
  %zero = arith.constant ZERO : OUT
  %e = tensor.empty() : tensor<32x64xOUT>
  %f = linalg.fill ins(%zero : OUT) outs(%e : tensor<32x64xOUT>) -> tensor<32x64xOUT>
  %r = linalg.matmul ins(%a, %b : tensor<32x48xIN>, tensor<48x64xIN>)
    outs(%f : tensor<32x64xOUT>) -> tensor<32x64xOUT>
  return %r : tensor<32x64xOUT>
}
"""
EACH = """#m = affine_map<(i, j) -> (i, j)>
func.func @main(%a: tensor<64x32xIN>) -> tensor<64x32xOUT> {
  %e = tensor.empty() : tensor<64x32xOUT>
  %r = linalg.generic {indexing_maps = [#m, #m], iterator_types = ["parallel", "parallel"]}
    ins(%a : tensor<64x32xIN>) outs(%e : tensor<64x32xOUT>) {
  ^bb0(%x: IN, %o: OUT):
    BODY
    linalg.yield %y : OUT
  } -> tensor<64x32xOUT>
  return %r : tensor<64x32xOUT>
}
"""
PAIRS = (
    ("f32", "f32"),
    ("f64", "f64"),
    ("f16", "f16"),
    ("f16", "f32"),
    ("bf16", "bf16"),
    ("bf16", "f32"),
    ("i8", "i32"),
    ("i16", "i32"),
    ("i64", "i64"),
)


def product(given: str, result: str) -> problem.Problem:
    zero = "0.0" if "f" in result else "0"
    text = PRODUCT.replace("IN", given).replace("OUT", result).replace("ZERO", zero)
    return problem.of_text(text, f"{given}-{result}.mlir")


def each(given: str, result: str, body: str) -> problem.Problem:
    text = EACH.replace("IN", given).replace("OUT", result).replace("BODY", body)
    return problem.of_text(text, "each.mlir")


@pytest.fixture(scope="module")
def loops() -> Iterator[Measurements]:
    with Measurements(QUICK) as made:
        yield made


@pytest.mark.parametrize(("given", "result"), PAIRS)
def test_products_of_each_type_are_scheduled(given: str, result: str, loops: Measurements) -> None:
    taken = (actions.Tile("op_0", (8, 8, 8)), actions.Vectorize("op_0"))
    found = search.measured(product(given, result), taken, loops).result
    assert found.status == "ok", found
    assert found.error <= found.allowed


@pytest.mark.parametrize(("given", "result"), PAIRS)
def test_products_are_numpys(given: str, result: str) -> None:
    kernel = Kernel(product(given, result).text, None, 7)
    kernel.poison()
    kernel.run()
    wide = np.float64 if "f" in result else np.int64
    left, right = (one.astype(wide) for one in kernel.buffers[:2])
    assert len(np.unique(left)) >= 3
    error, _ = dtypes.difference([left @ right], [kernel.outputs[0].astype(wide)], 1)
    # Sums of whole numbers are exact, whatever the type.
    assert error <= (1e-6 if given in ("f32", "f64") else 0)


@pytest.mark.parametrize(("given", "result"), [("f16", "f16"), ("bf16", "bf16"), ("f16", "f32")])
def test_a_sum_without_its_last_terms_is_seen(given: str, result: str) -> None:
    kernel = Kernel(product(given, result).text, None, 7)
    left, right = (one.astype(np.float64) for one in kernel.buffers[:2])
    kind = dtypes.of(result)
    whole, short = ((left[:, :n] @ right[:n]).astype(kind) for n in (SHAPE[2], SHAPE[2] - 8))
    error, allowed = dtypes.difference([whole], [short], SHAPE[2])
    assert error > allowed


@pytest.mark.parametrize("given", ["f32", "f16", "bf16"])
def test_gelu_is_scheduled(given: str, loops: Measurements) -> None:
    found = each(given, given, f"%y = math.erf %x : {given}")
    taken = (actions.Tile("op_0", (8, 16)), actions.Vectorize("op_0"))
    result = search.measured(found, taken, loops).result
    assert result.status == "ok", result


def test_conversions_need_no_library_of_the_compiler() -> None:
    """As on processors without instructions for bf16, where LLVM would call compiler-rt."""
    found = each("bf16", "bf16", "%z = arith.mulf %x, %x : bf16\n %y = math.exp %z : bf16")
    inside = toolkit.context()
    module = toolkit.parse(found.text, inside, "module")
    with inside, toolkit.ir().Location.unknown():
        lower.lower(module)
    # `llvm.fmul %1, %2 : bf16`, `llvm.fptrunc %1 : f32 to bf16`, `llvm.intr.exp(%1) : (bf16) -> …`
    assert not re.findall(r"llvm\.(?:f|intr\.)\w.*bf16", str(module))


def test_random_schedules_of_truth_values(loops: Measurements) -> None:
    """Vectors of i1 are bits in MLIR and bytes in memory: such a vector is not made."""
    found = each("f16", "i1", "%z = arith.constant 0.0 : f16\n %y = arith.cmpf ogt, %x, %z : f16")
    assert not legal.allowed(legal.begin(found.operations[0]))["vectorize"]
    chance = random.Random(3)
    for _ in range(6):
        trial = search.measured(found, draws.draw(found, chance), loops)
        assert trial.result.status == "ok", trial


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("arith.addi", {-4, -3, -2, -1, 0, 1, 2, 3, 4}),
        ("%y = tensor.extract %t[%i, %j] : tensor<3x64xf32>", {0, 1, 2}),
        (
            '"tensor.extract"(%t, %i, %j) : (tensor<90x64xf32>, index, index) -> f32',
            {0, 1, 2, 3, 4},
        ),
        ("tensor.extract_slice %t[0] [1] [1] : tensor<1xf32>", {-4, -3, -2, -1, 0, 1, 2, 3, 4}),
        ("%y = tensor.gather %t[%i] : tensor<2x64xf32>, tensor<7x1xi32>", {0}),
        ("%y = arith.remsi %x, %w : i32", {1, 2, 3, 4}),
        ("%y = arith.shli %x, %w : i32", {0, 1, 2, 3, 4}),
        ("arith.divui %x, %w\ntensor.extract %t[%i] : tensor<3xf32>", {1, 2}),
    ],
)
def test_whole_numbers_are_those_that_the_module_allows(text: str, drawn: set[int]) -> None:
    buffer = np.zeros(1000, np.int32)
    dtypes.fill([buffer], 0, text)
    assert {*buffer.tolist()} == drawn


def test_a_module_that_allows_no_whole_number_is_refused() -> None:
    text = "arith.divsi %x, %w : i32\ntensor.extract %t[%i] : tensor<1xf32>"
    with pytest.raises(TokmillError, match="indexes a tensor of one row"):
        dtypes.fill([np.zeros(3, np.int32)], 0, text)


def test_truth_values_are_drawn_and_compared() -> None:
    drawn = [np.zeros(1000, np.bool_), np.zeros(1000, dtypes.of("bf16"))]
    dtypes.fill(drawn, 3, "")
    assert 400 < drawn[0].sum() < 600
    assert set(drawn[1].astype(np.float32).tolist()) == {-1.0, 0.0, 1.0}
    assert dtypes.difference([drawn[0]], [~drawn[0]], 1) == (1.0, 0.0)
    dtypes.poison(drawn)
    assert np.isnan(drawn[1].astype(np.float32)).all()


def test_each_result_is_compared_by_its_own_type() -> None:
    half, single = np.ones(4, np.float16), np.ones(4, np.float32)
    near, far = single + np.float32(1e-7), single + np.float32(1e-4)
    assert dtypes.difference([half, single], [half, near], 1)[0] > 0
    for order in ([0, 1], [1, 0]):
        wanted, given = ([pair[i] for i in order] for pair in ([half, single], [half, far]))
        error, allowed = dtypes.difference(wanted, given, 1)
        assert error > 1e-5 > allowed
    error, allowed = dtypes.difference([half, np.arange(4)], [half, np.arange(4) + 1], 1)
    assert (error, allowed) == (1.0, 0.0)
    assert dtypes.difference([], [], 1) == (0.0, 0.0)
    # IREE's whole numbers have no sign; those of other engines have.
    signless = [np.array([-56, 7], np.int8)]
    assert dtypes.difference(signless, [np.array([200, 7], np.uint8)], 1) == (0.0, 0.0)
    assert dtypes.difference(signless, [np.array([56, 7], np.uint8)], 1)[0] == 1.0
