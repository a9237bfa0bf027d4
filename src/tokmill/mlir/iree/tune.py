"""Tuning of a model: the best tuning spec for IREE within a time, checked, one for all operations.

The time goes where the model spends its own: the next few evaluations are those of the operation
with the largest share that has had the fewest. Results are in the cache of the measurements, and
`State` says how far it came, so that a tuning that was ended goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tokmill import files
from tokmill.child import Limits
from tokmill.child_calls import call
from tokmill.errors import TokmillError, UsageError
from tokmill.headers import loads_json
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
MOST_STATE = 1 << 30
"""Bytes of a state that are read."""
WHOLE = Limits(seconds=1800, memory=16 << 30)
"""Limits of compiling and running the whole model."""


class State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How far a tuning came."""

    version: int = 1
    problems: list[str]
    """Texts of the operations."""
    seed: int
    seconds: float = 0.0
    """Time that was spent."""
    evaluations: list[int]
    """Of each operation."""


class Part(msgspec.Struct, kw_only=True):
    """What was found for an operation."""

    name: str
    count: int
    """How often it runs in the model."""
    evaluations: int
    status: str
    """`tuned`, `default` (nothing is faster), `not reached`, or why it cannot be tuned."""
    default: float = float("nan")
    """Nanoseconds by IREE's default."""
    tuned: float = float("nan")
    gain: float = 1.0


class Tuned(msgspec.Struct, kw_only=True):
    """A spec, and what it is worth."""

    spec: str
    parts: list[Part]


def tune(
    problems: Sequence[Problem],
    counts: Sequence[int],
    measure: Measurements,
    *,
    seconds: float,
    seed: int = 0,
    state: Path | None = None,
    tick: Callable[[float, int], None] = lambda spent, evaluations: None,
) -> Tuned:
    """Return the best spec for some operations; `counts` says how often each runs.

    `state` is read if it is there, and written as it goes. `tick` hears of the seconds spent and
    of the evaluations.

    Raises `UsageError` if nothing can be tuned, or if the state is that of another model.
    """
    space = measure.space
    assert isinstance(space, IreeSpace)
    parts, made = _parts(problems, counts, measure)
    kept = _state(state, problems, seed)
    found: list[list[Trial]] = [[] for _ in problems]
    running = {
        number: search.evolution(problem, measure, MOST, seed) for number, problem in made.items()
    }
    done = [0] * len(problems)
    since = time.monotonic() - kept.seconds
    # What was evaluated before comes from the cache, in the same order.
    while running and (time.monotonic() - since < seconds or sum(done) < sum(kept.evaluations)):
        number = max(running, key=lambda each: _share(found[each], counts[each], made[each]))
        for _ in range(BATCH):
            trial = next(running[number], None)
            if trial is None:
                del running[number]
                break
            found[number].append(trial)
            done[number] += 1
            tick(time.monotonic() - since, sum(done))
        if sum(done) >= sum(kept.evaluations):
            kept.seconds, kept.evaluations = time.monotonic() - since, done
            _write(state, kept)
    chosen = []
    for number, problem in made.items():
        best = _best(problem, found[number], measure)
        _tell(parts[number], found[number], best)
        if parts[number].status == "tuned" and best is not None:
            chosen.append((problem, best.schedule))
    return Tuned(spec=space.merged(chosen), parts=parts)


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
                # They wait for memory; and others of the same sizes would be matched too.
                raise UsageError("element by element", hint="")
        except TokmillError as error:
            status = f"left: {error.what}"
        else:
            made[number] = found
        parts.append(Part(name=problem.name, count=count, evaluations=0, status=status))
    if not made:
        raise UsageError(
            "no operation can be tuned: "
            + "; ".join(sorted({part.status for part in parts}))[:300],
            hint="products of matrices, convolutions, poolings and reductions can",
        )
    return parts, made


def _share(trials: list[Trial], count: int, problem: Problem) -> tuple[bool, float]:
    """Return how much an operation wants to be evaluated next: untried ones first, large first."""
    if not trials:
        return True, float(count * sum(each.iterations for each in problem.operations))
    times = [trial.result.nanoseconds for trial in trials if trial.result.status == "ok"]
    times += [trial.result.baseline for trial in trials if trial.result.status == "ok"]
    return False, count * min(times, default=0.0) / len(trials)


def _best(problem: Problem, trials: list[Trial], measure: Measurements) -> Trial | None:
    """Return the best trial, measured again in a fresh process; None if it gains nothing."""
    ranked = sorted(trials, key=search.score, reverse=True)[:2]
    again = [
        Trial(trial.schedule, measure(problem, trial.schedule, again=True))
        for trial in ranked
        if search.score(trial) > 0 and trial.schedule
    ]
    return max(again, key=search.score, default=None)


def _tell(part: Part, trials: list[Trial], best: Trial | None) -> None:
    part.evaluations = len(trials)
    good: list[Result] = [trial.result for trial in trials if trial.result.status == "ok"]
    part.default = part.tuned = min((each.baseline for each in good), default=float("nan"))
    if not trials and part.status == "default":
        part.status = "not reached"
    if best is not None and best.result.status == "ok" and best.result.gain >= LEAST:
        part.status, part.gain = "tuned", best.result.gain
        part.default, part.tuned = best.result.baseline, best.result.nanoseconds


def _state(path: Path | None, problems: Sequence[Problem], seed: int) -> State:
    texts = [problem.text for problem in problems]
    new = State(problems=texts, seed=seed, evaluations=[0] * len(texts))
    if path is None or not path.exists():
        return new
    try:
        kept: State = loads_json(files.read_start(path, MOST_STATE), State)
    except ValueError as error:
        raise TokmillError(
            f"the state of the tuning cannot be read: {error}",
            where=str(path),
            hint="remove it: the measurements are in their cache",
        ) from None
    if (kept.problems, kept.seed, kept.version) != (texts, seed, new.version) or len(
        kept.evaluations
    ) != len(texts):
        raise UsageError(
            "a tuning of something else was begun there, or with another seed",
            where=str(path),
            hint="choose another file for the spec, or remove this one",
        )
    return kept


def _write(path: Path | None, state: State) -> None:
    if path is not None:
        files.write_file(path, msgspec.json.encode(state).decode())


class Whole(msgspec.Struct, kw_only=True):
    """A model compiled with and without a spec."""

    status: str
    """`ok` or `wrong`."""
    obeyed: int
    """Dispatches whose operation has a configuration of the spec."""
    dispatches: int
    default: float
    """Nanoseconds; the least of the runs."""
    tuned: float
    noise: float
    error: float
    allowed: float


def whole(
    module: str, spec: str, *, runs: int, seed: int, length: int, parameters: Path | None = None
) -> Whole:
    """Compile a model with and without a spec, compare what they give, and time both in turns.

    `length`: the longest sum in it. `parameters`: an archive of weights (`.irpa`).

    Raises `TokmillError` if it cannot be compiled or run, `ChildDied` if it takes too much.
    """
    answer = call(
        "tokmill.mlir.iree.executor:answer",
        {
            "ask": "whole",
            "module": module,
            "schedule": spec,
            "parameters": str(parameters or ""),
            "runs": runs,
            "seed": seed,
            "length": length,
        },
        limits=WHOLE,
    )
    return msgspec.convert(answer, Whole)
