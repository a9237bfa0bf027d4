"""Searches for a good schedule of one module, without learning: what a policy is compared with.

Each search is a function of a problem, measurements, a number of evaluations and a seed; a hit of
the cache counts as an evaluation, so that all have the same number. It yields `Trial`s in the
order in which they were measured; the first is no schedule at all, and the only one of a module
that does not run without a schedule.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir.loops import legal
from tokmill.mlir.measure import Measurements, Result, reward
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.random_schedules import draw
from tokmill.mlir.space import LOOPS
from tokmill.mlir.tokens import features
from tokmill.mlir.tokens.features import Sizes

Schedule = tuple[Any, ...]
"""Actions."""
Row = np.ndarray[Any, Any]
FIRST = 16
"""Random schedules before the evolution begins."""
BATCH = 8
"""Schedules of a generation that are measured."""
POOL = 96
"""Mutants of a generation, of which the cost model picks."""
RETILED = 0.6
"""Share of mutants that differ in one tile."""
CONFIRMED = 2
"""Best schedules that are measured again."""
CHANCE = 0.15
"""Share of a generation that is picked at random, whatever the cost model says."""


class Trial(NamedTuple):
    """A schedule and what it is worth."""

    schedule: Schedule
    result: Result


def score(trial: Trial) -> float:
    """Return what searches make large: the reward that a policy would get."""
    return reward(trial.result)


def measured(problem: Problem, schedule: Sequence[Any], measure: Measurements) -> Trial:
    return Trial(tuple(schedule), measure(problem, schedule))


def measured_again(
    problem: Problem, schedules: Sequence[Sequence[Any]], measure: Measurements
) -> list[Trial]:
    """Return schedules, and no schedule last, measured again in fresh processes.

    The module without a schedule is compiled a second time and measured beside itself: what it
    seems to gain by that is noise of all results.
    """
    again = [Trial(tuple(one), measure(problem, one, again=True)) for one in (*schedules, ())]
    alone = again[-1].result
    spread = abs(alone.ratio - 1) if alone.status == "ok" else 0.0
    return [
        Trial(one, msgspec.structs.replace(result, noise=max(result.noise, spread)))
        for one, result in again
    ]


def confirmed(problem: Problem, schedules: Sequence[Sequence[Any]], measure: Measurements) -> Trial:
    """Return the best of some schedules as `measured_again`, or no schedule if none is faster."""
    *again, alone = measured_again(problem, schedules, measure)
    best = max(again, key=score, default=alone)
    return best if score(best) > 0 else alone


def best_of(problem: Problem, trials: Sequence[Trial], measure: Measurements) -> Trial:
    """Return the better one of the two best trials, or no schedule, as `confirmed` says.

    Of two, because one may hang in the fresh process that did not before. Where no trial gave a
    result, it is the best of the failures as it was.
    """
    ranked = sorted(trials, key=score, reverse=True)
    if all(one.result.status != "ok" for one in ranked):
        return ranked[0]
    good = dict.fromkeys(one.schedule for one in ranked if score(one) > 0 and one.schedule)
    return confirmed(problem, list(good)[:CONFIRMED], measure)


def iree_default(problem: Problem, iree: Measurements) -> Result:
    """Return what IREE's default of a module is worth, by measurements of `IreeDefault`.

    What IREE does not compile is `refused`.
    """
    try:
        return iree.file(problem, "")
    except TokmillError as error:
        return Result(status="refused", reason=error.what)


def random_search(
    problem: Problem, measure: Measurements, evaluations: int, seed: int
) -> Iterator[Trial]:
    rng = random.Random(seed)
    alone = measured(problem, (), measure)
    yield alone
    for _ in range(evaluations - 1 if alone.result.status == "ok" else 0):
        yield measured(problem, draw(problem, rng), measure)


def evolution(
    problem: Problem, measure: Measurements, evaluations: int, seed: int
) -> Iterator[Trial]:
    """Evolve schedules; a cost model, learned from what was measured, picks among mutants.

    As Ansor does (Zheng et al., 2020), with a forest of randomized trees on vectors of histories.
    """
    rng = random.Random(seed)
    sizes = Sizes.of(problem.operations, normalize="log2", tiles=LOOPS.sizes)
    trials: dict[Schedule, Trial] = {}
    rows: dict[Schedule, np.ndarray[Any, Any]] = {}

    def spend(schedule: Schedule) -> Trial:
        trials[schedule] = measured(problem, schedule, measure)
        rows[schedule] = _row(problem, schedule, sizes)
        return trials[schedule]

    alone, spent = spend(()), 1
    yield alone
    if alone.result.status != "ok":
        return
    while spent < min(FIRST, evaluations):
        yield spend(draw(problem, rng))
        spent += 1
    while spent < evaluations:
        parents = sorted(trials.values(), key=score, reverse=True)[:FIRST]
        mutants = {_mutant(problem, rng.choice(parents).schedule, rng) for _ in range(POOL)}
        fresh = sorted(mutants - trials.keys(), key=repr) or [draw(problem, rng)]
        guesses = {schedule: _row(problem, schedule, sizes) for schedule in fresh}
        for schedule in _picked(guesses, trials, rows, rng, seed):
            if spent >= evaluations:
                return
            yield spend(schedule)
            spent += 1


def _picked(
    fresh: dict[Schedule, Row],
    trials: dict[Schedule, Trial],
    rows: dict[Schedule, Row],
    rng: random.Random,
    seed: int,
) -> list[Schedule]:
    """Return the schedules of a generation: the best by the model, and some at random."""
    trees = plugins.require("sklearn.ensemble")
    # Forests of one thread: boosted trees of the same package use all cores for these few rows.
    # It takes four bytes of a seed, which may have eight and a sign.
    model = trees.ExtraTreesRegressor(
        n_estimators=48, min_samples_leaf=2, random_state=seed & 0xFFFFFFFF
    )
    model.fit(np.stack(list(rows.values())), [score(trial) for trial in trials.values()])
    guessed, schedules = model.predict(np.stack(list(fresh.values()))), list(fresh)
    ranked = [schedules[place] for place in np.argsort(-guessed, kind="stable")]
    random_ones = max(1, int(BATCH * CHANCE))
    picked = ranked[: BATCH - random_ones]
    rest = ranked[BATCH - random_ones :]
    return picked + rng.sample(rest, min(random_ones, len(rest)))


def _mutant(problem: Problem, parent: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule with one other tile than its parent, or one that begins as its parent."""
    places = [place for place, action in enumerate(parent) if hasattr(action, "sizes")]
    if places and rng.random() < RETILED:
        place = rng.choice(places)
        action = parent[place]
        number = int(action.op[3:])
        state = legal.replay(problem.operations, parent[:place])[number]
        loop, kind = rng.randrange(len(state.bounds)), str(action.__struct_config__.tag)
        possible = LOOPS.tiles(state, kind, loop)
        sizes = list(action.sizes)
        sizes[loop] = rng.choice(
            [size for size, may in zip(LOOPS.sizes, possible, strict=True) if may]
        )
        changed = msgspec.structs.replace(action, sizes=tuple(sizes))
        result = (*parent[:place], changed, *parent[place + 1 :])
        with contextlib.suppress(UsageError):
            legal.replay(problem.operations, result)
            return result
    return draw(problem, rng, parent[: rng.randint(0, max(0, len(parent) - 1))])


def _row(problem: Problem, schedule: Schedule, sizes: Sizes) -> Row:
    parts = []
    for state in legal.replay(problem.operations, schedule):
        last = [action for action in state.taken if action.__struct_config__.tag == "vectorize"]
        parts += [
            features.history(state.taken, sizes),
            _logs(state.bounds, sizes),
            np.array([len(last), np.log2(state.volume)]),
        ]
        # A tree cuts at a size: one number a loop says more than a place for each tile.
        cut = {
            features.CUTS[action.__struct_config__.tag]: action.sizes
            for action in state.taken
            if action.__struct_config__.tag in features.CUTS
        }
        parts += [_logs(cut.get(place, ()), sizes) for place in range(3)]
    return np.concatenate(parts)


def _logs(bounds: Sequence[int], sizes: Sizes) -> Row:
    row = np.zeros(sizes.loops)
    clipped = np.maximum(bounds[: sizes.loops], 0.5) if bounds else np.zeros(0)
    row[: len(clipped)] = np.log2(clipped)
    return row


SEARCHES: dict[str, Callable[[Problem, Measurements, int, int], Iterator[Trial]]] = {
    "random": random_search,
    "evolution": evolution,
}
