"""What a trained policy is worth on modules: without any measurement, and as the best of some."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokmill.mlir import search
from tokmill.mlir.env import ScheduleEnv
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.search import Trial
from tokmill.mlir.space import LOOPS
from tokmill.models.model import Tensors
from tokmill.rl.modules import check_fits
from tokmill.rl.ppo_loop import outcome
from tokmill.rl.rollout import Episode, play, play_new_schedules
from tokmill.rl.schedule_task import Schedules

REDRAWS = 16
"""How often a schedule that was measured before is drawn again."""


@dataclass(frozen=True)
class Evaluated:
    """A module and the schedules that a policy found for it."""

    problem: Problem
    first: Episode
    """By the likeliest actions: nothing was measured before."""
    tried: list[Episode]
    """Those and the drawn ones, in the order in which they were measured."""
    best: Episode
    """The best of them and of no schedule; its result was measured again in a fresh process."""
    text: str
    """That schedule as a file; "" for none."""


def evaluate(
    task: Schedules,
    problems: Sequence[Problem],
    measure: Measurements,
    samples: int = 0,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
) -> list[Evaluated]:
    """Schedule modules by the likeliest actions and `samples` times by drawn ones; measure all.

    `done` is called after each measurement. Raises `UsageError` for a module that the policy has
    no room for.
    """
    config = task.model.config
    for problem in problems:
        check_fits(problem, config.sizes)

    def act(batch: Tensors) -> dict[str, Tensor]:
        with torch.no_grad():
            return task.act(batch)

    def met(number: int, schedule: tuple[Any, ...]) -> bool:
        return (number, schedule) in played

    env, numbers = ScheduleEnv(problems, measure, config.sizes, config.view), range(len(problems))
    task.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rounds = [play(act, env, numbers, task.layout, greedy=True, done=done)]
        played = {(one.problem, one.schedule) for one in rounds[0]}
        for _ in range(samples):
            rounds.append(play_new_schedules(act, env, numbers, task.layout, met, REDRAWS, done))
            played |= {(one.problem, one.schedule) for one in rounds[-1]}
    results = []
    for number, problem in enumerate(problems):
        tried = [episodes[number] for episodes in rounds]
        # The best of several is partly the luckiest, and the only one may be slower than none.
        trials = [Trial(one.schedule, one.result) for one in tried]
        again = search.best_of(problem, trials, measure)
        best = Episode(number, schedule=again.schedule, result=again.result)
        text = LOOPS.text(problem, best.schedule) if best.schedule else ""
        results.append(Evaluated(problem, tried[0], tried, best, text))
    return results


def summary(results: Sequence[Evaluated]) -> dict[str, Any]:
    return {
        "zero_shot": outcome([one.first for one in results]),
        "best": outcome([one.best for one in results]),
    }


def facts(one: Evaluated) -> dict[str, Any]:
    return {
        "module": one.problem.name,
        "zero_shot": _facts(one.first),
        "best": _facts(one.best),
        "measured": len(one.tried),
        "best_so_far": np.maximum.accumulate([max(1.0, e.gain) for e in one.tried]).tolist(),
        "schedule": one.text,
    }


def _facts(episode: Episode) -> Mapping[str, Any]:
    actions = [repr(action) for action in episode.schedule]
    return {**episode.result.facts(), "actions": actions}
