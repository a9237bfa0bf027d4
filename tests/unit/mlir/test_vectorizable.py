"""Which operations can become vectors as they are: what this says is what MLIR does."""

from collections.abc import Iterator

import pytest

from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import generators, problem

SMALL: dict[str, tuple[str, list[bool]]] = {
    "matmul": ("matmul 8 4 6", [True]),
    "batch_matmul": ("batch_matmul 2 4 6 5", [True]),
    "conv_2d_nchw": ("conv_2d_nchw 1 2 6 2 3 2", [False]),
    "conv_2d_nhwc": ("conv_2d_nhwc 1 2 5 2 3", [False]),
    "pooling": ("pooling 1 2 6 2 2", [False]),
    "add": ("add 4 5", [True]),
    "relu": ("relu 7", [True]),
    "exp": ("exp 3 4 2", [True]),
    "reduce": ("reduce 6 7", [True]),
    "softmax": ("softmax 6 7", [True, True, True]),
}
"""A line of each generator, with few iterations, and whether its operations are vectorizable."""
GENERIC = """
#given = affine_map<MAP>
#same = affine_map<(d0, d1) -> (d0, d1)>
func.func @main(%a: tensor<SHAPExf32>) -> tensor<8x8xf32> {
  %e = tensor.empty() : tensor<8x8xf32>
  %r = linalg.generic {indexing_maps = [#given, #same], iterator_types = ["parallel", "parallel"]}
    ins(%a : tensor<SHAPExf32>) outs(%e : tensor<8x8xf32>) {
  ^bb0(%x: f32, %y: f32):
    linalg.yield %x : f32
  } -> tensor<8x8xf32>
  return %r : tensor<8x8xf32>
}
"""
INDICES: dict[str, tuple[str, str, bool]] = {
    "transposed": ("(d0, d1) -> (d1, d0)", "8x8", True),
    "broadcast": ("(d0, d1) -> (d1)", "8", True),
    "one row": ("(d0, d1) -> (0, d1)", "1x8", True),
    "strided": ("(d0, d1) -> (d0 * 2, d1)", "16x8", False),
    "moved": ("(d0, d1) -> (d0, d1 + 1)", "8x9", False),
    "a window": ("(d0, d1) -> (d0 + d1)", "15", False),
    "a diagonal": ("(d0, d1) -> (d0, d0)", "8x8", False),
    "divided": ("(d0, d1) -> (d0 floordiv 2, d1)", "4x8", False),
}
NARROW = """
func.func @main(%a: tensor<IMAGExf32>, %k: tensor<FILTERxf32>) -> tensor<RESULTxf32> {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<RESULTxf32>
  %f = linalg.fill ins(%z : f32) outs(%e : tensor<RESULTxf32>) -> tensor<RESULTxf32>
  %r = linalg.NAME {dilations = dense<1> : vector<1xi64>, strides = dense<STRIDE> : vector<1xi64>}
    ins(%a, %k : tensor<IMAGExf32>, tensor<FILTERxf32>) outs(%f : tensor<RESULTxf32>)
    -> tensor<RESULTxf32>
  return %r : tensor<RESULTxf32>
}
"""
WINDOWS: dict[str, tuple[str, str, str, int]] = {
    "conv_1d_nwc_wcf": ("1x9x3", "3x3x2", "1x4x2", 2),
    "conv_1d_ncw_fcw": ("1x3x9", "2x3x3", "1x2x7", 1),
    "pooling_nwc_max": ("1x9x3", "3", "1x7x3", 1),
    "pooling_nwc_sum": ("1x9x3", "3", "1x4x3", 2),
    "pooling_ncw_max": ("1x3x9", "3", "1x3x4", 2),
    "pooling_ncw_sum": ("1x3x9", "3", "1x3x7", 1),
}


@pytest.fixture(scope="module")
def measurements() -> Iterator[Measurements]:
    with Measurements(Settings(runs=2, most_seconds=0.5)) as made:
        yield made


def agrees(given: problem.Problem, measurements: Measurements) -> list[bool]:
    """Return what is said of the operations, each of which MLIR is asked to make vectors of."""
    for each in given.operations:
        # Past `legal`: MLIR alone decides.
        result = measurements.file(given, actions.text((actions.Vectorize(each.tag),)))
        assert result.status == ("ok" if each.vectorizable else "refused"), (each.name, result)
        assert legal.allowed(legal.begin(each))["vectorize"] == each.vectorizable
    return [each.vectorizable for each in given.operations]


def test_every_generator_has_a_case() -> None:
    assert SMALL.keys() == generators.GENERATORS.keys()


@pytest.mark.parametrize("name", SMALL)
def test_what_is_said_of_every_generator_is_what_mlir_does(
    name: str, measurements: Measurements
) -> None:
    line, wanted = SMALL[name]
    assert agrees(problem.of_line(line), measurements) == wanted


@pytest.mark.parametrize("name", INDICES)
def test_indices_decide(name: str, measurements: Measurements) -> None:
    indices, shape, wanted = INDICES[name]
    text = GENERIC.replace("MAP", indices).replace("SHAPE", shape)
    assert agrees(problem.of_text(text, name), measurements) == [wanted]


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_one_dimension_are_vectorizable(name: str, measurements: Measurements) -> None:
    image, window, result, stride = WINDOWS[name]
    text = NARROW.replace("NAME", name).replace("STRIDE", str(stride))
    text = text.replace("IMAGE", image).replace("FILTER", window).replace("RESULT", result)
    assert agrees(problem.of_text(text, name), measurements) == [True]


@pytest.mark.parametrize("line", ["matmul 640 640 640", "softmax 512 512"])
def test_sizes_are_no_condition_of_an_operation_but_of_its_tile(line: str) -> None:
    for each in problem.of_line(line).operations:
        assert each.vectorizable and not legal.allowed(legal.begin(each))["vectorize"]


def test_what_is_made_of_a_window_is_vectorizable() -> None:
    (conv,) = problem.of_line("conv_2d_nhwc 1 2 5 2 3").operations
    begun = legal.begin(conv)
    assert not conv.vectorizable and not begun.vectorizable
    assert legal.take(begun, actions.Im2col("op_0")).vectorizable
    cut = legal.take(begun, actions.Tile("op_0", (0, 1, 0, 0, 1, 0, 0)))
    assert cut.decomposes and cut.vectorizable
    assert not legal.take(begun, actions.Tile("op_0", (0, 1, 0, 0, 0, 0, 0))).vectorizable
