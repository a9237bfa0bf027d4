"""Rates, time left and MFU, by a clock that is turned by hand."""

import pytest

from tokmill.training.runs import trackers as meter
from tokmill.training.runs.checkpoint import State
from tokmill.training.runs.trackers import Meter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(meter, "time", made)
    return made


def test_rates_leave_out_what_is_no_training(clock: Clock) -> None:
    state = State(step=10, tokens=500, seconds=60.0)
    made = Meter(state, steps=30, flops_per_token=10.0, peak=4000.0)
    assert made.line() == ""
    clock.now += 4
    with made.aside():
        clock.now += 6
    state.step, state.tokens, made.read = 14, 900, 400
    assert made.report() == {
        "targets": 900,
        "tokens_per_second": 100.0,
        "mfu": 0.25,
        "seconds": 70.0,
        # 4 steps took 10 seconds, evaluation and all; 16 are left.
        "seconds_left": 40.0,
    }
    assert made.line() == ", 100 tokens/s, MFU 25%"
    clock.now += 5
    state.step, state.tokens, made.read = 30, 1000, 500
    last = made.report()
    assert (last["tokens_per_second"], last["seconds_left"]) == (20.0, 0.0)


def test_an_error_inside_is_counted_too(clock: Clock) -> None:
    made = Meter(State(), steps=2, flops_per_token=1.0, peak=0.0)
    with pytest.raises(ValueError), made.aside():
        clock.now += 3
        raise ValueError
    clock.now += 1
    made.read = 10
    assert made.report()["tokens_per_second"] == 10.0
    assert "mfu" not in made.report() and "MFU" not in made.line()
