"""What a schedule is worth: measured in a child that may die, kept in a cache, never trusted alone.

A result is a time beside the unscheduled module in the same child, and only after the outputs of
both were compared. A schedule that MLIR declines, that computes something else, that hangs or
ends the child is a result too, with a status of its own, and never a speed-up. The module without
a schedule is measured first: how long a schedule may take follows from its time.
"""

import contextlib
import hashlib
import importlib.metadata
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any, Self

import msgspec
import numpy as np

from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import Child, ChildDied
from tokmill.base.errors import MachineError, TokmillError
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.space import LOOPS, Space

STATUSES = ("ok", "wrong", "refused", "timeout", "memory", "crashed")
VERSION = 3
"""Version of what is measured and how; another does not read results of this one."""
RUNS_ALLOWED, ALONE = 30, 10
"""How many times the time of the module without a schedule the runs of a schedule may take (five
of each are the fewest), and how many times `Settings.seconds` the module itself."""
PENALTY = -1.0
"""Reward of a schedule that was refused, computed something else, hung or crashed."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How schedules are measured."""

    runs: int = 5
    """Runs of candidate and baseline, in turns; the least time of each counts."""
    seconds: float = 30.0
    """Seconds that compiling one candidate may take; those of its runs are added (`RUNS_ALLOWED`),
    and the module without a schedule may take `ALONE` times as many."""
    most_seconds: float = 2.0
    """CPU seconds after which no further run is begun."""
    memory_mb: int = 4096
    """MiB that the child may take."""
    seed: int = 0
    """Seed of the random numbers in the inputs."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one schedule."""

    status: str
    """One of `STATUSES`."""
    reason: str = ""
    nanoseconds: float = float("nan")
    """Least CPU time of a run."""
    baseline: float = float("nan")
    """The same of the module without a schedule."""
    noise: float = float("nan")
    """Median over least time of the baseline, less 1. A smaller gain is reported as 1."""
    error: float = float("nan")
    """Largest difference of results in units of the largest one."""
    allowed: float = float("nan")

    def __post_init__(self) -> None:
        times = (self.nanoseconds, self.baseline)
        timed = all(0 < one < math.inf for one in times) and self.noise >= 0
        if self.status not in STATUSES or (self.status == "ok" and not timed):
            # Of a damaged cache: it is measured again.
            raise ValueError("no such result can be")

    @property
    def ratio(self) -> float:
        """Return the time of the baseline over that of the schedule; NaN without a result."""
        return self.baseline / self.nanoseconds

    @property
    def gain(self) -> float:
        """Return the speed-up, or 1 where it lies within the noise of the baseline."""
        return 1.0 if abs(self.ratio - 1) <= self.noise else self.ratio

    def facts(self) -> dict[str, Any]:
        """Return the result as JSON has it; times in milliseconds, NaN for those that are not."""
        return {
            "status": self.status,
            "reason": self.reason,
            "milliseconds": self.nanoseconds / 1e6,
            "baseline_milliseconds": self.baseline / 1e6,
            "speedup": self.gain,
            "noise": self.noise,
            "error": self.error,
            "allowed_error": self.allowed,
        }


def reward(result: Result) -> float:
    """Return log10 of the gain of a result, or `PENALTY`.

    A right schedule is worth more than none, however slow: with a gain near 0 it approaches the
    penalty from above.
    """
    if result.status != "ok":
        return PENALTY
    return float(max(np.log10(result.gain), PENALTY + min(result.gain, 1) / 2))


class Measurements:
    """Measured schedules of modules: `with Measurements(Settings(), cache) as m: m(text, …)`.

    The child is started at the first call that the cache does not answer; `evaluations` counts
    all answers and `hits` those from the cache.
    """

    def __init__(self, settings: Settings, cache: Path | None = None, space: Space = LOOPS) -> None:
        self.settings, self.space = settings, space
        self._alone: dict[str, Result] = {}
        self.evaluations = self.hits = 0
        self._cache = None if cache is None else Cache(cache)
        self._child = Child(space.child, Limits(memory=settings.memory_mb << 20))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._child.close()
        if self._cache is not None:
            self._cache.close()

    def __call__(
        self,
        problem: Problem,
        schedule: Sequence[Any],
        *,
        again: bool = False,
    ) -> Result:
        """Return what a schedule of a problem is worth.

        With `again` it is measured anew, in a new child. The cache keeps the first result, so that
        a search that is repeated meets what it met before.

        Raises `UsageError` for a schedule that the space cannot write for this problem.
        """
        return self.file(problem, self.space.text(problem, schedule), again=again)

    def file(self, problem: Problem, text: str, *, again: bool = False) -> Result:
        """Return what a schedule of a problem is worth, by the text of its file."""
        self.evaluations += 1
        hits, empty = self.hits, self.space.text(problem, ())
        alone = self._alone.get(problem.text)
        if alone is not None:
            self.hits += text == empty and not again
        else:
            alone = self._result(problem, empty, ALONE * self.settings.seconds, False)
            if alone.status == "ok":
                # What no schedule seems to gain is noise.
                noise = max(alone.noise, abs(alone.ratio - 1))
                alone = self._alone[problem.text] = msgspec.structs.replace(alone, noise=noise)
        if text == empty and not again:
            return alone
        # What the module itself took is no evaluation.
        self.hits = hits
        if alone.status != "ok":
            return Result(status=alone.status, reason=f"without a schedule too: {alone.reason}")
        seconds = self.settings.seconds + RUNS_ALLOWED * alone.baseline / 1e9
        return self._result(problem, text, seconds, again)

    def _result(self, problem: Problem, text: str, seconds: float, again: bool) -> Result:
        key = self._key(problem.text, text)
        cached: Result | None = None
        if self._cache is not None and not again:
            cached = self._cache.get(key, Result)
        if cached is not None:
            self.hits += 1
            return cached
        if again:
            self._child.close()
        kept = not again
        self._child.limits = self._child.limits._replace(seconds=seconds)
        try:
            result = self._measure(problem, text)
        except ChildDied as died:
            result, ended = dead(died), died.ended
            if ended is not None and ended.code == -SIGKILL and not ended.passed:
                # Who killed it, and why, is not known: it may be another user of the machine.
                kept = False
        if self._cache is not None and kept:
            self._cache.put(key, result)
        return result

    def _measure(self, problem: Problem, schedule: str) -> Result:
        request = {
            "module": problem.text,
            "schedule": schedule,
            "runs": self.settings.runs,
            "seed": self.settings.seed,
            "length": problem.length,
            "most_seconds": self.settings.most_seconds,
        }
        try:
            answer = self._child(request)
        except ChildDied:
            raise
        except TokmillError as error:
            # The child does not know how the module is called.
            error.where = error.where or problem.name
            raise
        return _result(answer)

    def _key(self, module: str, schedule: str) -> bytes:
        digest = hashlib.sha256()
        for part in (
            str(VERSION),
            machine(self.space),
            self.space.rules,
            module,
            schedule,
            repr(self.settings),
        ):
            digest.update(part.encode() + b"\0")
        return digest.digest()


def _result(answer: dict[str, Any]) -> Result:
    if answer["status"] == "refused":
        return Result(status="refused", reason=answer["reason"])
    common = {
        "error": answer["error"],
        "allowed": answer["allowed"],
    }
    if answer["status"] == "wrong":
        return Result(status="wrong", reason=answer["reason"], **common)
    return Result(
        status="ok",
        nanoseconds=float(min(answer["times"])),
        baseline=float(min(answer["baseline"])),
        noise=noise_of(answer["baseline"]),
        **common,
    )


def noise_of(times: Sequence[float]) -> float:
    """Return the median over the least of some times, less 1."""
    return float(np.median(times) / min(times) - 1)


def dead(died: ChildDied) -> Result:
    passed = "" if died.ended is None else died.ended.passed
    # The other limits are seconds, and MiB of output.
    status = "timeout" if "second" in passed else "memory" if passed[-3:] == "MiB" else "crashed"
    return Result(status=status, reason=died.what)


UNUSABLE = (OSError, sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises for a file that is none of its own, or damaged: names are texts in it."""
PATIENCE = 60.0
"""Seconds to wait for another process that writes to the same cache."""


class Cache:
    """Answers by what was asked, in an SQLite file that several processes may use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._data = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
        except UNUSABLE as error:
            raise _unusable(path, error) from None
        self._run("CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, result BLOB NOT NULL)")

    def get(self, key: bytes, kind: Any) -> Any:
        """Return the answer of a key as a type; None if it has none that can be read."""
        row = self._run("SELECT result FROM results WHERE key = ?", key)
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # A row of a damaged file may be of another type.
            if row and isinstance(row[0], bytes):
                return msgspec.msgpack.decode(row[0], type=kind)
        return None

    def put(self, key: bytes, answer: Any) -> None:
        row = msgspec.msgpack.encode(answer)
        self._run("INSERT OR REPLACE INTO results VALUES (?, ?)", key, row)

    def _run(self, command: str, *values: bytes) -> Any:
        try:
            return self._data.execute(command, values).fetchone()
        except UNUSABLE as error:
            raise _unusable(self.path, error) from None

    def close(self) -> None:
        self._data.close()


def _unusable(path: Path, error: Exception) -> MachineError:
    return MachineError(
        f"the cache of measurements cannot be used: {error}",
        where=str(path),
        hint="give another file, or remove this one: it holds times alone",
    )


CPU = Path("/proc/cpuinfo")
"""Where the system says what its processor is."""


def machine(space: Space = LOOPS) -> str:
    """Return processor and versions that a time belongs to."""
    return f"{_processor()}; {space.package} {importlib.metadata.version(space.package)}"


def _processor() -> str:
    try:
        lines = CPU.read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
