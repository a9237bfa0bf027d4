"""Policies that learn to schedule: figures by evaluations, and their best schedules as rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.mlir.loops import schedule as schedules
from tokmill.report.comparison.run_summaries import RunSummary, read_runs
from tokmill.report.pages.figures import Figure, Series, curves_of, refuse
from tokmill.store.manifest import read_json

BEST = "schedules.json"
"""File of a run (`rl.loop`): the best schedule of each module that it learned from, by one
measurement of each."""
HEADERS = ["module", "times as fast as plain loops", "ms", "schedule"]

SPEEDUPS = {
    "speedup": ("drawn schedules", ":"),
    "best_speedup": ("best so far", "-"),
    "val_speedup": ("held out", "--"),
}
ENTROPIES = {"entropy": ("share of the largest", "-")}


def speedup(paths: Sequence[Path], column: str = "") -> Figure:
    """Return how many times as fast schedules are, by the evaluations of a run; geometric means."""
    refuse("speedup", column=column)
    series = by_evaluations(read_runs(paths), SPEEDUPS, "speed-up")
    return Figure("Speed-up", "evaluations", "times as fast", "line", series, log_y=2)


def entropy(paths: Sequence[Path], column: str = "") -> Figure:
    refuse("entropy", column=column)
    series = by_evaluations(read_runs(paths), ENTROPIES, "entropy")
    return Figure("Entropy of the policy", "evaluations", "share of the largest", "line", series)


class Best(msgspec.Struct, frozen=True):
    """The best schedule of a module, as a run keeps it."""

    speedup: float
    milliseconds: float
    schedule: str


def learns_schedules(run: RunSummary) -> bool:
    return isinstance(run.flat.get("task.bench_count"), int)


def best(run: RunSummary) -> list[list[str]]:
    """Return `HEADERS` of each module for which a run found a schedule; [] before its first."""
    path = run.path / BEST
    if not path.exists():
        return []
    by_module: dict[str, Best] = read_json(path, dict[str, Best])
    return [
        [
            name,
            f"{one.speedup:.2f}",
            f"{one.milliseconds:.4g}",
            in_words(schedules.read(one.schedule, str(path))) or "none",
        ]
        for name, one in by_module.items()
    ]


def in_words(schedule: Sequence[Any]) -> str:
    """Return the actions of a schedule, operation by operation: `op_0: tile 8 × 16, vectorize`."""
    of: dict[str, list[str]] = {}
    for action in schedule:
        facts = msgspec.to_builtins(action)
        sizes = " × ".join(map(str, facts.get("sizes", ())))
        order = ", ".join(map(str, facts.get("order", ())))
        text = f"{facts['action']} {sizes}{order and f'({order})'}".strip()
        of.setdefault(action.op, []).append(text)
    return "; ".join(f"{op}: {', '.join(taken)}" for op, taken in of.items())


def by_evaluations(
    runs: Sequence[RunSummary], metrics: Mapping[str, tuple[str, str]], what: str
) -> list[Series]:
    """Return curves whose x is evaluations; raises `TokmillError` for runs of other tasks."""
    values = []
    counts = {run.flat.get("task.bench_count") for run in runs}
    for run in runs:
        if not learns_schedules(run):
            raise TokmillError(
                "the run learned no schedules",
                where=str(run.path),
                hint="`tokmill rl train` makes such runs",
            )
    if len(counts) == 1:
        (each,) = counts
        values = [replace(one, x=one.x * each) for one in curves_of(runs, metrics, what)]
    else:
        # Runs with different steps form different curves.
        for colour, run in enumerate(runs):
            values += [
                replace(one, x=one.x * run.flat["task.bench_count"], colour=colour)
                for one in curves_of([run], metrics, what)
            ]
    return values
