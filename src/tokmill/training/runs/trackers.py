"""The metrics of a run: metrics.jsonl, a tracker beside it (`run.track = ["wandb"]`), the clock."""

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tokmill import plugins
from tokmill.base.errors import MachineError
from tokmill.base.files import append_line, read_file, write_file
from tokmill.base.headers import loads_json
from tokmill.training.recipe.config import TrainConfig

if TYPE_CHECKING:
    from tokmill.training.runs.checkpoint import State

METRICS, SESSIONS = "metrics.jsonl", "sessions.jsonl"


class Tracker(Protocol):
    """Receives the metrics of steps: plain numbers by name."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""
        ...

    def finish(self) -> None:
        """Write or send everything that is still buffered."""
        ...


class JsonLines:
    """One JSON object a line: `step`, then the metrics. Numbers that are not finite become null."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        append_line(self.path, json.dumps({"step": step, **finite}).encode())

    def forget_after(self, step: int) -> None:
        """Drop lines of steps after `step`: a resumed run does those steps again."""
        if self.path.exists():
            kept = [entry for entry in read_metrics(self.path) if entry["step"] <= step]
            write_file(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))

    def finish(self) -> None:
        """Do nothing: lines are not buffered."""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the entries of a metrics file; a last line that a crash cut is left out."""
    entries: list[dict[str, float]] = []
    for line in read_file(path).decode(errors="replace").splitlines():
        try:
            entry = loads_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


def rows_by_step(run: Path) -> Callable[[int], str | None]:
    """Return a function: step → the rows that a run was evaluated on there; None: not known."""
    file = run / SESSIONS
    sessions: list[dict[str, Any]] = [*reversed(read_metrics(file))] if file.exists() else []

    def rows(step: int) -> str | None:
        # A later session does the steps after its first one again.
        return next((one.get("validation") for one in sessions if one["step"] < step), None)

    return rows


@contextmanager
def open_trackers(run: Path, config: TrainConfig, step: int, rank: int) -> Iterator[list[Tracker]]:
    """Yield all trackers of a run that goes on after `step`; metrics.jsonl is the first.

    Only the process of rank 0 has any.
    """
    trackers: list[Tracker] = []
    try:
        if rank == 0:
            lines = JsonLines(run)
            lines.forget_after(step)
            trackers.append(lines)
            for name in config.run.track:
                trackers.append(plugins.load(plugins.TRACKERS, name)(run, config, step))
        yield trackers
    finally:
        for tracker in trackers:
            tracker.finish()


class Wandb:
    """Weights & Biases: project WANDB_PROJECT, else "tokmill"; WANDB_MODE=offline needs no network.

    The id in RUN/wandb-id lets a resumed run continue the same W&B run. W&B accepts each step once,
    so metrics of steps that are repeated stay as they were.
    """

    ID = "wandb-id"

    def __init__(self, run: Path, config: TrainConfig, step: int) -> None:
        wandb: Any = plugins.require("wandb")
        place = run / self.ID
        if not place.exists():
            write_file(place, secrets.token_hex(8))
        folder, run_id = str(run.absolute()), read_file(place).decode(errors="replace")
        try:
            # W&B reads settings, default values and Git in the working directory.
            with chdir("/"):
                self.run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "tokmill"),
                    id=run_id,
                    name=run.name,
                    resume="allow",
                    dir=folder,
                    config=msgspec.to_builtins(config),
                    settings=wandb.Settings(disable_git=True),
                )
        except wandb.Error as error:
            raise MachineError(
                f"W&B did not start: {error}",
                where="run.track",
                hint="`wandb login` once, or WANDB_MODE=offline",
            ) from None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics over; they are sent in the background."""
        self.run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Send what is buffered."""
        self.run.finish()


class Meter:
    """The clock of one process of training.

    Rates count the time of training alone: what happens inside `aside()` (evaluation, checkpoints)
    is not a part of them. `State.seconds` and the time left count all.

    `read` is for the caller to add to: tokens that the model has read, hidden ones and others,
    padding apart. Rates count these, while `State.tokens` counts what was learned from.

    `flops_per_token`: of a step; `peak`: operations a second of all devices, 0: not known; `unit`:
    what is read, in the line of progress.
    """

    def __init__(
        self, state: "State", steps: int, flops_per_token: float, peak: float, unit: str = "tokens"
    ) -> None:
        self.unit = unit
        self.state, self.steps = state, steps
        self.flops_per_token, self.peak = flops_per_token, peak
        self.started = self.reported = time.monotonic()
        self.seconds_before, self.first_step = state.seconds, state.step
        self.read, self.reported_read, self.elsewhere = 0, 0, 0.0
        self.tokens_per_second = 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the time of this context from the rates."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.elsewhere += time.monotonic() - begun

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, in earlier processes too."""
        return self.seconds_before + time.monotonic() - self.started

    @property
    def seconds_left(self) -> float:
        """Seconds that the rest will take, if it goes on as in this process so far."""
        done = self.state.step - self.first_step
        spent = time.monotonic() - self.started
        return spent / max(done, 1) * (self.steps - self.state.step)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the model's operations as a share of the peak; 0: not known.

        Defined by Chowdhery et al. 2022, PaLM, appendix B. Padding does not count, nor do blocks
        that run twice.
        """
        return self.flops_per_token * self.tokens_per_second / self.peak if self.peak else 0.0

    def report(self) -> dict[str, float]:
        """Return the metrics of the time since the last report."""
        now = time.monotonic()
        spent = max(now - self.reported - self.elsewhere, 1e-9)
        self.tokens_per_second = (self.read - self.reported_read) / spent
        self.reported, self.reported_read, self.elsewhere = now, self.read, 0.0
        self.state.seconds = self.seconds
        values = {
            "targets": self.state.tokens,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds": round(self.state.seconds, 3),
            "seconds_left": round(self.seconds_left, 1),
        }
        return {**values, "mfu": round(self.mfu, 4)} if self.peak else values

    def line(self) -> str:
        """Return the speed as the end of a line of progress; empty before the first report."""
        if not self.tokens_per_second:
            return ""
        share = f", MFU {self.mfu:.0%}" if self.peak else ""
        places = 0 if self.tokens_per_second >= 100 else 1
        return f", {self.tokens_per_second:,.{places}f} {self.unit}/s{share}"
