"""Tuning for IREE: the best tuning spec for some operations within a time, checked.

Operations that a spec cannot tell apart, such as a convolution that is followed by relu here and
by a sum there, get the same tiles: those of the one that runs most often, which are measured on
the others too. The time goes where the model spends its own: the next few evaluations are those of
the operation with the largest share that has had the fewest. Results are in the cache of the
measurements, so a tuning that is repeated goes on where it was ended.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir import search
from tokmill.mlir.iree.tiles import IreeSpace
from tokmill.mlir.measure import Measurements, Result
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.search import Trial

BATCH = 8
"""Evaluations that an operation gets at a time."""
MOST = 512
"""Evaluations of one operation."""
LEAST = 1.02
"""A gain below it is not worth a line in the spec."""
NOT_REACHED = "not reached"
"""The status of an operation for which no time was left."""
CONFIRMING = 3.0
"""Seconds of a measurement in a new process beyond those of another one."""
SLOWEST = 0.98
"""No operation may be slower than this with the tiles of its group."""


class Part(msgspec.Struct, kw_only=True):
    """What was found for an operation."""

    name: str
    count: int
    """How often it runs in the model."""
    evaluations: int
    status: str
    """`tuned`, `default` (nothing is faster), `not reached`, or why it is left."""
    default: float = float("nan")
    """Nanoseconds by IREE's default."""
    tuned: float = float("nan")
    gain: float = 1.0

    def leave(self, why: str) -> None:
        """Keep IREE's default for the operation."""
        self.status, self.gain, self.tuned = f"default: {why}", 1.0, self.default


class Again:
    """What schedules are worth when they are measured again, each once.

    A tuning that goes on finds the same winners for most operations.
    """

    def __init__(self) -> None:
        self._best: dict[Any, Trial] = {}
        self._one: dict[Any, Result] = {}

    def best(
        self, problem: Problem, schedules: Sequence[tuple[Any, ...]], measure: Measurements
    ) -> Trial:
        """Return `search.confirmed` of some schedules."""
        key = (problem.text, tuple(schedules))
        if key not in self._best:
            self._best[key] = search.confirmed(problem, schedules, measure)
        return self._best[key]

    def one(self, problem: Problem, schedule: tuple[Any, ...], measure: Measurements) -> Result:
        key = (problem.text, schedule)
        if key not in self._one:
            self._one[key] = measure(problem, schedule, again=True)
        return self._one[key]


class NothingToTuneError(UsageError):
    """No operation has tiles that can be chosen; `parts` says why for each."""

    parts: list[Part] = []


class Tuned(msgspec.Struct, kw_only=True):
    """What was found, and a spec of it."""

    spec: str
    parts: list[Part]
    chosen: list[tuple[list[int], Problem, tuple[Any, ...]]]
    """Places of a group in `parts`, its first problem, and its schedule."""


def tune(
    problems: Sequence[Problem],
    counts: Sequence[int],
    measure: Measurements,
    *,
    until: float,
    most: int = MOST,
    seed: int = 0,
    again: Again | None = None,
    tick: Callable[[int], None] = lambda evaluations: None,
) -> Tuned:
    """Return the best spec for some operations; `counts` says how often each runs.

    It ends at `until` (`time.monotonic`), or when each operation had `most` evaluations; the
    search ends earlier, so that its winners can be measured again. `again` has what an earlier
    call in this process measured again. `tick` hears of the evaluations.

    Raises `NothingToTuneError`.
    """
    space, again = measure.space, again or Again()
    assert isinstance(space, IreeSpace)
    measure.until = until
    parts, made = _parts(problems, counts, measure)
    groups = _groups(made, counts, space)
    found: list[list[Trial]] = [[] for _ in problems]
    running = {number: search.evolution(made[number], measure, most, seed) for number in groups}
    often = {number: sum(counts[each] for each in group) for number, group in groups.items()}
    since, done = time.monotonic(), 0
    # What was evaluated before comes from the cache, in the same order.
    while running:
        missed = measure.evaluations - measure.hits
        each = (time.monotonic() - since) / max(missed, 1) + CONFIRMING
        winners = sum(any(search.score(one) > 0 for one in trials) for trials in found)
        if time.monotonic() + winners * (search.CONFIRMED + 1) * each > until:
            break
        number = max(running, key=lambda each: _share(found[each], often[each], made[each]))
        for trial in itertools.islice(running[number], BATCH):
            found[number].append(trial)
            done += 1
            tick(done)
            if time.monotonic() > until:
                break
        if len(found[number]) % BATCH or len(found[number]) >= most:
            del running[number]
    chosen = []
    for number, group in groups.items():
        problem = made[number]
        best = _best(problem, found[number], measure, again)
        _tell(parts[number], found[number], best)
        others = [each for each in group if each != number]
        if parts[number].status != "tuned" or best is None:
            for each in others:
                parts[each].status = parts[number].status
            continue
        if _good(number, others, best, parts, made, measure, again):
            chosen.append((group, problem, best.schedule))
    spec = space.merged([(problem, schedule) for _, problem, schedule in chosen])
    return Tuned(spec=spec, parts=parts, chosen=chosen)


def _groups(
    made: dict[int, Problem], counts: Sequence[int], space: IreeSpace
) -> dict[int, list[int]]:
    """Return the numbers of operations that a spec cannot tell apart, by the largest of each."""
    alike: dict[str, list[int]] = {}
    for number, problem in made.items():
        alike.setdefault(space.identity(problem), []).append(number)
    return {max(group, key=lambda each: counts[each]): group for group in alike.values()}


def _good(
    first: int,
    others: list[int],
    best: Trial,
    parts: list[Part],
    made: dict[int, Problem],
    measure: Measurements,
    again: Again,
) -> bool:
    """Measure a schedule on the other operations of a group; say whether it serves them all."""
    results = {}
    for each in others:
        results[each] = result = again.one(made[each], best.schedule, measure)
        if result.status != "ok" or result.ratio < SLOWEST:
            why = result.status if result.status != "ok" else "slower"
            for one in (first, *others):
                parts[one].leave(f"{why} where it is fused otherwise")
            return False
    for each, result in results.items():
        parts[each].status, parts[each].gain = "tuned", result.gain
        parts[each].default, parts[each].tuned = result.baseline, result.nanoseconds
    return True


def _parts(
    problems: Sequence[Problem], counts: Sequence[int], measure: Measurements
) -> tuple[list[Part], dict[int, Problem]]:
    """Return a part an operation, and the problems that can be tuned by their number."""
    parts, made = [], {}
    for number, (problem, count) in enumerate(zip(problems, counts, strict=True)):
        status = "default"
        try:
            found = measure.problem(problem)
            if all(all(each.parallel) for each in found.operations):
                # Such operations wait for memory, whatever their tiles; and their matcher would
                # find other operations of the same sizes too.
                raise UsageError("element by element", hint="")
        except TokmillError as error:
            status = f"left: {error.what.removeprefix(f'{problem.name}: ')}"
        else:
            made[number] = found
        parts.append(Part(name=problem.name, count=count, evaluations=0, status=status))
    if not made:
        nothing = NothingToTuneError(
            "no operation can be tuned: "
            + "; ".join(sorted({part.status for part in parts}))[:300],
            hint="products of matrices, convolutions, poolings and reductions can",
        )
        nothing.parts = parts
        raise nothing
    return parts, made


def _share(trials: list[Trial], count: int, problem: Problem) -> tuple[bool, float]:
    """Return how much an operation wants to be evaluated next: untried ones first, large first."""
    if not trials:
        return True, float(count * sum(each.iterations for each in problem.operations))
    times = [trial.result.nanoseconds for trial in trials if trial.result.status == "ok"]
    times += [trial.result.baseline for trial in trials if trial.result.status == "ok"]
    return False, count * min(times, default=0.0) / len(trials)


def _best(
    problem: Problem, trials: list[Trial], measure: Measurements, again: Again
) -> Trial | None:
    """Return the best trial, measured again in a fresh process; None if none gained anything."""
    ranked = sorted(trials, key=search.score, reverse=True)
    some = dict.fromkeys(one.schedule for one in ranked if search.score(one) > 0 and one.schedule)
    return again.best(problem, list(some)[: search.CONFIRMED], measure) if some else None


def _tell(part: Part, trials: list[Trial], best: Trial | None) -> None:
    part.evaluations = len(trials)
    good: list[Result] = [trial.result for trial in trials if trial.result.status == "ok"]
    part.default = part.tuned = min((each.baseline for each in good), default=float("nan"))
    if not trials and part.status == "default":
        part.status = NOT_REACHED
    if trials and not good:
        often = Counter(trial.result.status for trial in trials)
        why = ", ".join(f"{count} {status}" for status, count in often.most_common())
        part.status = f"default: no result ({why})"
    if best is not None and best.result.status == "ok" and best.result.gain >= LEAST:
        part.status, part.gain = "tuned", best.result.gain
        part.default, part.tuned = best.result.baseline, best.result.nanoseconds
