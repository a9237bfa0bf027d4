"""The events of a build, with what it takes of the machine: `events.jsonl`."""

import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from tokmill.base.bounds import resident_bytes
from tokmill.base.files import append_line
from tokmill.base.progress import human_bytes


class Watch:
    """Measures load, memory and disk, and logs events of a store."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.started = time.monotonic()
        self.peak_memory = 0
        """Largest memory measured, in bytes."""

    def resources(self) -> dict[str, float]:
        """Return the load of the machine, memory of this build and free disk (bytes)."""
        workers = [child.pid for child in multiprocessing.active_children()]
        memory = sum(map(resident_bytes, [os.getpid(), *filter(None, workers)]))
        self.peak_memory = max(self.peak_memory, memory)
        disk = shutil.disk_usage(self.store).free
        return {"disk_free": disk, "load": os.getloadavg()[0], "memory": memory}

    def text(self) -> str:
        disk, load, memory = self.resources().values()
        return f"load {load:.1f}, memory {human_bytes(memory)}, {human_bytes(disk)} disk free"

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
