"""What a trained policy is worth on modules: without any measurement, and as the best of some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokmill.errors import UsageError
from tokmill.mlir import search
from tokmill.mlir.env import ScheduleEnv
from tokmill.mlir.facts import facts_of_result
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.search import Trial
from tokmill.models.model import Tensors
from tokmill.rl.loop import outcome
from tokmill.rl.modules import check_fits
from tokmill.rl.rollout import Episode, play, play_new
from tokmill.rl.task import Schedules

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
    """The best of them; its result was measured again in a fresh process."""
    text: str
    """That schedule as a file."""

    @property
    def operation(self) -> str:
        """Return the kind of its operation; `chain` for several."""
        operations = self.problem.operations
        return operations[0].kind if len(operations) == 1 else "chain"


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
    if samples < 0:
        raise UsageError(f"{samples} samples are less than none", hint="--samples 16")

    def act(batch: Tensors) -> dict[str, Tensor]:
        with torch.no_grad():
            return task.act(batch)

    def met(number: int, schedule: tuple[Any, ...]) -> bool:
        return (number, schedule) in known

    room, numbers = ScheduleEnv(problems, measure, config.sizes, config.view), range(len(problems))
    task.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rounds = [play(act, room, numbers, task.layout, greedy=True, done=done)]
        known = {(one.problem, one.schedule) for one in rounds[0]}
        for _ in range(samples):
            rounds.append(play_new(act, room, numbers, task.layout, met, REDRAWS, done))
            known |= {(one.problem, one.schedule) for one in rounds[-1]}
    found = []
    for number, problem in enumerate(problems):
        tried = [episodes[number] for episodes in rounds]
        best = max(tried, key=lambda one: one.gain)
        if samples and best.result.status == "ok":
            # The best of several is partly the luckiest.
            trials = [Trial(one.schedule, one.result) for one in tried]
            again = search.best_of(problem, trials, measure)
            best = next(one for one in tried if one.schedule == again.schedule)
            # A copy: what was found without a measurement stays as it was.
            best = replace(best, result=again.result)
        text = task.space.text(measure.problem(problem), best.schedule)
        found.append(Evaluated(problem, tried[0], tried, best, text))
    return found


def summary(found: Sequence[Evaluated]) -> dict[str, Any]:
    """Return geometric means and shares over modules, and the best gain of each operation."""
    return {
        "zero_shot": outcome([one.first for one in found]),
        "best": outcome([one.best for one in found]),
        "operations": {
            kind: {
                "modules": len(same),
                "zero_shot": outcome([one.first for one in same])["speedup"],
                "best": outcome([one.best for one in same])["speedup"],
                "largest": float(np.max([one.best.gain for one in same])),
            }
            for kind in sorted({one.operation for one in found})
            for same in [[one for one in found if one.operation == kind]]
        },
    }


def facts(one: Evaluated) -> dict[str, Any]:
    """Return what `--json` says of a module."""
    return {
        "module": one.problem.name,
        "operation": one.operation,
        "zero_shot": _facts(one.first),
        "best": _facts(one.best),
        "measured": len(one.tried),
        "best_so_far": np.maximum.accumulate([max(1.0, e.gain) for e in one.tried]).tolist(),
        "schedule": one.text,
    }


def _facts(episode: Episode) -> Mapping[str, Any]:
    actions = [repr(action) for action in episode.schedule]
    return {**facts_of_result(episode.result), "actions": actions}
