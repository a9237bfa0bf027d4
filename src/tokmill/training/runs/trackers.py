"""metrics.jsonl, and a tracker beside it: `run.track = ["wandb"]`.

Its package comes with the extra `track`.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tokmill import plugins
from tokmill.base.errors import MachineError
from tokmill.base.files import append_line, read_file, write_file
from tokmill.base.headers import loads_json
from tokmill.training.recipe.config import TrainConfig

METRICS = "metrics.jsonl"


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
