"""Random schedules: legal actions, drawn one after the other."""

import random
from collections.abc import Sequence
from typing import Any

from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.loops.legal import State
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.space import LOOPS

CUTTING = ("tiles", "parallel_tiles")
"""Parts of actions that cut loops."""
DRAWS = 50
"""Draws of tiles until one of them cuts a loop."""


def draw_action(state: State, rng: random.Random) -> Any:
    """Return a legal action, drawn evenly among kinds and then among tiles."""
    kind = rng.choice([kind for kind, may in legal.allowed(state).items() if may])
    part = LOOPS.parts.get(kind)
    loops = len(state.bounds)
    order = list(range(loops))
    if part == "order":
        rng.shuffle(order)
    sizes = _draw_tiles(state, kind, rng) if part in CUTTING else (0,) * loops
    if part in CUTTING and not any(sizes):
        return actions.Stop(state.operation.tag)
    return LOOPS.action(state, kind, sizes, tuple(order))


def _draw_tiles(state: State, kind: str, rng: random.Random) -> tuple[int, ...]:
    possible = [
        [size for size, may in zip(LOOPS.sizes, LOOPS.tiles(state, kind, loop), strict=True) if may]
        for loop in range(len(state.bounds))
    ]
    sizes: tuple[int, ...] = ()
    for _ in range(DRAWS):
        sizes = tuple(map(rng.choice, possible))
        if any(sizes):
            break
    return sizes


def draw(
    problem: Problem,
    rng: random.Random,
    kept: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """Return a schedule that begins with `kept` and goes on at random, consumers first."""
    states = {state.operation.tag: state for state in legal.replay(problem.operations, kept)}
    taken = list(kept)
    begun = min((int(action.op[3:]) for action in kept), default=len(problem.operations) - 1)
    for number in range(begun, -1, -1):
        state = legal.reached(states[f"op_{number}"], taken)
        while not state.done:
            action = draw_action(state, rng)
            state = legal.take(state, action)
            if not isinstance(action, actions.Stop):
                taken.append(action)
    return tuple(taken)
