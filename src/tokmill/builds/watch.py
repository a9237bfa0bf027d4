"""CPU, memory and disk while a build runs: for the progress line and for `events.jsonl`."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from tokmill.files import append_line
from tokmill.progress import human_bytes


class Watch:
    """Measures CPU, memory and disk, and logs events of a store.

    Without psutil (no extra installed) only the disk is measured.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        self.started = time.monotonic()
        self.peak_memory = 0
        """Largest memory measured, in bytes."""
        try:
            import psutil

            psutil.cpu_percent()
            self._psutil: Any = psutil
        except ModuleNotFoundError:
            self._psutil = None

    def resources(self) -> dict[str, float]:
        """Return CPU (percent of the machine), memory of this build and free disk (bytes)."""
        found: dict[str, float] = {"disk_free": shutil.disk_usage(self.store).free}
        if self._psutil is not None:
            found["cpu_percent"] = self._psutil.cpu_percent()
            found["memory"] = self.memory()
        return found

    def memory(self) -> int:
        """Return the resident bytes of this process and its workers."""
        total = 0
        # psutil's `children` would read every process of the machine, for each shard.
        for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
            try:
                total += self._psutil.Process(pid).memory_info().rss
            except self._psutil.Error:
                continue
        self.peak_memory = max(self.peak_memory, total)
        return total

    def text(self) -> str:
        """Return text for the progress line."""
        found = self.resources()
        text = f"{human_bytes(found['disk_free'])} disk free"
        if "memory" in found:
            text = f"CPU {found['cpu_percent']:.0f}%, memory {human_bytes(found['memory'])}, {text}"
        return text

    def event(self, kind: str, **facts: Any) -> None:
        """Append a line to the store's `events.jsonl`."""
        line = {
            "event": kind,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.monotonic() - self.started, 3),
            **facts,
            **self.resources(),
        }
        append_line(self.store / "events.jsonl", msgspec.json.encode(line) + b"\n")
