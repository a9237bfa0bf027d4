"""The protocol of trackers, which receive metrics, and the one that writes metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tokmill.files import append_line, read_file, write_file
from tokmill.headers import loads_json

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
        """Append a line."""
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
