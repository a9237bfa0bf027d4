"""What a training remembers of modules, and schedules that are played again."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import made_times
from tokmill.base.errors import UsageError
from tokmill.mlir import random_schedules as draws
from tokmill.mlir.env import ScheduleEnv
from tokmill.mlir.loops import legal
from tokmill.mlir.measure import Measurements, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.space import LOOPS
from tokmill.rl import actions
from tokmill.rl import ppo_loop as loop
from tokmill.rl.actions import Layout, Scores
from tokmill.rl.rollout import again, play, play_new_schedules
from tokmill.rl.schedule_task import Memory, SchedulesConfig

torch.set_num_threads(1)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Measurements, "_measure", made_times.made)
    problems = [problem.of_line(line) for line in ("matmul 64 32 64, relu", "add 64 512")]
    with Measurements(Settings()) as measure:
        yield ScheduleEnv(problems, measure)


def layout_of(room: ScheduleEnv) -> Layout:
    return Layout(LOOPS.kinds, LOOPS.parts, room.sizes.loops, len(LOOPS.sizes))


def even(layout: Layout) -> Any:
    """Return a policy that has learned nothing."""

    def act(batch: Any) -> dict[str, torch.Tensor]:
        rows = len(batch.values["may.kind"])
        return {
            "kind": torch.zeros(rows, len(layout.kinds)),
            "tiles": torch.zeros(rows, len(layout.cuts), layout.loops, layout.tiles),
            "order": torch.zeros(rows, layout.loops, layout.loops),
            "value": torch.zeros(rows),
        }

    return act


def test_the_best_are_kept_once_and_means_follow() -> None:
    memory = Memory(2)
    assert memory.mean("a") is None and memory.best("a") == []
    for reward, kind in ((0.1, 1), (0.5, 2), (0.5, 2), (0.3, 3), (-1.0, 4)):
        memory.see("a", reward, [np.array([kind, 0])], (kind,))
    assert [(round(worth, 9), rows[0].tolist()) for worth, rows in memory.best("a")] == [
        (round(0.5 - 0.08, 9), [2, 0]),
        (round(0.3 - 0.08, 9), [3, 0]),
    ]
    other = Memory(2)
    other.load(memory.state())
    assert other.state() == memory.state()
    for _ in range(200):
        memory.see("a", 1.0, [np.array([5, 0])], (5,))
    assert memory.knows("a", (5,)) and not other.knows("a", (5,)) and not memory.knows("b", (5,))
    assert other.knows("a", (4,))
    assert memory.mean("a") == pytest.approx(1.0)


def test_a_schedule_again_is_what_was_played(room: ScheduleEnv) -> None:
    torch.manual_seed(3)
    layout = layout_of(room)
    played = play(even(layout), room, [0, 1, 0, 1], layout)
    evaluations = room.measure.evaluations
    for one in played:
        same = again(room, one.problem, one.chosen, 0.25)
        assert same.rewards[-1] == 0.25 and not any(same.rewards[:-1])
        for name in ("seen", "masks", "chosen"):
            for mine, theirs in zip(getattr(one, name), getattr(same, name), strict=True):
                assert (
                    np.array_equal(mine, theirs)
                    if name == "chosen"
                    else all(np.array_equal(mine[key], theirs[key]) for key in mine)
                )
    assert room.measure.evaluations == evaluations


def test_moves_count_for_what_they_are(room: ScheduleEnv) -> None:
    layout = layout_of(room)
    torch.manual_seed(4)
    played = play(even(layout), room, [0, 1], layout)
    imitated = again(room, 0, played[0].chosen, 0.5)
    own = sum(len(one.chosen) for one in played)
    moves = loop.moves_of(played, SchedulesConfig(), [imitated])
    values = {name: value.numpy() for name, value in moves.values.items()}
    assert values["acts"].sum() == own and len(values["acts"]) >= own + len(imitated.chosen)
    assert values["imitates"].sum() == pytest.approx(0.5 * len(imitated.chosen))
    first = len(played[0].chosen)
    assert values["target"][first - 1] == pytest.approx(played[0].rewards[-1])
    assert not (values["imitates"] * values["acts"]).any()


def test_what_is_known_is_drawn_again(room: ScheduleEnv) -> None:
    layout = layout_of(room)
    torch.manual_seed(8)
    known: set[tuple[int, Any]] = set()
    for _ in range(10):
        for one in play_new_schedules(
            even(layout), room, [1] * 4, layout, lambda *given: given in known, redraws=50
        ):
            assert (one.problem, one.schedule) not in known and one.result.status
            known.add((one.problem, one.schedule))
    assert len(known) == room.measure.evaluations == 40
    (same,) = play_new_schedules(even(layout), room, [1], layout, lambda *_: True, redraws=3)
    assert same.rewards[-1] == pytest.approx(float(np.log10(same.gain)), abs=1e-9) or (
        same.result.status != "ok"
    )


def test_without_a_measurement_nothing_is_counted(room: ScheduleEnv) -> None:
    layout = layout_of(room)
    torch.manual_seed(5)
    (episode,) = play(even(layout), room, [0], layout, measured=False)
    assert room.measure.evaluations == 0 and not any(episode.rewards)
    assert episode.schedule or len(episode.chosen) == 2


def test_a_policy_that_has_learned_nothing_draws_as_the_random_search(room: ScheduleEnv) -> None:
    layout, count = layout_of(room), 4000
    _, info = room.reset(options={"problem": 1})
    masks = actions.masks_of([info["action_mask"]] * count)
    torch.manual_seed(6)
    rows = even(layout)(type("Batch", (), {"values": {"may.kind": masks.kind}}))
    scores = Scores(*(rows[name] for name in Scores._fields))
    chosen = actions.choose(scores, masks, layout).numpy()
    chance, state = random.Random(7), legal.begin(room.problems[1].operations[0])
    drawn = [draws.draw_action(state, chance) for _ in range(count)]
    mine = Counter(layout.kinds[row[0]] for row in chosen)
    theirs = Counter(str(one.__struct_config__.tag) for one in drawn)
    assert set(mine) == set(theirs)
    for kind, many in theirs.items():
        assert abs(mine[kind] - many) < 0.04 * count, kind
    tiled = [row[1:3] for row in chosen if layout.kinds[row[0]] == "tile"]
    sizes = [one.sizes for one in drawn if str(one.__struct_config__.tag) == "tile"]
    for index in range(2):
        ours = Counter(LOOPS.sizes[row[index]] for row in tiled)
        for size, many in Counter(one[index] for one in sizes).items():
            assert abs(ours[size] / len(tiled) - many / len(sizes)) < 0.06, (index, size)


def test_wrong_weights_of_imitation_are_refused() -> None:
    with pytest.raises(UsageError, match="imitation_coef"):
        SchedulesConfig(imitation_coef=float("nan"))
    with pytest.raises(UsageError, match="imitated"):
        SchedulesConfig(imitated=0)
    with pytest.raises(UsageError, match="redraws"):
        SchedulesConfig(redraws=-1)
