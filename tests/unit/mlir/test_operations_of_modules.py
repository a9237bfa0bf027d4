"""Modules made from sizes, and what is found in them, in its vectors too."""

import numpy as np
import pytest

from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.modules import generators, problem
from tokmill.mlir.tokens import features
from tokmill.mlir.tokens.features import Sizes

LINES = [
    "matmul 8 16 32",
    "batch_matmul 2 8 16 32",
    "conv_2d_nchw 1 3 10 4 3 2",
    "conv_2d_nhwc 2 3 10 4 3",
    "pooling 1 3 10 2 2",
    "add 4 5",
    "relu 4",
    "exp 3 4 5",
    "reduce 6 7",
    "softmax 6 7",
    "matmul 8 8 8, relu, matmul 4, softmax",
    "conv_2d_nhwc 1 3 10 4 3, relu, conv_2d_nhwc 2 1",
]


@pytest.mark.parametrize("line", LINES)
def test_every_generated_module_is_valid_and_has_its_operations(line: str) -> None:
    found = problem.of_line(line)
    assert [each.tag for each in found.operations] == [
        f"op_{number}" for number in range(len(found.operations))
    ]
    for each in found.operations:
        shape = each.stores[0].shape
        out = [bound for bound, free in zip(each.bounds, each.parallel, strict=True) if free]
        assert np.prod(out) == np.prod(shape)


def test_a_convolution_by_its_loops_and_accesses() -> None:
    (conv,) = problem.of_line("conv_2d_nchw 1 3 11 4 3 2").operations
    assert conv.kind == "conv"
    assert conv.bounds == (1, 4, 5, 5, 3, 3, 3)
    assert conv.parallel == (True, True, True, True, False, False, False)
    assert conv.loads[0].matrix.tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 2, 0, 0, 1, 0, 0],
        [0, 0, 0, 2, 0, 0, 1, 0],
    ]
    assert conv.arithmetic == (1, 0, 1, 0, 0)


def test_loops_are_parallel_if_the_module_says_so() -> None:
    """A convolution of all places, `d0 + d1`: several iterations add to one element."""
    text = """
    func.func @main(%a: tensor<9xf32>, %b: tensor<4xf32>, %c: tensor<12xf32>) -> tensor<12xf32> {
      %0 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0)>,
          affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0 + d1)>],
          iterator_types = ["reduction", "reduction"]}
          ins(%a, %b : tensor<9xf32>, tensor<4xf32>) outs(%c : tensor<12xf32>) {
      ^bb0(%x: f32, %w: f32, %y: f32):
        %v = arith.mulf %x, %w : f32
        %r = arith.addf %y, %v : f32
        linalg.yield %r : f32
      } -> tensor<12xf32>
      return %0 : tensor<12xf32>
    }
    """
    (found,) = problem.of_text(text, "scatter").operations
    assert (found.bounds, found.parallel) == ((9, 4), (False, False))


def test_who_feeds_whom() -> None:
    found = problem.of_line("matmul 8 8 8, softmax").operations
    assert [each.producers for each in found] == [(), ((0, 0),), ((0, 1),), ((0, 1), (1, 2))]


def test_constants_of_indices_are_no_part_of_a_vector() -> None:
    text = """
    #shift = affine_map<(d0) -> (d0 * 2 + 3)>
    #same = affine_map<(d0) -> (d0)>
    func.func @main(%a: tensor<32xf32>) -> tensor<8xf32> {
      %e = tensor.empty() : tensor<8xf32>
      %r = linalg.generic {indexing_maps = [#shift, #same], iterator_types = ["parallel"]}
        ins(%a : tensor<32xf32>) outs(%e : tensor<8xf32>) {
      ^bb0(%x: f32, %y: f32):
        linalg.yield %x : f32
      } -> tensor<8xf32>
      return %r : tensor<8xf32>
    }
    """
    (operation,) = problem.of_text(text, "shift").operations
    assert operation.loads[0].matrix.tolist() == [[2, 3]]
    vector = features.vector(operation, Sizes(loops=1, accesses=1, dimensions=1))
    assert vector[8] == 2 and 3 not in vector


def test_lengths_of_vectors_are_the_published_ones() -> None:
    sizes = Sizes(loops=12, accesses=7, dimensions=12)
    assert (sizes.operation, sizes.history) == (2051, 2160)
    (matmul,) = problem.of_line("matmul 8 16 32").operations
    vector = features.vector(matmul, sizes)
    assert vector.shape == (2051,)
    assert vector[:6].tolist() == [0, 1, 0, 0, 0, 0]
    assert vector[6:9].tolist() == [8, 16, 32]
    assert vector[18:21].tolist() == [1, 1, 0]
    assert vector[-5:].tolist() == [1, 0, 1, 0, 0]


def test_nothing_of_an_operation_is_cut() -> None:
    (conv,) = problem.of_line("conv_2d_nhwc 1 3 10 4 3").operations
    with pytest.raises(UsageError, match="7 loops of 3"):
        features.vector(conv, Sizes(loops=3))


def test_a_history_shows_tiles_and_orders() -> None:
    (matmul,) = problem.of_line("matmul 64 64 64").operations
    sizes = Sizes(loops=3)
    state = legal.take(legal.begin(matmul), actions.Tile("op_0", (8, 0, 2)))
    state = legal.take(state, actions.Interchange("op_0", (2, 0, 1)))
    vector = features.history(state.taken, sizes)
    cuts = vector[: 3 * 5 * 3 * 8].reshape(3, 5, 3, 8)
    assert cuts[0, 0].argmax(1).tolist() == [4, 0, 2]
    assert cuts[1:].sum() == 0
    orders = vector[3 * 5 * 3 * 8 :].reshape(5, 3, 3)
    assert orders[1].argmax(1).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("matmul 8 8", "2 sizes"),
        ("matmul 8 8 0", "positive"),
        ("matmul 8 8 -1", "positive"),
        ("nothing 8", "not an operation"),
        ("nest.mlir", "not an operation"),
        ("matmul 8 8 8, , relu", "chain"),
        (", ".join(["relu 4"] * 6), "chain of 6"),
        ("pooling 1 1 2 3", "larger than its image"),
        ("relu 4, matmul 4", "cannot follow"),
        ("reduce 4", "1 size"),
        ("", "chain"),
        ("add 99999 99999", "MiB"),
    ],
)
def test_wrong_sizes_are_refused(line: str, says: str) -> None:
    with pytest.raises(TokmillError, match=says) as caught:
        problem.of_line(line)
    assert caught.value.hint


BODY = "%r = linalg.exp ins(%a : {t}) outs(%a : {t}) -> {t}\n return %r : {t}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("func.func @main( {", "not a valid MLIR"),
        ("module {}", "0 functions"),
        ("func.func @f() { return }\nfunc.func @g() { return }", "2 functions"),
        ("func.func @main() { return }", "no linalg operation"),
        (
            "func.func @main(%a: tensor<?x4xf32>) -> tensor<?x4xf32> {"
            + BODY.format(t="tensor<?x4xf32>")
            + "}",
            "not known",
        ),
        (
            "func.func @main(%a: tensor<4xf8E5M2>) -> tensor<4xf8E5M2> {"
            + BODY.format(t="tensor<4xf8E5M2>")
            + "}",
            "tensor<4xf8E5M2>",
        ),
        (
            "func.func @main(%a: tensor<0xf32>) -> tensor<0xf32> {"
            + BODY.format(t="tensor<0xf32>")
            + "}",
            "how often",
        ),
        (
            "func.func @main(%a: tensor<4xf32>, %c: i1) -> tensor<4xf32> {\n"
            "cf.cond_br %c, ^x, ^x\n^x:\n" + BODY.format(t="tensor<4xf32>") + "}",
            "blocks",
        ),
    ],
)
def test_modules_that_cannot_be_scheduled_say_why(text: str, says: str) -> None:
    with pytest.raises(TokmillError, match=says) as caught:
        problem.of_text(text, "given.mlir")
    assert str(caught.value).startswith("given.mlir")
    assert caught.value.hint


@pytest.mark.parametrize("name", generators.GENERATORS)
def test_only_so_many_sizes_follow_an_operation(name: str) -> None:
    kind = generators.GENERATORS[name]
    rank, (least, most) = kind.rank or 4, kind.continued
    before = "relu" + " 8" * rank
    for count in range(9):
        line = f"{before}, {name}" + " 1" * count
        if least <= count <= most:
            assert len(problem.of_line(line).operations) > 1
        else:
            with pytest.raises(UsageError, match="cannot follow") as caught:
                problem.of_line(line)
            assert str(least) in caught.value.hint and str(most) in caught.value.hint


def test_tensors_are_as_large_as_their_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    for element, size in (("f64", 8), ("f32", 4), ("bf16", 2), ("i8", 1), ("i1", 1)):
        kind = f"tensor<16x16x{element}>"
        text = (
            f"func.func @main(%a: {kind}) -> {kind} {{\n%e = tensor.empty() : {kind}\n"
            f"%r = linalg.copy ins(%a : {kind}) outs(%e : {kind}) -> {kind}\nreturn %r : {kind}\n}}"
        )
        monkeypatch.setattr(problem, "LARGEST", 2 * 256 * size)
        assert problem.of_text(text, "x").operations
        monkeypatch.setattr(problem, "LARGEST", 2 * 256 * size - 1)
        with pytest.raises(TokmillError, match="inputs and outputs take"):
            problem.of_text(text, "x")


def test_sizes_of_chains_are_those_of_the_operation_before() -> None:
    found = problem.of_line("conv_2d_nchw 1 3 10 4 3, relu, pooling 2 2").operations
    assert found[-1].stores[0].shape == (1, 4, 4, 4)
    assert generators.LONGEST == 5
