"""The environment as gymnasium wants it, and its masks."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from tokmill.base.errors import UsageError
from tokmill.mlir.env import ScheduleEnv
from tokmill.mlir.loops import legal
from tokmill.mlir.loops.schedule import Fuse, Im2col, Pack
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.random_schedules import draw
from tokmill.mlir.space import LOOPS

LINES = ["matmul 8 8 8", "matmul 8 8 8, relu", "conv_2d_nchw 1 2 6 2 3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScheduleEnv]:
    cache: Path = tmp_path_factory.mktemp("cache") / "results"
    with Measurements(Settings(runs=2, most_seconds=0.5), cache) as measure:
        yield ScheduleEnv([problem.of_line(line) for line in LINES], measure)


def test_gymnasiums_checker_is_content(made: ScheduleEnv) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(made, skip_render_check=True)


def masked(made: ScheduleEnv, chance: np.random.Generator) -> np.ndarray:
    """Draw an action that the masks allow."""
    mask = made.masks()
    kind = int(chance.choice(np.flatnonzero(mask["kind"])))
    tiles = mask["cuts"][kind]
    cuts = [int(chance.choice(np.flatnonzero(row))) for row in tiles]
    loops = len(made._states[made._place].bounds)
    order = [*chance.permutation(loops), *[0] * (len(tiles) - loops)]
    return np.array([kind, *cuts, *order])


def test_what_the_masks_allow_is_legal(made: ScheduleEnv) -> None:
    chance = np.random.default_rng(0)
    ended = 0
    for episode in range(12):
        made.reset(options={"problem": episode % len(LINES)})
        for _ in range(40):
            action = masked(made, chance)
            cut = made.decode(action)
            _, reward, over, _, info = made.step(action)
            # Tiles that leave all loops whole are the one thing that no mask a loop can say.
            assert not info["illegal"] or not any(getattr(cut, "sizes", (1,))), cut
            if over:
                ended += 1
                assert np.isfinite(reward)
                assert info["result"].status in ("ok", "refused")
                break
            assert reward == 0
    assert ended == 12


def test_an_illegal_action_ends_the_operation_and_says_so(made: ScheduleEnv) -> None:
    made.reset(options={"problem": 0})
    action = np.zeros(made.action_space.shape, int)
    action[0] = LOOPS.kinds.index("im2col")
    _, _, over, _, info = made.step(action)
    assert over
    assert info["illegal"]
    assert info["schedule"] == ()


def test_operations_are_visited_from_the_last_to_the_first(made: ScheduleEnv) -> None:
    observation, _ = made.reset(options={"problem": 1})
    assert observation["producer"].any()
    stop = np.zeros(made.action_space.shape, int)
    observation, _, over, _, _ = made.step(stop)
    assert not over
    assert not observation["producer"].any()
    assert made.step(stop)[2]


def test_no_module_is_an_error() -> None:
    with Measurements(Settings()) as measure, pytest.raises(UsageError, match="no module"):
        ScheduleEnv([], measure)


def test_actions_of_the_environment_are_those_of_the_rules() -> None:
    (matmul,) = problem.of_line("matmul 8 8 8").operations
    assert set(LOOPS.kinds) == set(legal.allowed(legal.begin(matmul)))
    assert LOOPS.kinds[0] == "stop"


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("relu 1 2 6 6, conv_2d_nchw 4 3", Im2col("op_1")),
        ("matmul 8 8 8, matmul 8", Pack("op_1", (4, 4, 4))),
    ],
)
def test_what_reads_a_copy_fuses_no_producer(line: str, action: Im2col | Pack) -> None:
    """MLIR finds no producer behind it."""
    state = legal.begin(problem.of_line(line).operations[1])
    assert legal.allowed(state)["fuse"]
    assert not legal.allowed(legal.take(state, action))["fuse"]


def test_what_a_consumer_computes_fuses_no_producer_of_its_own() -> None:
    """MLIR does not find the producer from there: masks, replays and draws all know it."""
    given = problem.of_line("matmul 8 8 8, relu, exp")
    fuse = Fuse("op_2", (4, 0), "op_1")
    free = [each.tag for each in given.operations if legal.allowed(legal.begin(each))["fuse"]]
    assert free == ["op_1", "op_2"]
    states = legal.replay(given.operations, [fuse])
    assert [legal.allowed(each)["fuse"] for each in states] == [False, False, False]
    with pytest.raises(UsageError, match="fuse is not possible on op_1"):
        legal.replay(given.operations, [fuse, Fuse("op_1", (4, 0), "op_0")])
    with Measurements(Settings()) as measure:
        made = ScheduleEnv([given], measure)
        made.reset()
        action = np.zeros_like(made.action_space.sample())
        action[:2] = LOOPS.kinds.index("fuse"), LOOPS.sizes.index(4)
        assert not made.step(action)[-1]["illegal"]
        kinds = made.step(np.zeros_like(action))[-1]["action_mask"]["kind"]
    assert kinds[LOOPS.kinds.index("tile")] and not kinds[LOOPS.kinds.index("fuse")]
    for seed in range(200):
        schedule = draw(given, random.Random(seed))
        named = {(one.op, one.producer) for one in schedule if isinstance(one, Fuse)}
        assert not {("op_2", "op_1"), ("op_1", "op_0")} <= named
