"""Searches for a good schedule of one module, without learning: what a policy is compared with.

Each search is a function of a problem, measurements, a number of evaluations and a seed; a hit of
the cache counts as an evaluation, so that all have the same number. It yields `Trial`s in the
order in which they were measured.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.errors import UsageError
from tokmill.mlir.draws import draw, draw_action
from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import Measurements, Result, reward
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.space import Space, replay
from tokmill.mlir.tokens import features
from tokmill.mlir.tokens.features import Sizes

Schedule = tuple[Any, ...]
"""Actions of the space of the measurements."""
Row = np.ndarray[Any, Any]
BRANCHES = 8
"""Ways on from a schedule that a greedy search measures."""
FIRST = 16
"""Random schedules before the evolution begins."""
GUESSED = 4
"""Of so many first schedules one is random, and the others are guesses if the space has any."""
BATCH = 8
"""Schedules of a generation that are measured."""
POOL = 96
"""Mutants of a generation, of which the cost model picks."""
RETILED = 0.6
"""Share of mutants that differ in one tile."""
CONFIRMED = 2
"""Best schedules that are measured again."""
CHANCE = 0.15
"""Share of a generation that is picked by chance, whatever the cost model says."""
ENDED = ("timeout", "memory", "crashed")
"""Statuses that a module may have without a schedule too."""


class Trial(NamedTuple):
    """A schedule and what it is worth."""

    schedule: Schedule
    result: Result


def score(trial: Trial) -> float:
    """Return what searches make large: the reward that a policy would get."""
    return reward(trial.result)


def measured(problem: Problem, schedule: Sequence[Any], measure: Measurements) -> Trial:
    """Measure a schedule."""
    return Trial(tuple(schedule), measure(problem, schedule))


def confirmed(problem: Problem, schedules: Sequence[Sequence[Any]], measure: Measurements) -> Trial:
    """Return the best of some schedules, measured again in fresh processes.

    The module without a schedule is compiled a second time and measured beside itself: what it
    seems to gain by that is noise of the result too.
    """
    again = [Trial(tuple(one), measure(problem, one, again=True)) for one in schedules]
    # What is very slow is worth less than what gave no result, and is a result nevertheless.
    best = max(again, key=lambda one: (one.result.status == "ok", score(one)))
    if best.result.status != "ok" or not best.schedule:
        return best
    alone = measure(problem, (), again=True)
    spread = abs(alone.ratio - 1) if alone.status == "ok" else 0.0
    noise = max(best.result.noise, spread)
    return Trial(best.schedule, msgspec.structs.replace(best.result, noise=noise))


def best_of(problem: Problem, trials: Sequence[Trial], measure: Measurements) -> Trial:
    """Return the better one of the two best trials, as `confirmed` measures them again.

    Of two, because one may hang in the fresh process that did not before. Where no trial gave a
    result, it is the best of the failures as it was.
    """
    ranked = sorted(trials, key=score, reverse=True)
    good = list(dict.fromkeys(one.schedule for one in ranked if one.result.status == "ok"))
    return confirmed(problem, good[:CONFIRMED], measure) if good else ranked[0]


def while_it_runs(
    trials: Iterator[Trial], problem: Problem, measure: Measurements
) -> Iterator[Trial]:
    """Pass trials on, and end after one that shows that the module does not run unscheduled.

    Where a schedule ends its process, hangs or wants too much memory, the module is run once
    without one.
    """
    runs = False
    for trial in trials:
        yield trial
        if trial.result.status == "ok":
            runs = True
        elif not runs and trial.result.status in ENDED:
            runs = measure(problem, ()).status == "ok"
            if not runs:
                return


def by_chance(
    problem: Problem, measure: Measurements, evaluations: int, seed: int
) -> Iterator[Trial]:
    """Measure random schedules."""
    chance, problem = random.Random(seed), measure.problem(problem)
    for _ in range(evaluations):
        yield measured(problem, draw(problem, chance, space=measure.space), measure)


def greedy(problem: Problem, measure: Measurements, evaluations: int, seed: int) -> Iterator[Trial]:
    """Add the best action of a few, one at a time, operation after operation."""
    chance, problem = random.Random(seed), measure.problem(problem)
    space, spent = measure.space, 1
    best = measured(problem, (), measure)
    yield best
    for number in range(len(problem.operations) - 1, -1, -1):
        front = best
        for _ in range(legal.LONGEST):
            grown: list[Trial] = []
            for schedule in _ways_on(space, problem, front.schedule, number, chance):
                if spent >= evaluations:
                    return
                grown.append(measured(problem, schedule, measure))
                spent += 1
                yield grown[-1]
            if not grown:
                break
            front = max(grown, key=score)
            best = max(best, front, key=score)
    while spent < evaluations:
        yield measured(problem, draw(problem, chance, space=space), measure)
        spent += 1


def _ways_on(
    space: Space, problem: Problem, schedule: Schedule, number: int, chance: random.Random
) -> list[Schedule]:
    state = replay(space, problem.operations, schedule)[number]
    found: dict[Schedule, None] = {}
    for _ in range(4 * BRANCHES):
        if state.done or len(found) == BRANCHES:
            break
        action = draw_action(space, state, chance)
        if not isinstance(action, actions.Stop):
            found[(*schedule, action)] = None
    return list(found)


def evolution(
    problem: Problem, measure: Measurements, evaluations: int, seed: int
) -> Iterator[Trial]:
    """Evolve schedules; a cost model, learned from what was measured, picks among mutants.

    As Ansor does (Zheng et al., 2020), with a forest of randomized trees on vectors of histories.
    """
    chance, problem = random.Random(seed), measure.problem(problem)
    space = measure.space
    sizes = Sizes.of(problem.operations, normalize="log2", tiles=space.sizes)
    known: dict[Schedule, Trial] = {}
    rows: dict[Schedule, np.ndarray[Any, Any]] = {}

    def spend(schedule: Schedule) -> Trial:
        known[schedule] = measured(problem, schedule, measure)
        rows[schedule] = _row(space, problem, schedule, sizes)
        return known[schedule]

    spent = 0
    while spent < min(FIRST, evaluations):
        guess = space.guess(problem, chance) if spent % GUESSED else ()
        yield spend(guess or draw(problem, chance, space=space))
        spent += 1
    while spent < evaluations:
        parents = sorted(known.values(), key=score, reverse=True)[:FIRST]
        mutants = {
            _mutant(space, problem, chance.choice(parents).schedule, chance) for _ in range(POOL)
        }
        fresh = sorted(mutants - known.keys(), key=repr) or [draw(problem, chance, space=space)]
        guesses = {schedule: _row(space, problem, schedule, sizes) for schedule in fresh}
        for schedule in _picked(guesses, known, rows, chance, seed):
            if spent >= evaluations:
                return
            yield spend(schedule)
            spent += 1


def _picked(
    fresh: dict[Schedule, Row],
    known: dict[Schedule, Trial],
    rows: dict[Schedule, Row],
    chance: random.Random,
    seed: int,
) -> list[Schedule]:
    """Return the schedules of a generation: the best by the model, and some by chance."""
    trees = plugins.require("sklearn.ensemble")
    # Forests of one thread: boosted trees of the same package use all cores for these few rows.
    # It takes four bytes of a seed, which may have eight and a sign.
    model = trees.ExtraTreesRegressor(
        n_estimators=48, min_samples_leaf=2, random_state=seed & 0xFFFFFFFF
    )
    model.fit(np.stack(list(rows.values())), [score(trial) for trial in known.values()])
    guessed, schedules = model.predict(np.stack(list(fresh.values()))), list(fresh)
    ranked = [schedules[place] for place in np.argsort(-guessed, kind="stable")]
    random_ones = max(1, int(BATCH * CHANCE))
    picked = ranked[: BATCH - random_ones]
    rest = ranked[BATCH - random_ones :]
    return picked + chance.sample(rest, min(random_ones, len(rest)))


def _mutant(space: Space, problem: Problem, parent: Schedule, chance: random.Random) -> Schedule:
    """Return a schedule with one other tile than its parent, or one that begins as its parent."""
    places = [place for place, action in enumerate(parent) if hasattr(action, "sizes")]
    if places and chance.random() < RETILED:
        place = chance.choice(places)
        action = parent[place]
        number = int(action.op[3:])
        state = replay(space, problem.operations, parent[:place])[number]
        loop, kind = chance.randrange(len(state.bounds)), str(action.__struct_config__.tag)
        possible = space.tiles(state, kind, loop)
        sizes = list(action.sizes)
        sizes[loop] = chance.choice(
            [size for size, may in zip(space.sizes, possible, strict=True) if may]
        )
        changed = msgspec.structs.replace(action, sizes=tuple(sizes))
        made = (*parent[:place], changed, *parent[place + 1 :])
        with contextlib.suppress(UsageError):
            replay(space, problem.operations, made)
            return made
    return draw(problem, chance, parent[: chance.randint(0, max(0, len(parent) - 1))], space)


def _row(space: Space, problem: Problem, schedule: Schedule, sizes: Sizes) -> Row:
    parts = []
    for state in replay(space, problem.operations, schedule):
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
    found = np.maximum(bounds[: sizes.loops], 0.5) if bounds else np.zeros(0)
    row[: len(found)] = np.log2(found)
    return row


SEARCHES: dict[str, Callable[[Problem, Measurements, int, int], Iterator[Trial]]] = {
    "random": by_chance,
    "greedy": greedy,
    "evolution": evolution,
}
