"""Summaries of runs for tables and figures, read from their folders without torch."""

import contextlib
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import machine_errors
from tokmill.base.headers import read_header
from tokmill.store.manifest import read_json
from tokmill.store.schema import Schema
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.measures import Measures
from tokmill.training.launch import use_command
from tokmill.training.recipe.config import (
    DEFAULT_KINDS,
    LEARNED,
    DataConfig,
    OptimConfig,
    RunConfig,
)
from tokmill.training.recipe.read_recipe import FACTS, RECIPE, flatten, read_recipe
from tokmill.training.runs.trackers import METRICS, read_metrics, rows_by_step

Facts = dict[str, Any]
DEPTH = 3
"""Depth to which a folder is searched for runs: an experiment, a setting, a seed."""
CHECKPOINT = re.compile(r"step-\d{8,18}")
DEFAULTS = msgspec.to_builtins(
    {"data": DataConfig(), "optim": OptimConfig(), "run": RunConfig()}
    | {name: {"kind": kind} for name, kind in DEFAULT_KINDS.items() if name in LEARNED}
)


WINDOW, LEAST = 32, 8
"""Logged steps that say what is usual: at most, and at least."""
FAR, CHANGE = 6.0, 0.1
"""A jump is so many deviations above the median, and more than this part of it."""


class Jump(NamedTuple):
    """A logged value far above what was usual before it: above the median of `WINDOW` values."""

    step: int
    metric: str
    value: float
    usual: float


class StoreFacts(msgspec.Struct, frozen=True):
    """Facts of the store that a run learned from, as far as they are shown."""

    fingerprint: str = ""
    columns: dict[str, int] = {}
    schema: Schema = {}
    vocabularies: dict[str, Vocabulary] = {}
    measures: Measures = Measures()


class Final(msgspec.Struct, frozen=True):
    """Facts of the final weights of a run, as far as they are shown."""

    step: int


@dataclass(frozen=True)
class RunSummary:
    """Facts of a run that are known without its weights."""

    path: Path
    recipe: dict[str, Any]
    flat: dict[str, Any]
    """Key of the recipe, such as "optim.lr" → value; missing keys have their defaults."""
    facts: StoreFacts
    entries: list[Facts]
    """The lines of its metrics."""
    checkpoints: list[str]
    """Names of checkpoints, oldest first."""
    final: Final | None

    @property
    def finished(self) -> bool:
        """Whether all steps are done. Final weights may be older than a larger number of steps.

        An imported run has no store, so it has no steps.
        """
        if self.final is None:
            return False
        return self.final.step >= self.steps or not self.flat["data.train"]

    @property
    def step(self) -> int:
        saved = [int(name.partition("-")[2]) for name in self.checkpoints[-1:]]
        return max([int(entry["step"]) for entry in self.entries[-1:]] + saved, default=0)

    @property
    def steps(self) -> int:
        """Number of steps; 0: the recipe is damaged."""
        steps = self.flat["run.steps"]
        return steps if isinstance(steps, int) else 0

    @property
    def state(self) -> str:
        """The state in words: finished, at which step, or not begun."""
        if self.finished:
            return "finished"
        return f"step {self.step:,} of {self.steps:,}" if self.step else "not begun"

    @property
    def latest(self) -> dict[str, Any]:
        return {k: v for entry in self.entries for k, v in entry.items() if k != "step"}

    @property
    def vocabularies(self) -> dict[str, str]:
        """Column → sha256 of its vocabulary."""
        return {name: vocabulary.sha256 for name, vocabulary in self.facts.vocabularies.items()}

    @property
    def measures(self) -> Measures:
        return self.facts.measures

    @property
    def sampling(self) -> str:
        """The command that samples it, or else uses it; "": there is none."""
        return use_command(self.path, self.flat["task.kind"], self.facts)

    @property
    def parameters(self) -> int | None:
        """Number of weights; None: there are none yet, or their file cannot be read."""
        place = self.path / "checkpoints" / self.checkpoints[-1] if self.checkpoints else None
        place = self.path / "model" if self.final is not None else place
        if place is None:
            return None
        try:
            _, header = read_header(place / "model.safetensors")
            sizes: list[int] = [math.prod(entry["shape"]) for entry in header.values()]
        except (ValueError, KeyError, TypeError, MachineError):
            return None
        return sum(sizes)

    @property
    def best(self) -> Facts:
        """The lowest validation loss, its step, and whether its weights are kept; {}: none."""
        points = [point for point in self.points("val_loss") if math.isfinite(point[1])]
        if not points:
            return {}
        step, value = min(points, key=lambda point: point[1])
        kept, config = self.path / "best/model.safetensors", self.path / "best/config.json"
        is_kept = kept.exists() and read_json(config, Final).step == step
        return {"val_loss": value, "step": step, "weights_kept": is_kept}

    @property
    def jumps(self) -> list[Jump]:
        """The logged steps at which the loss or the norm of the gradient jumps.

        A deviation is 1.4826 times the median absolute deviation from the median.
        """
        jumps = []
        for metric in ("loss", "grad_norm"):
            before: list[float] = []
            for step, value in self.points(metric):
                if len(before) >= LEAST:
                    usual = statistics.median(before)
                    off = 1.4826 * statistics.median(abs(one - usual) for one in before)
                    if value > usual + max(FAR * off, CHANGE * abs(usual)):
                        jumps.append(Jump(step, metric, value, usual))
                before = [*before[1 - WINDOW :], value] if math.isfinite(value) else before
        return sorted(jumps)

    @property
    def checkpoint(self) -> Facts:
        """The state of the newest checkpoint; {}: there is none."""
        for name in self.checkpoints[-1:]:
            # A running training may have removed it in the meantime.
            with contextlib.suppress(TokmillError):
                file = self.path / "checkpoints" / name / "state.json"
                return read_json(file, dict[str, Any])
        return {}

    @property
    def changed(self) -> float:
        """When its metrics, or else its recipe, last changed, in seconds since 1970."""
        file = self.path / (METRICS if self.entries else RECIPE)
        with machine_errors("read", file):
            return file.stat().st_mtime

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) of each logged value of a metric; nan if it was not finite.

        Values of a validation are those on the rows that were evaluated last.
        """
        points = [
            (int(entry["step"]), math.nan if entry[metric] is None else float(entry[metric]))
            for entry in self.entries
            if metric in entry and isinstance(entry[metric], int | float | None)
        ]
        if metric.startswith("val_") and points:
            rows_at = rows_by_step(self.path)
            last = rows_at(points[-1][0])
            points = [point for point in points if rows_at(point[0]) == last]
        return points


def is_run(path: Path) -> bool:
    return (path / RECIPE).is_file() and (path / FACTS).is_file()


def find_runs(path: Path, depth: int = DEPTH) -> list[Path]:
    """Return the folder if it is a run, else the runs in it and in folders below, by name."""
    if is_run(path):
        return [path]
    inside: list[str] = []
    if depth:
        # Unreadable folders are skipped.
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            inside = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    return [run for name in inside for run in find_runs(path / name, depth - 1)]


def read_run(path: Path) -> RunSummary:
    """Return the summary of a run."""
    recipe = read_recipe(path)
    flat = flatten(recipe)
    saved = [state.parent.name for state in (path / "checkpoints").glob("step-*/state.json")]
    final = path / "model/config.json"
    return RunSummary(
        path=path,
        recipe=recipe,
        flat=flat | {key: value for key, value in flatten(DEFAULTS).items() if key not in flat},
        facts=read_json(path / FACTS, StoreFacts),
        entries=metrics(path),
        checkpoints=sorted(filter(CHECKPOINT.fullmatch, saved), key=lambda name: int(name[5:])),
        final=read_json(final, Final) if final.exists() else None,
    )


def read_runs(paths: Sequence[Path]) -> list[RunSummary]:
    """Return the runs that paths name, each a run or a folder of runs, each run once."""
    folders: dict[Path, Path] = {}
    for path in paths:
        runs = find_runs(path)
        if not runs:
            raise TokmillError(
                "there is no such folder" if not path.exists() else "the folder holds no run",
                where=str(path),
                hint="give the folder of a run, or one that holds runs; "
                "`tokmill train STORE -o RUN` makes one",
            )
        for run in runs:
            folders.setdefault(run.resolve(), run)
    return [read_run(run) for run in folders.values()]


def metrics(path: Path) -> list[Facts]:
    """Return the lines of a run's metrics.jsonl; [] without the file."""
    file = path / METRICS
    return list[Facts](read_metrics(file)) if file.is_file() else []


def listing(folder: Path) -> list[Facts]:
    """Return a row of facts for each run in a folder, in the order of their last change."""
    rows: list[tuple[float, Facts]] = []
    for path in find_runs(folder):
        row: Facts = {"name": str(path.relative_to(folder))}
        try:
            run = read_run(path)
        except TokmillError as error:
            rows.append((0.0, {**row, "state": "damaged", "problem": error.what}))
            continue
        latest = run.latest
        rate = latest.get("tokens_per_second")
        row |= {
            "state": run.state,
            "model": run.flat["model.kind"],
            "parameters": run.parameters,
            "loss": latest.get("loss"),
            "val_loss": latest.get("val_loss"),
            "bits_per_byte": latest.get("val_bits_per_byte"),
            "tokens_per_second": None if rate is None else round(rate),
            "when": datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M:%S"),
        }
        rows.append((run.changed, row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]
