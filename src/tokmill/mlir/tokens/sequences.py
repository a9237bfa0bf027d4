"""Run in a child: a module's operations as sequences of tokens, also in the middle of schedules.

The sequences are those of observations (`field_tokens.tokens`), so a model that is trained on
them reads what a policy reads.
"""

import random
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.mlir import random_schedules as draws
from tokmill.mlir.loops import legal
from tokmill.mlir.modules import cut, problem
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.tokens import field_tokens
from tokmill.mlir.tokens.field_tokens import Tokens
from tokmill.mlir.tokens.views import producer_of

KINDS_OF_REASONS = 100
"""Reasons that are counted apart."""
MOST_SKIPPED = 1 << 48
"""Operations skipped for one reason at most: these numbers are added over many modules."""


class Read(NamedTuple):
    """The problems of a module."""

    problems: list[Problem]
    runs: list[list[int]]
    """For each operation of each problem: how often it runs in the module, together with others
    that have the same sequence before any action."""
    skipped: dict[str, int]
    """Reason → operations."""


class Observed(NamedTuple):
    """One observation of a schedule as it grows."""

    operation: int
    """Number of the operation in its problem."""
    step: int
    """Actions taken on it."""
    tokens: Tokens


def walk(given: Problem, rng: random.Random) -> Iterator[Observed]:
    """Yield what the environment shows during a random schedule, the last operation first."""
    taken: list[Any] = []
    for place in range(len(given.operations) - 1, -1, -1):
        operation = given.operations[place]
        state = legal.reached(legal.begin(operation), taken)
        producer = producer_of(given, operation)
        step = 0
        while not state.done:
            yield Observed(place, step, field_tokens.tokens(state, producer))
            taken.append(draws.draw_action(state, rng))
            state = legal.take(state, taken[-1])
            step += 1


def begun(given: Problem) -> Iterator[Observed]:
    for place, operation in enumerate(given.operations):
        producer = producer_of(given, operation)
        yield Observed(place, 0, field_tokens.tokens(legal.begin(operation), producer))


def make(request: dict[str, Any]) -> dict[str, Any]:
    """Return the sequences of a module as plain values, for one range of schedules.

    `request`: `text`, `where`, `seed`, `first` and `last`: schedules `first` … `last` - 1, of
    which 0 has no action. The answer: `ids`, `segments`, `depths` (uint8, end to end), `lengths`
    (int64), all as bytes; a list each of `names`, `counts`, `schedules` and `steps`; and `skipped`,
    reason → operations. Equal sequences have equal counts, whatever the schedule.
    """
    read = _read(request["text"], request["where"])
    rows: list[tuple[Observed, str, int, int]] = []
    for schedule in range(request["first"], request["last"]):
        for number, (given, runs) in enumerate(zip(read.problems, read.runs, strict=True)):
            rng = random.Random(f"{request['seed']} {schedule} {number}")
            met = walk(given, rng) if schedule else begun(given)
            for one in met:
                # What no action has changed is there as the schedule 0.
                if one.step or not schedule:
                    count = runs[one.operation]
                    own = given.operations[one.operation]
                    sizes = "x".join(map(str, own.bounds))
                    name = f"{own.name.removeprefix('linalg.')} {sizes}"
                    rows.append((one, name, count, schedule))
    columns = {
        name: b"".join(getattr(one.tokens, name).astype(np.uint8).tobytes() for one, *_ in rows)
        for name in Tokens._fields
    }
    lengths = np.array([len(one.tokens.ids) for one, *_ in rows], np.int64)
    return {
        **columns,
        "lengths": lengths.tobytes(),
        "names": [name for _, name, _, _ in rows],
        "counts": [count for _, _, count, _ in rows],
        "schedules": [schedule for *_, schedule in rows],
        "steps": [one.step for one, *_ in rows],
        "skipped": read.skipped,
    }


@lru_cache(maxsize=1)
def _read(text: str, where: str) -> Read:
    """Return the problems of a module: itself if it can be scheduled whole, else its operations.

    Only in a whole module an operation has its producer beside it.
    """
    whole = pieces = None
    try:
        whole = problem.of_text(text, where)
    except TokmillError:
        pass
    try:
        pieces = cut.cut(text, where)
    except TokmillError:
        if whole is None:
            raise
    skipped: dict[str, int] = {}
    left = zip(pieces.skipped, pieces.skipped_counts, strict=True) if pieces else ()
    for (name, why), count in left:
        reason = f"{name}: {why}"
        if reason not in skipped and len(skipped) >= KINDS_OF_REASONS:
            reason = "other operations that cannot be scheduled alone"
        skipped[reason] = min(skipped.get(reason, 0) + count, MOST_SKIPPED)
    if whole is not None:
        return Read([whole], _together([whole], [1]), skipped)
    assert pieces is not None
    return Read(pieces.problems, _together(pieces.problems, pieces.counts), skipped)


def _together(problems: list[Problem], counts: list[int]) -> list[list[int]]:
    """Return how often each operation runs, together with those that have the same sequence."""
    sequences = [
        [b"".join(column.tobytes() for column in met.tokens) for met in begun(given)]
        for given in problems
    ]
    runs: Counter[bytes] = Counter()
    for inside, count in zip(sequences, counts, strict=True):
        for sequence in inside:
            runs[sequence] += count
    return [[min(runs[sequence], cut.MOST_RUNS) for sequence in inside] for inside in sequences]
