"""Which schedule a search reports: the better one of its two best, measured again, or none."""

from typing import Any

import pytest

from tokmill.mlir import search
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.search import Trial

PROBLEM = problem.of_line("matmul 8 8 8")
ONE, TWO, THREE = ((actions.Tile("op_0", (size, 0, 0)),) for size in (2, 4, 8))
TIMEOUT = Result(status="timeout", reason="took more than 30 seconds")


def ok(speedup: float, noise: float = 0.0) -> Result:
    return Result(status="ok", nanoseconds=1e6 / speedup, baseline=1e6, noise=noise)


class Again(Measurements):
    """What schedules are worth when they are measured again."""

    def __init__(self, found: dict[Any, Result]) -> None:
        super().__init__(Settings())
        self.found, self.asked = found, []

    def __call__(self, problem: Any, schedule: Any, *, again: bool = False) -> Result:
        assert again
        self.asked.append(tuple(schedule))
        return self.found[tuple(schedule)]


@pytest.mark.parametrize(
    ("found", "best", "result"),
    [
        ({ONE: ok(3), TWO: ok(2)}, ONE, ok(3)),
        ({ONE: ok(1.5), TWO: ok(2)}, TWO, ok(2)),
        # The best one hangs in the fresh process, and the other one was right.
        ({ONE: TIMEOUT, TWO: ok(2)}, TWO, ok(2)),
        # What is slower than no schedule is never reported, nor what gains no more than noise.
        ({ONE: ok(0.39), TWO: ok(0.94)}, (), ok(1)),
        ({ONE: ok(1.2, noise=0.3), TWO: ok(0.9)}, (), ok(1)),
        ({ONE: TIMEOUT, TWO: ok(0.01)}, (), ok(1)),
        ({ONE: TIMEOUT, TWO: TIMEOUT}, (), ok(1)),
    ],
)
def test_the_better_one_of_two_is_reported(
    found: dict[Any, Result], best: Any, result: Result
) -> None:
    trials = [Trial(THREE, ok(1.1)), Trial(ONE, ok(4)), Trial(TWO, ok(3)), Trial(ONE, ok(3.9))]
    with Again({(): ok(1), **found}) as again:
        trial = search.best_of(PROBLEM, trials, again)
        assert (trial.schedule, trial.result.status) == (best, result.status)
        if result.status == "ok":
            assert trial.result.ratio == pytest.approx(result.ratio)
        # A schedule that was tried twice is one, and the third best is not measured again.
        assert again.asked[:2] == [ONE, TWO] and THREE not in again.asked


def test_where_nothing_gave_a_result_nothing_is_measured_again() -> None:
    trials = [Trial(ONE, TIMEOUT), Trial(TWO, Result(status="wrong"))]
    with Again({}) as again:
        assert search.best_of(PROBLEM, trials, again) == trials[0]
        assert not again.asked
