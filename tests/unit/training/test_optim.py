"""The schedule against its formula, clipping, and AdamW's groups."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tokmill.training.engines.optimisers.optim import (
    clip_gradients,
    learning_rate,
    make_optimizer,
    same_rates,
)
from tokmill.training.recipe.config import OptimConfig


def test_cosine_by_hand() -> None:
    config = OptimConfig(lr=1.0, warmup=4, floor=0.2)
    rates = [learning_rate(config, step, 12) for step in range(12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[6] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[8] == pytest.approx(0.6)
    assert rates[11] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 7 / 8)) / 2)
    assert learning_rate(config, 12, 12) == pytest.approx(0.2)


def test_linear_and_constant_by_hand() -> None:
    linear = OptimConfig(lr=2.0, warmup=0, floor=0.5, schedule="linear")
    assert [learning_rate(linear, step, 5) for step in range(6)] == [2, 1.75, 1.5, 1.25, 1, 1]
    constant = OptimConfig(lr=2.0, warmup=2, schedule="constant")
    assert [learning_rate(constant, step, 9) for step in (0, 1, 8)] == [1.0, 2.0, 2.0]


def test_wsd_by_hand() -> None:
    config = OptimConfig(lr=2.0, warmup=2, floor=0.5, schedule="wsd", decay=0.4)
    rates = [learning_rate(config, step, 12) for step in range(13)]
    # Up, then level to step 7, then 2 to 1 in the last five steps.
    assert rates == [1.0, *7 * [2.0], 1.75, 1.5, 1.25, 1.0, 1.0]
    for share, falls in ((0.0, []), (1.0, [*range(3, 10)])):
        config = OptimConfig(lr=2.0, warmup=2, floor=0.0, schedule="wsd", decay=share)
        assert [s for s in range(2, 10) if learning_rate(config, s, 10) < 2.0] == falls


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (3, 3), (9, 4), (4, 40)])
def test_rates_rise_then_fall_and_stay_in_bounds(schedule: Any, warmup: int, steps: int) -> None:
    config = OptimConfig(lr=0.3, warmup=warmup, floor=0.1, schedule=schedule)
    rates = [learning_rate(config, step, steps) for step in range(steps)]
    assert all(0 < rate <= 0.3 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(rate >= 0.03 for rate in rates[warmup:])
    assert steps <= warmup + 1 or rates[warmup] == 0.3


def test_which_rates_more_steps_leave_as_they_were() -> None:
    def same(schedule: Any, done: int, steps: int = 200) -> bool:
        config = OptimConfig(warmup=10, schedule=schedule, decay=0.2)
        return same_rates(config, 100, config, steps, done)

    assert same("constant", 100)
    assert same("wsd", 81) and not same("wsd", 82)
    assert same("cosine", 11) and not same("cosine", 12)
    assert not same("linear", 50) and same("linear", 50, 100)
    # A constant run may be ended by a fall.
    flat, fall = (OptimConfig(schedule=s, decay=0.2, floor=0.3) for s in ("constant", "wsd"))
    assert same_rates(flat, 100, fall, 125, 100)
    assert not same_rates(flat, 100, fall, 120, 100)


def test_gradients_are_clipped_whatever_way_weights_are_given() -> None:
    """`model.parameters()` is used up by the first look at it."""
    for given in (lambda m: m.parameters(), lambda m: list(m.parameters()), lambda m: m.weight):
        model = nn.Linear(3, 4, bias=False)
        model.weight.grad = torch.full((4, 3), 2.0)
        assert clip_gradients(given(model), 1.0).item() == pytest.approx(48**0.5)
        assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert clip_gradients(iter(()), 1.0).item() == 0.0
    groups = [{"params": model.parameters(), "weight_decay": 0.5, "lr_scale": 1.0}]
    made = make_optimizer(iter(groups), OptimConfig())
    assert [len(group["params"]) for group in made.param_groups] == [1]


def test_the_norm_of_many_small_gradients() -> None:
    """Added up one after the other in float32, it would be .27 % less."""
    weight = nn.Parameter(torch.empty(38_000_000))
    weight.grad = torch.full((1,), 1e-3).expand(weight.shape)
    exact = float(torch.tensor(1e-3).double()) * math.sqrt(weight.numel())
    assert clip_gradients([weight], 0).item() == pytest.approx(exact, rel=1e-6)
    assert clip_gradients([weight], 0).dtype == torch.float32
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, math.inf])
    assert clip_gradients([weight], 0).item() == math.inf
