"""Runs side by side: those that differ in seeds alone are one line, with a mean and an interval."""

from __future__ import annotations

import math
import os.path
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokmill.errors import UsageError, nearest
from tokmill.report.comparable import ValidationStore, doubts, validation
from tokmill.report.interval import mean_interval
from tokmill.report.recogniser import short_names
from tokmill.report.runs import RunSummary, read_runs
from tokmill.store.manifest import canonical_digest
from tokmill.training.recipe.changes import is_free

SEEDS = ("data.seed", "run.seed")
HIGHER = ("accuracy", "f1", "mfu", "mrr", "per_second", "precision", "recall")
"""A metric whose name holds one of these is the better the higher it is; others, the lower."""


@dataclass(frozen=True)
class Measured:
    """What a run has of the metric: `value` None where it has none, nan where it is not finite.

    `tokens`, `seconds` and `tokens_per_second` (the median) are of the steps up to `step`.
    """

    run: RunSummary
    name: str
    value: float | None
    step: int
    tokens: int | None
    seconds: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, a seed each, measured at one step (with "best": each at its own)."""

    name: str
    settings: dict[str, Any]
    """Recipe keys that decide weights or what is measured; of stores the fingerprint."""
    members: list[Measured]
    mean: float | None
    half: float | None
    """Half the width of the 95 % interval of the mean; None: of one seed there is none."""
    again: bool = False
    """Whether its seeds stand in another group of the same settings too."""
    best: bool = False

    @property
    def first(self) -> Measured:
        """What all members share can be read from this one."""
        return self.members[0]

    @property
    def finished(self) -> bool:
        """Whether all its runs are finished."""
        return all(member.run.finished for member in self.members)

    def average(self, name: str) -> float | None:
        """Return the mean of `tokens`, `seconds` or `tokens_per_second`; None: one run lacks it."""
        found = [getattr(member, name) for member in self.members]
        return None if None in found else statistics.fmean(found)


@dataclass(frozen=True)
class Comparison:
    """Groups, the best first; `columns` are the recipe keys that differ between them."""

    metric: str
    at: str
    higher: bool
    """Whether higher is better."""
    comparable: bool
    """Whether all values measure the same."""
    columns: list[str]
    groups: list[Group]
    notes: list[str]


def compare(paths: Sequence[Path], metric: str = "", at: str = "last") -> Comparison:
    """Compare runs by one metric.

    Args:
        paths: runs, and folders of runs.
        metric: a name in metrics.jsonl; empty: val_loss, or loss where no run has that.
        at: "last"; "best" (each run's best value); or a step: the newest value up to there, of the
            runs that have come so far.

    Raises:
        UsageError: `at` is no step, or no run has the metric.
        TokmillError: a path holds no run, or a run is damaged.
    """
    check_at(at)
    runs = read_runs(paths)
    metric, notes = choose_metric(metric, runs)
    told = {name for run in runs for name in run.measures.higher}
    higher = metric.removeprefix("val_") in told or any(word in metric for word in HIGHER)
    names = short_names([run.path for run in runs])
    found = [measure(r, name, metric, at, higher) for r, name in zip(runs, names, strict=True)]
    measured_on = [validation(run) if metric.startswith("val_") else None for run in runs]
    keys = [settings_of(run, on) for run, on in zip(runs, measured_on, strict=True)]
    groups = group(found, keys, at)
    doubtful, more = doubts(
        metric,
        [(m.run, on) for m, on in zip(found, measured_on, strict=True) if m.value is not None],
    )
    notes += more
    if any(one.again for one in groups):
        notes.append("a recipe with the same seeds is there more than once: a line for each time")
    late = [one.name for one in found if at.isdecimal() and one.run.step < int(at)]
    if late:
        notes.append(f"not come to step {int(at):,}: {', '.join(late)}")
    devices = {str(run.checkpoint.get("machine", "")).partition(",")[0] for run in runs} - {""}
    if len(devices) > 1:
        notes.append(f"speeds are of different devices: {', '.join(sorted(devices))}")
    groups = mark_best(groups, higher, not doubtful)
    columns = differing([g.settings for g in groups])
    return Comparison(metric, at, higher, not doubtful, columns, groups, notes)


def check_at(at: str) -> None:
    """Refuse what is neither a step nor one of the two words."""
    if at not in ("last", "best") and not (at.isdecimal() and int(at) > 0):
        raise UsageError(f"--at {at!r} is no step", hint="give a step such as 1000, or best")


def choose_metric(metric: str, runs: Sequence[RunSummary]) -> tuple[str, list[str]]:
    """Return the metric to compare by and what is to be said of it."""
    known = {name for run in runs for entry in run.entries for name in entry} - {"step"}
    if metric and metric not in known:
        raise UsageError(f"no run has a metric {metric!r}", hint=nearest(metric, known))
    if metric or "val_loss" in known:
        return metric or "val_loss", []
    if not known:
        raise UsageError(
            "no run has logged anything yet", hint="metrics.jsonl has a line from the first step"
        )
    return "loss", ["no run was validated: this is the loss of single training batches"]


def measure(run: RunSummary, name: str, metric: str, at: str, higher: bool) -> Measured:
    """Return a run's value of the metric, and what it took to come there."""
    points = run.points(metric)
    limit = int(at) if at.isdecimal() else run.step
    points = [point for point in points if point[0] <= limit] if limit <= run.step else []
    if at == "best":
        finite = [point for point in points if math.isfinite(point[1])]
        sign = -1 if higher else 1
        points = [min(finite, key=lambda point: sign * point[1])] if finite else points
    step, value = points[-1] if points else (min(limit, run.step), None)
    rates = [rate for when, rate in run.points("tokens_per_second") if when <= step]
    tokens = [count for when, count in run.points("tokens") if when <= step]
    seconds = [spent for when, spent in run.points("seconds") if when <= step]
    return Measured(
        run,
        name,
        value,
        step,
        int(tokens[-1]) if tokens else None,
        seconds[-1] if seconds else None,
        statistics.median(rates) if rates else None,
    )


def settings_of(run: RunSummary, measured_on: ValidationStore | None = None) -> dict[str, Any]:
    """Return the recipe keys that tell groups apart, of stores their fingerprints.

    `measured_on` is the validation store, where the metric is of one.
    """
    kept = {k: v for k, v in run.flat.items() if not is_free(k) and k not in SEEDS}
    kept["data.train"] = run.known.fingerprint
    if measured_on is not None:
        kept |= {"data.val": measured_on.fingerprint, "run.eval_rows": run.flat["run.eval_rows"]}
    return kept


def group(found: Sequence[Measured], settings: Sequence[dict[str, Any]], at: str) -> list[Group]:
    """Return runs of equal settings as groups.

    Values of different steps have no mean, so an unfinished run stands apart from finished ones.
    """
    keys = []
    for one, kept in zip(found, settings, strict=True):
        step = one.step if at != "best" else -1 if one.run.finished else one.run.step
        keys.append((canonical_digest(kept), step, one.value is None))
    made, names = [], [one.name for one in found]
    for numbers, time in seeds_together([one.run for one in found], keys):
        members = [found[number] for number in numbers]
        values = [member.value for member in members if member.value is not None]
        mean, half = mean_interval(values) if values else (None, None)
        name = common_name(numbers, names)
        made.append(Group(name, settings[numbers[0]], members, mean, half, again=time > 0))
    return made


def seeds_together(
    runs: Sequence[RunSummary], keys: Sequence[Hashable]
) -> list[tuple[list[int], int]]:
    """Return (numbers of runs with equal keys, how many such lists came before).

    A list has each pair of seeds once: a run with the seeds of another is no second sample.
    """
    groups: dict[tuple[Hashable, int], list[int]] = {}
    seen: Counter[tuple[Any, ...]] = Counter()
    for number, (run, key) in enumerate(zip(runs, keys, strict=True)):
        seeds = (key, *(run.flat[name] for name in SEEDS))
        groups.setdefault((key, seen[seeds]), []).append(number)
        seen[seeds] += 1
    return [(numbers, time) for (_, time), numbers in groups.items()]


def common_name(numbers: Sequence[int], names: Sequence[str]) -> str:
    """Return one name for some of all names: what they alone begin with and three dots."""
    mine = [names[number] for number in numbers]
    if len(mine) == 1:
        return mine[0]
    prefix = os.path.commonprefix(mine)
    alone = sum(name.startswith(prefix) for name in names) == len(mine)
    return f"{prefix}…" if prefix and alone else f"{mine[0]}, …"


def mark_best(groups: Sequence[Group], higher: bool, comparable: bool) -> list[Group]:
    """Return the groups in the order of their means, the best one marked if they compare."""
    sign = -1 if higher else 1

    def rank(one: Group) -> tuple[bool, float]:
        known = one.mean is not None and not math.isnan(one.mean)
        return not known, sign * (one.mean or 0.0) if known else 0.0

    ordered = sorted(groups, key=rank)
    if not comparable or len(ordered) < 2 or rank(ordered[0])[0]:
        return ordered
    best = ordered[0].mean
    return [replace(one, best=one.mean == best) for one in ordered]


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys that differ, in the order of the recipe.

    A key that only another kind of model or task has is told by the kind.
    """

    def differs(key: str) -> bool:
        kind = f"{key.partition('.')[0]}.kind"
        values = {canonical_digest(one[key]) for one in settings if key in one}
        have = {one.get(kind) for one in settings if key in one}
        lack = {one.get(kind) for one in settings if key not in one}
        return len(values) > 1 or bool(have & lack)

    return [key for key in dict.fromkeys(k for one in settings for k in one) if differs(key)]
