"""Views of the environment: fixed shapes, nothing cut, the ids of the tokenizers."""

import random
from collections.abc import Iterator

import pytest

from tokmill.base.errors import UsageError
from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.modules import problem
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.random_schedules import draw_action
from tokmill.mlir.tokens import features, field_tokens, views
from tokmill.mlir.tokens.bucket_tokens import MLIROperationTokenizer
from tokmill.mlir.tokens.features import Sizes

LINES = ["matmul 64 32 16", "conv_2d_nchw 1 3 11 4 3 2, relu", "batch_matmul 2 8 8 8", "relu 64"]


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return [problem.of_line(line) for line in LINES]


@pytest.fixture(scope="module")
def sizes(problems: list[Problem]) -> Sizes:
    return Sizes.of((each for one in problems for each in one.operations), normalize="log2")


def walks(one: Problem, chance: random.Random) -> Iterator[legal.State]:
    """Yield the states of random schedules that are as long as they may be."""
    for operation in one.operations:
        for _ in range(20):
            state = legal.begin(operation)
            while not state.done:
                drawn = (draw_action(state, chance) for _ in range(50))
                action = next((a for a in drawn if not isinstance(a, actions.Stop)), None)
                state = legal.take(state, action or actions.Stop(operation.tag))
                yield state


@pytest.mark.parametrize("kind", views.VIEWS)
def test_all_states_have_room(kind: str, problems: list[Problem], sizes: Sizes) -> None:
    """Every observation is in the space: the longest sequence was counted, nothing is cut."""
    view = views.make(kind, sizes, problems)
    spaces, chance = view.spaces(), random.Random(0)
    seen: set[int] = set()
    for one in problems:
        for state in walks(one, chance):
            producer = views.producer_of(one, state.operation)
            found = view(state, producer)
            assert found.keys() == spaces.keys()
            for name, space in spaces.items():
                assert space.contains(found[name]), (kind, name)
            if kind == "fields":
                tokens = field_tokens.tokens(state, producer)
                length = len(tokens.ids)
                seen.add(length)
                for name, part in zip(("ids", "segments", "depths"), tokens, strict=True):
                    assert (found[name][:length] == part).all()
                assert found["mask"].sum() == length
                assert (found["ids"][length:] == field_tokens.PAD).all()
    if kind == "fields":
        assert max(seen) <= views.longest(problems)


def test_no_room_is_wasted(sizes: Sizes) -> None:
    """The counted length is reached: packed, four times cut, made a vector."""
    one = problem.of_line("matmul 64 64 64")
    state = legal.begin(one.operations[0])
    state = legal.take(state, actions.Pack("op_0", (32, 32, 32)))
    for size in (16, 8, 4, 2):
        state = legal.take(state, actions.Tile("op_0", (0, 0, 0, size, size, size)))
    state = legal.take(state, actions.Vectorize("op_0"))
    # The history of a packed operation is cut for six loops, but packing itself named three.
    assert len(field_tokens.tokens(state, None).ids) == views.longest([one]) - 3


def test_buckets_are_the_tokenizers(problems: list[Problem], sizes: Sizes) -> None:
    (relu, conv) = reversed(problems[1].operations)
    scaled = Sizes(
        loops=sizes.loops, accesses=sizes.accesses, dimensions=sizes.dimensions, normalize="max"
    )
    ids, mask = MLIROperationTokenizer(sizes.operation)(
        features.vector(relu, scaled), features.vector(conv, scaled)
    )
    found = views.make("buckets", sizes, problems)(legal.begin(relu), conv)
    assert (found["ids"] == ids[0]).all()
    assert (found["mask"] == mask[0]).all()


def test_a_shorter_sequence_is_an_error_unless_cutting_is_allowed(
    problems: list[Problem], sizes: Sizes
) -> None:
    for kind in ("fields", "buckets"):
        short = views.Wanted(kind=kind, max_seq_length=20)
        with pytest.raises(UsageError, match="max_seq_length = 20") as caught:
            views.make(short, sizes, problems)
        assert "truncate = true" in caught.value.hint
        cut = views.Wanted(kind=kind, max_seq_length=20, truncate=True)
        view = views.make(cut, sizes, problems)
        found = view(legal.begin(problems[0].operations[0]), None)
        assert found["ids"].shape == found["mask"].shape == (20,)
        assert view.spaces()["ids"].contains(found["ids"])
    with pytest.raises(UsageError, match="no view is called 'field'") as caught:
        views.make("field", sizes, problems)
    assert "fields" in caught.value.hint
