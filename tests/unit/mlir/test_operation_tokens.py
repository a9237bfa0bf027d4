"""Operations as tokens: the document's suites for its tokenizer, and the tokenizer by fields."""

import numpy as np
import pytest

from document_formulas import bucket_ids
from tokmill.base.errors import UsageError
from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.modules import problem
from tokmill.mlir.tokens import features, field_tokens, views
from tokmill.mlir.tokens.bucket_tokens import CLS, PAD, SEP, UNK, MLIROperationTokenizer


def test_initialization() -> None:
    made = MLIROperationTokenizer(50)
    assert (made.max_seq_length, made.vocab_size) == (102, 4 + 50 * 50)
    assert (CLS, SEP, PAD, UNK) == (0, 1, 2, 3)


def test_different_features_have_different_tokens() -> None:
    made = MLIROperationTokenizer(300)
    ids = made.tokens(np.zeros(300))
    assert len(set(ids.tolist())) == 300
    repeated = MLIROperationTokenizer(300, seed_compatible=True).tokens(np.zeros(300))
    assert len(set(repeated.tolist())) == 100
    assert (made.tokens(np.full(300, 0.5)) != ids).all()


def test_edge_cases() -> None:
    made = MLIROperationTokenizer(4)
    assert made.tokens(np.array([np.nan, np.inf, -5, 5])).tolist() == [UNK, UNK, 104, 4 + 150 + 49]
    for wrong in (np.zeros(5), np.zeros((2, 3)), np.float64(1)):
        with pytest.raises(UsageError):
            made.tokens(wrong)
    with pytest.raises(UsageError, match="2 consumers and 1 producers"):
        made(np.zeros((2, 4)), np.zeros(4))


@pytest.mark.parametrize(
    ("normalize", "bounds", "buckets"),
    [
        # Of the tokenizer's 50 buckets the bounds of most loops share the last one or the first.
        ("none", [64, 1000, 3], [49, 49, 49]),
        ("max", [0.015625, 0.244140625, 0.000732421875], [0, 11, 0]),
        ("log2", [6, 9.965784, 1.584963], [49, 49, 49]),
    ],
)
def test_normalised_bounds_and_their_tokens(
    normalize: str, bounds: list[float], buckets: list[int]
) -> None:
    (operation,) = problem.of_line("matmul 64 1000 3").operations
    sizes = features.Sizes(loops=5, normalize=normalize)
    vector = features.vector(operation, sizes)
    kinds = len(features.KINDS)
    assert vector[kinds : kinds + 5].tolist() == pytest.approx([*bounds, 0, 0], rel=1e-6)
    # Nothing but bounds is normalised.
    plain = features.vector(operation, features.Sizes(loops=5))
    rest = [place for place in range(len(vector)) if not kinds <= place < kinds + 5]
    assert vector[rest].tolist() == plain[rest].tolist()
    made = MLIROperationTokenizer(len(vector), seed_compatible=True)
    ids = made.tokens(vector).tolist()
    assert len(ids) > 200 and ids == bucket_ids(vector.tolist())
    found = [number - 4 - (kinds + loop) * 50 for loop, number in enumerate(ids[kinds : kinds + 5])]
    assert found == [*buckets, 0, 0]


def test_bounds_of_buckets_are_divided_by_4096() -> None:
    """The view of a policy with buckets: whatever its sizes say, a bound is a share of 4,096."""
    one = problem.of_line("matmul 64 2048 4096")
    for normalize in ("none", "log2"):
        sizes = features.Sizes(loops=4, normalize=normalize)
        view = views.make("buckets", sizes, [one])
        ids = view(legal.begin(one.operations[0]), None)["ids"].tolist()
        kinds = len(features.KINDS)
        # int(64 / 4096 * 49) = 0, int(2048 / 4096 * 49) = 24, int(4096 / 4096 * 49) = 49; [CLS] is
        # in front, and each number has 50 ids.
        wanted = [4 + 50 * (kinds + loop) + bucket for loop, bucket in enumerate((0, 24, 49, 0))]
        assert ids[1 + kinds : 5 + kinds] == wanted


def test_unknown_normalisations_are_refused() -> None:
    with pytest.raises(UsageError, match="normalize = 'mean'"):
        features.Sizes(normalize="mean")


def test_the_originals_configuration_keeps_127_of_4102() -> None:
    with pytest.raises(UsageError, match="keeps 127 of 4,102 numbers"):
        MLIROperationTokenizer(2051, max_seq_length=128, seed_compatible=True)
    made = MLIROperationTokenizer(
        2051, max_seq_length=128, vocab_size=10_000, seed_compatible=True, truncate=True
    )
    found = made.coverage()
    assert (found.numbers, found.kept) == (4102, 127)
    assert found.distinct == 73
    ids, mask = made(np.zeros(2051), np.zeros(2051))
    assert ids.shape == (1, 128)
    assert SEP not in ids
    assert mask.all()


def test_ids_have_room() -> None:
    with pytest.raises(UsageError, match="102,554 ids"):
        MLIROperationTokenizer(2051, vocab_size=10_000)
    assert MLIROperationTokenizer(2051).coverage() == (4102, 4102, 4102)
    assert MLIROperationTokenizer(2051).coverage().share == 1


def test_fields_of_a_convolution() -> None:
    conv, relu = problem.of_line("conv_2d_nchw 1 3 11 4 3 2, relu").operations
    names = {number: name for name, number in field_tokens.VOCABULARY.items()}
    state = legal.take(legal.begin(relu), actions.Tile("op_1", (0, 2, 0, 1)))
    found = field_tokens.tokens(state, conv)
    words = [names[number] for number in found.ids]
    assert words[:4] == ["[CLS]", "type generic", "bound 0", "parallel"]
    assert "factor 2" in words
    assert "action tile" in words
    assert words.count("[SEP]") == 2
    assert words[-1] == "[SEP]"
    first = words.index("[SEP]")
    assert found.segments.tolist() == [0] * (first + 1) + [1] * (len(words) - first - 1)
    place = words.index("factor 2")
    assert found.depths[place] == 3
    assert found.depths.max() == 7


def test_other_states_have_other_tokens() -> None:
    (matmul,) = problem.of_line("matmul 64 64 64").operations
    seen = set()
    chance = np.random.default_rng(0)
    for _ in range(40):
        sizes = tuple(int(legal.TILES[place]) for place in chance.integers(0, 7, 3))
        if any(sizes):
            state = legal.take(legal.begin(matmul), actions.Tile("op_0", sizes))
            seen.add((sizes, tuple(field_tokens.tokens(state, None).ids.tolist())))
    assert len({sizes for sizes, _ in seen}) == len({ids for _, ids in seen})


def test_padding_of_a_batch() -> None:
    ops = problem.of_line("matmul 8 8 8, relu").operations
    batch = [field_tokens.tokens(legal.begin(each), None) for each in ops]
    made, mask = field_tokens.padded(batch)
    assert made.ids.shape == made.depths.shape == mask.shape
    for row, each in enumerate(batch):
        size = len(each.ids)
        assert (made.ids[row, :size] == each.ids).all()
        assert (made.ids[row, size:] == field_tokens.PAD).all()
        assert mask[row].sum() == size
