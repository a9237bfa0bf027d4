"""Searches for a good schedule of one module, without learning: what a policy is compared with.

Each search is a function of a problem, measurements, a budget of evaluations and a seed; a hit of
the cache counts as an evaluation, so that all have the same number. It yields `Trial`s in the
order in which they were measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.mlir import env, features, legal
from tokmill.mlir import schedule as actions
from tokmill.mlir.features import Sizes
from tokmill.mlir.legal import State
from tokmill.mlir.measure import Measurements, Result
from tokmill.mlir.problem import Problem

DRAWS = 50
"""Draws of tiles until one of them cuts a loop."""
WIDTH = 4
"""Schedules that a beam keeps."""
BRANCHES = 8
"""Ways on from each of them that are measured."""
FIRST = 16
"""Random schedules before the evolution begins."""
BATCH = 8
"""Schedules of a generation that are measured."""
POOL = 96
"""Mutants of a generation, of which the cost model picks."""
GREEDY = 0.15
"""Share of a generation that is picked by chance."""


class Trial(NamedTuple):
    """A schedule and what it is worth."""

    schedule: actions.Schedule
    result: Result


def score(trial: Trial) -> float:
    """Return what searches make large: the reward that a policy would get."""
    return env.reward(trial.result)


def draw_action(state: State, chance: random.Random) -> actions.AnyAction:
    """Return a legal action, drawn evenly among kinds and then among tiles."""
    kinds = [kind for kind, may in legal.allowed(state).items() if may]
    kind, tag = chance.choice(kinds), state.operation.tag
    if kind == "vectorize":
        return actions.Vectorize(tag)
    if kind == "im2col":
        return actions.Im2col(tag)
    if kind == "interchange":
        order = list(range(len(state.bounds)))
        chance.shuffle(order)
        return actions.Interchange(tag, tuple(order))
    sizes = _draw_tiles(state, kind, chance) if kind != "stop" else ()
    if not any(sizes):
        return actions.Stop(tag)
    if kind == "fuse":
        return actions.Fuse(tag, sizes, f"op_{state.operation.producers[-1][1]}")
    cut: dict[str, Callable[..., actions.AnyAction]] = {
        "tile": actions.Tile,
        "parallel": actions.Parallel,
        "pack": actions.Pack,
    }
    return cut[kind](tag, sizes)


def _draw_tiles(state: State, kind: str, chance: random.Random) -> tuple[int, ...]:
    sizes: tuple[int, ...] = ()
    for _ in range(DRAWS):
        sizes = tuple(
            chance.choice(
                [
                    size
                    for size, may in zip(legal.TILES, legal.tiles(state, loop), strict=True)
                    if may
                ]
            )
            if kind in ("tile", "pack") or state.parallel[loop]
            else 0
            for loop in range(len(state.bounds))
        )
        if any(sizes):
            break
    return sizes


def draw(problem: Problem, chance: random.Random, kept: actions.Schedule = ()) -> actions.Schedule:
    """Return a schedule that begins with `kept` and goes on by chance, consumers first."""
    states = {state.operation.tag: state for state in legal.replay(problem.operations, kept)}
    taken = list(kept)
    begun = min((int(action.op[3:]) for action in kept), default=len(problem.operations) - 1)
    for number in range(begun, -1, -1):
        state = states[f"op_{number}"]
        while not state.done:
            action = draw_action(state, chance)
            state = legal.take(state, action)
            if not isinstance(action, actions.Stop):
                taken.append(action)
    return tuple(taken)


def measured(problem: Problem, schedule: actions.Schedule, measure: Measurements) -> Trial:
    """Measure a schedule."""
    states = legal.replay(problem.operations, schedule)
    result = measure(problem.text, schedule, legal.decomposed(states), problem.length)
    return Trial(schedule, result)


def by_chance(problem: Problem, measure: Measurements, budget: int, seed: int) -> Iterator[Trial]:
    """Measure random schedules."""
    chance = random.Random(seed)
    for _ in range(budget):
        yield measured(problem, draw(problem, chance), measure)


def beam(
    problem: Problem, measure: Measurements, budget: int, seed: int, width: int = WIDTH
) -> Iterator[Trial]:
    """Add one action at a time to the `width` best schedules, operation after operation."""
    chance = random.Random(seed)
    spent = 0
    kept = [measured(problem, (), measure)]
    yield kept[0]
    spent += 1
    for number in range(len(problem.operations) - 1, -1, -1):
        front = kept
        for _ in range(legal.LONGEST):
            grown: list[Trial] = []
            for trial in front:
                for schedule in _ways_on(problem, trial.schedule, number, chance):
                    if spent >= budget:
                        return
                    grown.append(measured(problem, schedule, measure))
                    spent += 1
                    yield grown[-1]
            if not grown:
                break
            front = sorted(grown, key=score, reverse=True)[:width]
            kept = sorted({t.schedule: t for t in kept + front}.values(), key=score, reverse=True)
            kept = kept[:width]
    while spent < budget:
        yield measured(problem, draw(problem, chance), measure)
        spent += 1


def greedy(problem: Problem, measure: Measurements, budget: int, seed: int) -> Iterator[Trial]:
    """Add the best action of a few, one at a time."""
    return beam(problem, measure, budget, seed, width=1)


def _ways_on(
    problem: Problem, schedule: actions.Schedule, number: int, chance: random.Random
) -> list[actions.Schedule]:
    state = legal.replay(problem.operations, schedule)[number]
    found: dict[actions.Schedule, None] = {}
    for _ in range(4 * BRANCHES):
        if state.done or len(found) == BRANCHES:
            break
        action = draw_action(state, chance)
        if not isinstance(action, actions.Stop):
            found[(*schedule, action)] = None
    return list(found)


def evolution(problem: Problem, measure: Measurements, budget: int, seed: int) -> Iterator[Trial]:
    """Evolve schedules; a cost model, learned from what was measured, picks among mutants.

    As Ansor does (Zheng et al., 2020), with a forest of randomized trees on vectors of histories.
    """
    chance = random.Random(seed)
    sizes = Sizes.of(problem.operations, normalize="log2")
    known: dict[actions.Schedule, Trial] = {}
    rows: dict[actions.Schedule, np.ndarray[Any, Any]] = {}

    def spend(schedule: actions.Schedule) -> Trial:
        known[schedule] = measured(problem, schedule, measure)
        rows[schedule] = _row(problem, schedule, sizes)
        return known[schedule]

    spent = 0
    while spent < min(FIRST, budget):
        yield spend(draw(problem, chance))
        spent += 1
    while spent < budget:
        parents = sorted(known.values(), key=score, reverse=True)[:FIRST]
        mutants = {_mutant(problem, chance.choice(parents).schedule, chance) for _ in range(POOL)}
        fresh = sorted(mutants - known.keys(), key=repr) or [draw(problem, chance)]
        for schedule in _picked(problem, fresh, known, rows, sizes, chance, seed):
            if spent >= budget:
                return
            yield spend(schedule)
            spent += 1


def _picked(
    problem: Problem,
    fresh: list[actions.Schedule],
    known: dict[actions.Schedule, Trial],
    rows: dict[actions.Schedule, np.ndarray[Any, Any]],
    sizes: Sizes,
    chance: random.Random,
    seed: int,
) -> list[actions.Schedule]:
    """Return the schedules of a generation: the best by the model, and some by chance."""
    trees = plugins.require("sklearn.ensemble")
    # Forests of one thread: boosted trees of the same package use all cores for these few rows.
    model = trees.ExtraTreesRegressor(n_estimators=48, min_samples_leaf=2, random_state=seed)
    model.fit(np.stack(list(rows.values())), [score(trial) for trial in known.values()])
    guessed = model.predict(np.stack([_row(problem, schedule, sizes) for schedule in fresh]))
    ranked = [fresh[place] for place in np.argsort(-guessed, kind="stable")]
    random_ones = max(1, int(BATCH * GREEDY))
    picked = ranked[: BATCH - random_ones]
    rest = ranked[BATCH - random_ones :]
    return picked + chance.sample(rest, min(random_ones, len(rest)))


def _mutant(problem: Problem, parent: actions.Schedule, chance: random.Random) -> actions.Schedule:
    """Return a schedule that shares a beginning with its parent."""
    return draw(problem, chance, parent[: chance.randint(0, max(0, len(parent) - 1))])


def _row(problem: Problem, schedule: actions.Schedule, sizes: Sizes) -> np.ndarray[Any, Any]:
    parts = []
    for state in legal.replay(problem.operations, schedule):
        last = [action for action in state.taken if isinstance(action, actions.Vectorize)]
        parts += [
            features.history(state.taken, sizes),
            np.log2([*state.bounds, *[1] * (sizes.loops - len(state.bounds))][: sizes.loops]),
            np.array([len(last), np.log2(state.volume)]),
        ]
    return np.concatenate(parts)


SEARCHES: dict[str, Callable[[Problem, Measurements, int, int], Iterator[Trial]]] = {
    "random": by_chance,
    "greedy": greedy,
    "beam": beam,
    "evolution": evolution,
}
