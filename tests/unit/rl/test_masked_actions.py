"""Actions of several parts: what is masked never comes, and probabilities are those of a table."""

import copy
import itertools

import numpy as np
import pytest
import torch

from tokmill.mlir.env import ScheduleEnv
from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as schedules
from tokmill.mlir.measure import Result
from tokmill.mlir.modules import problem
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.space import LOOPS
from tokmill.rl import actions
from tokmill.rl.actions import Layout, Masks, Scores

torch.set_num_threads(1)
LINES = ["matmul 8 16 6", "matmul 8 8 8, relu", "conv_2d_nchw 1 2 6 2 3", "pooling 1 2 6 2 2",
         "add 3 5", "reduce 4 64", "matmul 1 1 1", "softmax 8 16"]  # fmt: skip
SMALL = Layout(("stop", "tile", "interchange"), {"tile": "tiles", "interchange": "order"}, 2, 3)


class Unmeasured:
    """In place of measurements."""

    space = LOOPS

    def problem(self, given: Problem) -> Problem:
        """Return the problem as it is."""
        return given

    def __call__(self, *arguments: object, **more: object) -> Result:
        return Result(status="ok", nanoseconds=1.0, baseline=1.0, noise=0.0)


def test_ten_thousand_drawn_actions_are_legal() -> None:
    space, lines = LOOPS, LINES
    problems = [problem.of_line(line) for line in lines]
    room = ScheduleEnv(problems, Unmeasured())  # type: ignore[arg-type]
    rooms = [copy.copy(room) for _ in range(64)]
    layout = Layout(space.kinds, space.parts, room.sizes.loops, len(space.sizes))
    infos = [room.reset(options={"problem": n % len(lines)})[1] for n, room in enumerate(rooms)]
    torch.manual_seed(0)
    drawn, kinds = 0, set()
    while drawn < 10_000:
        masks = actions.masks_of([info["action_mask"] for info in infos])
        # Scores that would rather have what is not allowed.
        scores = Scores(
            torch.randn(64, len(layout.kinds)) * 3,
            torch.randn(64, len(layout.cuts), layout.loops, layout.tiles) * 3,
            torch.randn(64, layout.loops, layout.loops) * 3,
        )
        chosen = actions.choose(scores, masks, layout, greedy=drawn % 5 == 0)
        judged = actions.evaluate(scores, masks, chosen, layout)
        assert torch.isfinite(judged.logp).all() and (judged.logp <= 1e-6).all()
        assert (judged.entropy >= -1e-5).all() and (judged.entropy <= judged.most + 1e-4).all()
        for number, room in enumerate(rooms):
            kinds.add(space.kinds[int(chosen[number, 0])])
            _, _, over, _, infos[number] = room.step(chosen[number].numpy())
            assert not infos[number]["illegal"], room.decode(chosen[number].numpy())
            drawn += 1
            if over:
                options = {"problem": drawn % len(lines)}
                infos[number] = room.reset(options=options)[1]
    assert kinds == set(space.kinds)


def table(masks: Masks) -> list[list[int]]:
    """All legal actions of the small layout."""
    found = []
    for kind in range(3):
        if not masks.kind[0, kind]:
            continue
        if kind == 0:
            found.append([0, 0, 0, 0, 0])
        elif kind == 1:
            places = [np.flatnonzero(row) for row in masks.cuts[0, 1].numpy()]
            found += [[1, *cut, 0, 0] for cut in itertools.product(*places) if any(cut)]
        else:
            count = int(masks.loops[0].sum())
            orders = itertools.permutations(range(count))
            found += [[2, 0, 0, *order, *[0] * (2 - count)] for order in orders]
    return found


@pytest.mark.parametrize(
    ("tiles", "loops"),
    [
        ([[1, 1, 1], [1, 1, 1]], [1, 1]),
        ([[1, 1, 0], [1, 0, 0]], [1, 1]),
        ([[1, 0, 0], [1, 0, 1]], [1, 1]),
        ([[1, 1, 1], [1, 0, 0]], [1, 0]),
    ],
)
def test_probabilities_of_all_legal_actions_sum_to_one(
    tiles: list[list[int]], loops: list[int]
) -> None:
    torch.manual_seed(1)
    cuts = torch.tensor([[[1, 0, 0]] * 2, tiles, [[1, 0, 0]] * 2]).bool()[None]
    masks = Masks(torch.ones(1, 3).bool(), cuts, torch.tensor(loops).bool()[None])
    scores = Scores(torch.randn(1, 3), torch.randn(1, 1, 2, 3), torch.randn(1, 2, 2))
    every = torch.tensor(table(masks))
    rows = len(every)

    def repeated(value: torch.Tensor) -> torch.Tensor:
        return value.expand(rows, *value.shape[1:])

    many, allowed = Scores(*map(repeated, scores)), Masks(*map(repeated, masks))
    judged = actions.evaluate(many, allowed, every, SMALL)
    assert float(judged.logp.exp().sum()) == pytest.approx(1, abs=1e-5)
    # Drawn as often as it says.
    torch.manual_seed(2)
    count = 20_000
    drawn = actions.choose(
        Scores(*(one.expand(count, *one.shape[1:]) for one in scores)),
        Masks(*(one.expand(count, *one.shape[1:]) for one in masks)),
        SMALL,
    )
    for row, logp in zip(every, judged.logp, strict=True):
        share = float((drawn == row).all(1).float().mean())
        assert share == pytest.approx(float(logp.exp()), abs=0.015)


def test_only_the_chosen_kinds_part_counts() -> None:
    masks = Masks(*(torch.ones(1, *shape).bool() for shape in ((3,), (3, 2, 3), (2,))))
    scores = Scores(*(torch.randn(1, *s, requires_grad=True) for s in ((3,), (1, 2, 3), (2, 2))))
    for action, parts in (([0, 0, 0, 0, 0], ()), ([1, 1, 0, 0, 0], ("tiles",)),
                          ([2, 0, 0, 1, 0], ("order",))):  # fmt: skip
        judged = actions.evaluate(scores, masks, torch.tensor([action]), SMALL)
        found = torch.autograd.grad(judged.logp.sum() + judged.entropy.sum(), scores)
        moved = {name for name, one in zip(Scores._fields, found, strict=True) if one.any()}
        assert moved == {"kind", *parts}


def test_the_greedy_action_is_the_likeliest_part_after_part() -> None:
    masks = Masks(*(torch.ones(1, *shape).bool() for shape in ((3,), (3, 2, 3), (2,))))
    scores = Scores(
        torch.tensor([[0.0, 1.0, 0.5]]),
        torch.tensor([[[[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]]]),
        torch.zeros(1, 2, 2),
    )
    # The last loop must be cut, as the first is not.
    assert actions.choose(scores, masks, SMALL, greedy=True).tolist() == [[1, 0, 2, 0, 0]]


def test_a_dead_end_is_no_pack() -> None:
    (operation,) = problem.of_line("matmul 1 1 1").operations
    assert not legal.allowed(legal.begin(operation))["pack"]
    assert isinstance(schedules.Stop("op_0"), schedules.Stop)
