"""Run in a child: a module's operations as sequences of tokens, also in the middle of schedules.

The sequences are those of observations (`field_tokens.tokens`), so a model that is trained on
them reads what a policy reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tokmill.errors import TokmillError
from tokmill.mlir import draws
from tokmill.mlir.loops import legal
from tokmill.mlir.modules import cut, problem
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.space import LOOPS
from tokmill.mlir.tokens import field_tokens
from tokmill.mlir.tokens.field_tokens import Tokens
from tokmill.mlir.tokens.views import producer_of

KINDS_OF_REASONS = 100
"""Reasons that are counted apart."""


class Met(NamedTuple):
    """One observation of a schedule as it grows."""

    operation: int
    """Number of the operation in its problem."""
    step: int
    """Actions taken on it."""
    tokens: Tokens


def walk(given: Problem, chance: random.Random) -> Iterator[Met]:
    """Yield what the environment shows during a random schedule, the last operation first."""
    for place in range(len(given.operations) - 1, -1, -1):
        operation = given.operations[place]
        state = legal.begin(operation)
        producer = producer_of(given, operation)
        step = 0
        while not state.done:
            yield Met(place, step, field_tokens.tokens(state, producer))
            state = legal.take(state, draws.draw_action(LOOPS, state, chance))
            step += 1


def begun(given: Problem) -> Iterator[Met]:
    """Yield the operations in their order before any action."""
    for place, operation in enumerate(given.operations):
        producer = producer_of(given, operation)
        yield Met(place, 0, field_tokens.tokens(legal.begin(operation), producer))


def make(request: dict[str, Any]) -> dict[str, Any]:
    """Return the sequences of a module as plain values, for one range of schedules.

    `request`: `text`, `where`, `seed`, `first` and `last`: schedules `first` … `last` - 1, of
    which 0 has no action. The answer: `ids`, `segments`, `depths` (uint8, end to end), `lengths`
    (int64), all as bytes; a list each of `names`, `counts`, `schedules` and `steps`; and `skipped`,
    reason → operations.
    """
    problems, counts, skipped = _read(request["text"], request["where"])
    rows: list[tuple[Met, str, int, int]] = []
    for schedule in range(request["first"], request["last"]):
        for number, (given, count) in enumerate(zip(problems, counts, strict=True)):
            chance = random.Random(f"{request['seed']} {schedule} {number}")
            met = walk(given, chance) if schedule else begun(given)
            for one in met:
                # What no action has changed is there as the schedule 0.
                if one.step or not schedule:
                    rows.append((one, _name(given, one.operation), count, schedule))
    columns = {
        name: b"".join(getattr(one.tokens, name).astype(np.uint8).tobytes() for one, *_ in rows)
        for name in Tokens._fields
    }
    lengths = np.array([len(one.tokens.ids) for one, *_ in rows], np.int64)
    return {
        **columns,
        "lengths": lengths.tobytes(),
        "names": [name for _, name, _, _ in rows],
        "counts": [min(count, (1 << 64) - 1) for _, _, count, _ in rows],
        "schedules": [schedule for *_, schedule in rows],
        "steps": [one.step for one, *_ in rows],
        "skipped": skipped,
    }


@lru_cache(maxsize=1)
def _read(text: str, where: str) -> tuple[list[Problem], list[int], dict[str, int]]:
    """Return the problems of a module: itself if it can be scheduled whole, else its operations.

    Only in a whole module an operation has its producer beside it.
    """
    whole = found = None
    try:
        whole = problem.of_text(text, where)
    except TokmillError:
        pass
    try:
        found = cut.cut(text, where)
    except TokmillError:
        if whole is None:
            raise
    skipped: dict[str, int] = {}
    for name, why in found.skipped if found else ():
        reason = f"{name}: {why}"
        if reason not in skipped and len(skipped) >= KINDS_OF_REASONS:
            reason = "other operations that cannot be scheduled alone"
        skipped[reason] = skipped.get(reason, 0) + 1
    if whole is not None:
        return [whole], [1], skipped
    assert found is not None
    return found.problems, found.counts, skipped


def _name(given: Problem, place: int) -> str:
    operation = given.operations[place]
    return f"{operation.name.removeprefix('linalg.')} {'x'.join(map(str, operation.bounds))}"
