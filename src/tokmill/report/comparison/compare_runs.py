"""Comparison of runs; runs that differ only in seeds form a group with a mean and an interval."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os.path
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.report.comparison.run_summaries import RunSummary, read_runs
from tokmill.report.describe.recogniser import short_names
from tokmill.store.manifest import canonical_digest
from tokmill.store.store import Store
from tokmill.training.recipe.read_recipe import is_free

SEEDS = ("data.seed", "run.seed")
KIND, BATCH = "task.kind", "data.batch"
HIGHER = ("accuracy", "f1", "mfu", "mrr", "per_second", "precision", "recall")
"""For a metric with one of these in its name, higher is better; for all others, and losses, lower:
a column of tokens may be called `precision`."""


@dataclass(frozen=True)
class Measured:
    """The metric of a run: `value` is None if it has none, nan if it is not finite.

    `targets`, `seconds` and `tokens_per_second` (the median) are for the steps up to `step`.
    """

    run: RunSummary
    name: str
    value: float | None
    step: int
    targets: int | None
    seconds: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Group:
    """Runs of one recipe with different seeds, at one step (with "best": each at its own)."""

    name: str
    settings: dict[str, Any]
    """Keys of the recipe that decide weights or the measurement; stores as fingerprints."""
    members: list[Measured]
    mean: float | None
    half: float | None
    """Half the width of the 95 % interval of the mean; None for a single seed."""
    again: bool = False
    """Whether another group has the same settings and the same seeds."""
    best: bool = False

    @property
    def first(self) -> Measured:
        """A member, from which shared facts are read."""
        return self.members[0]

    @property
    def finished(self) -> bool:
        return all(member.run.finished for member in self.members)

    def average(self, name: str) -> float | None:
        """Return the mean of targets, seconds or tokens_per_second; None: one run lacks it."""
        values = [getattr(member, name) for member in self.members]
        return None if None in values else statistics.fmean(values)


@dataclass(frozen=True)
class Comparison:
    """Groups in the order of the metric, the best first; `columns`: recipe keys that differ."""

    metric: str
    at: str
    higher: bool
    comparable: bool
    """Whether the values can be compared."""
    columns: list[str]
    groups: list[Group]
    notes: list[str]


def compare(paths: Sequence[Path], metric: str = "", at: str = "last") -> Comparison:
    """Compare runs by one metric.

    Args:
        metric: a name in metrics.jsonl; "": val_loss, or loss if no run has it.
        at: "last"; "best" (each run's best value); or a step: the newest value up to that step, of
            the runs that have reached it.
    """
    if at not in ("last", "best") and not (at.isdecimal() and int(at) > 0):
        raise UsageError(f"--at {at!r} is not a step", hint="give a step such as 1000, or best")
    runs = read_runs(paths)
    metric, notes = choose_metric(metric, runs)
    higher_names = {name for run in runs for name in run.measures.higher}
    by_name = "loss" not in metric and any(word in metric for word in HIGHER)
    higher = metric.removeprefix("val_") in higher_names or by_name
    names = short_names([run.path for run in runs])
    measured = [measure(r, name, metric, at, higher) for r, name in zip(runs, names, strict=True)]
    measured_on = [validation(run) if metric.startswith("val_") else None for run in runs]
    keys = [settings_of(run, on) for run, on in zip(runs, measured_on, strict=True)]
    groups = group(measured, keys, at)
    doubtful, more = comparability_notes(
        metric,
        [(m.run, on) for m, on in zip(measured, measured_on, strict=True) if m.value is not None],
    )
    notes += more
    if any(one.again for one in groups):
        notes.append("several runs have the same recipe and seeds: each has its own line")
    late = [one.name for one in measured if at.isdecimal() and one.run.step < int(at)]
    if late:
        notes.append(f"did not reach step {int(at):,}: {', '.join(late)}")
    devices = {str(run.checkpoint.get("machine", "")).partition(",")[0] for run in runs} - {""}
    if len(devices) > 1:
        notes.append(f"speeds were measured on different devices: {', '.join(sorted(devices))}")
    groups = mark_best(groups, higher, not doubtful)
    columns = differing([g.settings for g in groups])
    return Comparison(metric, at, higher, not doubtful, columns, groups, notes)


def choose_metric(metric: str, runs: Sequence[RunSummary]) -> tuple[str, list[str]]:
    names = {name for run in runs for entry in run.entries for name in entry} - {"step"}
    if metric and metric not in names:
        raise UsageError(f"no run has a metric {metric!r}", hint=nearest(metric, names))
    if metric or "val_loss" in names:
        return metric or "val_loss", []
    if not names:
        raise UsageError(
            "no run has logged anything yet", hint="metrics.jsonl has a line from the first step"
        )
    return "loss", ["no run was validated: this is the loss of single training batches"]


def measure(run: RunSummary, name: str, metric: str, at: str, higher: bool) -> Measured:
    """Return the metric of a run, with the tokens and seconds up to that step."""
    points = run.points(metric)
    limit = int(at) if at.isdecimal() else run.step
    points = [point for point in points if point[0] <= limit] if limit <= run.step else []
    if at == "best":
        finite = [point for point in points if math.isfinite(point[1])]
        sign = -1 if higher else 1
        points = [min(finite, key=lambda point: sign * point[1])] if finite else points
    step, value = points[-1] if points else (min(limit, run.step), None)
    rates = [rate for when, rate in run.points("tokens_per_second") if when <= step]
    targets = [count for when, count in run.points("targets") if when <= step]
    seconds = [spent for when, spent in run.points("seconds") if when <= step]
    return Measured(
        run,
        name,
        value,
        step,
        int(targets[-1]) if targets else None,
        seconds[-1] if seconds else None,
        statistics.median(rates) if rates else None,
    )


def settings_of(run: RunSummary, measured_on: ValidationStore | None = None) -> dict[str, Any]:
    """Return the recipe keys that distinguish groups; stores as fingerprints.

    `measured_on`: the validation store, if it is a validation metric.
    """
    kept = {k: v for k, v in run.flat.items() if not is_free(k) and k not in SEEDS}
    kept["data.train"] = run.facts.fingerprint
    if measured_on is not None:
        kept["data.val"] = measured_on.fingerprint
        if measured_on.path:
            kept["run.eval_rows"] = rows_of(run)
    return kept


def group(measured: Sequence[Measured], settings: Sequence[dict[str, Any]], at: str) -> list[Group]:
    """Return runs of equal settings as groups.

    Values at different steps have no mean, so unfinished runs are not grouped with finished ones.
    """
    keys = []
    for one, kept in zip(measured, settings, strict=True):
        step = one.step if at != "best" else -1 if one.run.finished else one.run.step
        keys.append((canonical_digest(kept), step, one.value is None))
    groups, names = [], [one.name for one in measured]
    for numbers, time in group_by_seed([one.run for one in measured], keys):
        members = [measured[number] for number in numbers]
        values = [member.value for member in members if member.value is not None]
        mean, half = mean_interval(values) if values else (None, None)
        name = common_name(numbers, names)
        groups.append(Group(name, settings[numbers[0]], members, mean, half, again=time > 0))
    return groups


def group_by_seed(
    runs: Sequence[RunSummary], keys: Sequence[Hashable]
) -> list[tuple[list[int], int]]:
    """Return (numbers of runs with equal keys, number of earlier lists with this key).

    A list has each pair of seeds once, because a repeated run is not an independent sample.
    """
    groups: dict[tuple[Hashable, int], list[int]] = {}
    seen: Counter[tuple[Any, ...]] = Counter()
    for number, (run, key) in enumerate(zip(runs, keys, strict=True)):
        seeds = (key, *(run.flat[name] for name in SEEDS))
        groups.setdefault((key, seen[seeds]), []).append(number)
        seen[seeds] += 1
    return [(numbers, time) for (_, time), numbers in groups.items()]


def common_name(numbers: Sequence[int], names: Sequence[str]) -> str:
    """Return a name for some names: their prefix and "…", if no other name has this prefix."""
    own_names = [names[number] for number in numbers]
    if len(own_names) == 1:
        return own_names[0]
    prefix = os.path.commonprefix(own_names)
    alone = sum(name.startswith(prefix) for name in names) == len(own_names)
    return f"{prefix}…" if prefix and alone else f"{own_names[0]}, …"


def mark_best(groups: Sequence[Group], higher: bool, comparable: bool) -> list[Group]:
    """Return the groups in the order of their means; if `comparable`, the best one is marked."""
    sign = -1 if higher else 1

    def rank(one: Group) -> tuple[bool, float]:
        has_mean = one.mean is not None and not math.isnan(one.mean)
        return not has_mean, sign * (one.mean or 0.0) if has_mean else 0.0

    ordered = sorted(groups, key=rank)
    if not comparable or len(ordered) < 2 or rank(ordered[0])[0]:
        return ordered
    best = ordered[0].mean
    return [replace(one, best=one.mean == best) for one in ordered]


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys that differ, in the order of the recipe.

    A key that only another kind of model or task has is left out, because the kind is shown;
    so is one of a validation that other runs lack.
    """

    def differs(key: str) -> bool:
        kind = f"{key.partition('.')[0]}.kind"
        values = {canonical_digest(one[key]) for one in settings if key in one}
        have = {str(one[kind]) for one in settings if key in one and kind in one}
        lack = {str(one[kind]) for one in settings if key not in one and kind in one}
        return len(values) > 1 or bool(have & lack)

    return [key for key in dict.fromkeys(k for one in settings for k in one) if differs(key)]


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of independent values, and half the width of its 95 % interval.

    For n values it is t · s / √n, where s is their standard deviation and t the quantile with n - 1
    degrees of freedom (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.2). There is no
    interval for a single value, or if values are not finite.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2 or not math.isfinite(mean):
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = float(plugins.require("scipy.special").stdtrit(count - 1, 0.975))
    return mean, quantile * math.sqrt(variance / count)


PER_TOKEN = ("loss", "perplexity", "accuracy")
"""Metrics for each token, which depend on the vocabulary."""
POOL, RANKS = "val_pool", ("mrr", "recall_")
"""The mean number of records among which a rank is, and the metrics of ranks."""


@dataclass(frozen=True)
class ValidationStore:
    """The validation store of a run, which may have been removed since."""

    path: str
    fingerprint: str
    """Fingerprint of the store; if it cannot be opened, its path."""

    def text(self) -> str:
        """Return a digest of the lengths of its documents in bytes; "": they are not known.

        These lengths do not depend on the vocabulary.
        """
        if self.path == self.fingerprint:
            return ""
        store = Store(self.path)
        if "bytes" not in store.schema:
            return ""
        sizes = np.sort(store.column("bytes").astype(np.int64))
        return hashlib.sha256(sizes.tobytes()).hexdigest()


def validation(run: RunSummary) -> ValidationStore:
    """Return the validation store of a run; path and fingerprint are "" if there is none."""
    path = str(run.flat["data.val"])
    # If the store is gone, only its path is known.
    with contextlib.suppress(TokmillError):
        if path:
            return ValidationStore(path, Store(path).fingerprint)
    return ValidationStore(path, path)


def comparability_notes(
    metric: str, runs: Sequence[tuple[RunSummary, ValidationStore | None]]
) -> tuple[bool, list[str]]:
    """Return whether values must not be compared, and notes on them.

    `runs`: runs with the metric, and their validation stores (None: it is no validation metric).
    """
    notes = []
    several_vocabularies = len({tuple(sorted(run.vocabularies.items())) for run, _ in runs}) > 1
    measured_on = [on for _, on in runs if on is not None]
    several_stores = len({on.fingerprint for on in measured_on}) > 1
    rows = list(dict.fromkeys(rows_of(run) for run, on in runs if on is not None))
    doubtful = False
    per_token = any(word in metric for word in PER_TOKEN)
    if per_token and (keys := differing_task_keys([run for run, _ in runs])):
        doubtful = True
        notes.append(f"the runs differ in {', '.join(keys)}: their {metric} cannot be compared")
    pools = sorted({pool for run, _ in runs for _, pool in run.points(POOL)[-1:]})
    if len(pools) > 1 and any(word in metric for word in RANKS):
        doubtful = True
        shown = ", ".join(f"{pool:g}" for pool in pools)
        notes.append(f"{metric} is of ranks among different numbers of records: {shown}")
    if several_vocabularies and per_token:
        doubtful = True
        notes.append(
            f"the runs have different vocabularies: {metric} is for each token, so it cannot be "
            "compared; --metric val_bits_per_byte can, on the same text"
        )
    elif several_vocabularies and several_stores and "bits_per_byte" in metric:
        texts = {on.text() for on in set(measured_on)}
        doubtful = len(texts) > 1 or "" in texts
        if doubtful:
            notes.append(f"perhaps not validated on the same text: {_places(measured_on)}")
        elif rows != [0]:
            notes.append(
                "the vocabularies differ, so different parts of the text were evaluated; "
                "run.eval_rows=0 evaluates all of it"
            )
    elif several_stores:
        doubtful = True
        notes.append(
            f"the runs were validated on different stores: {_places(measured_on)}; "
            "`tokmill eval` measures each run on the same one"
        )
    elif not measured_on and len({run.facts.fingerprint for run, _ in runs}) > 1 and per_token:
        doubtful = True
        notes.append(f"the runs learned from different stores: {metric} is of different text")
    if len(rows) > 1:
        doubtful = True
        shown = ", ".join(str(count) if count else "all" for count in rows)
        notes.append(f"the runs were validated on different numbers of rows: {shown}")
    return doubtful, notes


def differing_task_keys(runs: Sequence[RunSummary]) -> list[str]:
    """Return the keys that differ between runs and decide what their tasks predict.

    A key that an older run lacks does not differ. Torch is loaded only if other keys do.
    """

    def differ(key: str) -> bool:
        return len({str(run.flat[key]) for run in runs if key in run.flat}) > 1

    if differ(KIND):
        return [KIND]
    keys = sorted({key for run in runs for key in run.flat if key.startswith("task.")})
    if any(map(differ, [*keys, BATCH])):
        # Of a task that is not known here, each key may decide.
        with contextlib.suppress(TokmillError, msgspec.ValidationError):
            task = plugins.load(plugins.TASKS, runs[0].flat[KIND])
            config = msgspec.convert(runs[0].recipe.get("task", {}), task.Config)
            models = plugins.require("tokmill.models.model")
            keys = task.measures(config, models.Inputs()).decided_by
    return [key for key in keys if differ(key)]


def rows_of(run: RunSummary) -> int:
    """Return on how many rows a run was validated at most; 0: on all of its validation store."""
    limit = int(run.flat["run.eval_rows"])
    return limit if run.latest.get("val_rows", limit) == limit else 0


def _places(measured_on: Sequence[ValidationStore]) -> str:
    places = {on.path: on.path == on.fingerprint for on in measured_on}
    return ", ".join(
        f"{path} (cannot be opened)" if gone else path for path, gone in places.items()
    )
