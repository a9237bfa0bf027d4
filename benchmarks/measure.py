"""Run commands side by side: wall time of the whole process and peak memory of its tree.

The contestants take turns, so that a slow minute of the machine hits all of them; the best of the
rounds is reported. A contestant without an equal result has no figure.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOKMILL = str(Path(sys.executable).parent / "tokmill")


@dataclass
class Contestant:
    """A command, what must be done before each run, and its measurements."""

    name: str
    command: Sequence[str]
    before: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    anonymous: list[int] = field(default_factory=list)
    """Of trees: the most bytes that are not pages of files, which the system may drop at any time
    and which processes that share them count once each."""

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def memory(self) -> int:
        """Peak resident bytes: the largest of all rounds."""
        return max(self.peak)


def run_once(contestant: Contestant) -> None:
    """Run a contestant once; its failure ends the benchmark."""
    contestant.before()
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    # Installed packages have their bytecode; sources would be compiled anew at each start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.perf_counter()
    process = subprocess.Popen(
        contestant.command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    peak = [0, 0]
    watcher = threading.Thread(target=_watch, args=(process.pid, peak), daemon=True)
    watcher.start()
    _, errors = process.communicate()
    contestant.seconds.append(time.perf_counter() - started)
    watcher.join()
    contestant.peak.append(peak[0])
    contestant.anonymous.append(peak[1])
    if process.returncode:
        raise SystemExit(f"{contestant.name} failed:\n{errors.decode()[-2000:]}")


def _watch(pid: int, peak: list[int]) -> None:
    # VmHWM is exact for one process; a tree is the sum of its members at one time.
    try:
        root = psutil.Process(pid)
        while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
            members = [root, *root.children(recursive=True)]
            if len(members) == 1:
                peak[0] = max(peak[0], _status(pid, "VmHWM"))
            else:
                for place, name in enumerate(("VmRSS", "RssAnon")):
                    found = sum(_status(member.pid, name) for member in members)
                    peak[place] = max(peak[place], found)
            time.sleep(0.02)
    except psutil.Error:
        return


def _status(pid: int, name: str) -> int:
    """Return bytes that the kernel says of a process; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith(name)), "- 0")
    return int(line.split()[1]) * 1024


def interleave(contestants: Sequence[Contestant], rounds: int) -> None:
    for _ in range(rounds):
        for contestant in contestants:
            run_once(contestant)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def table(contestants: Sequence[Contestant], against: Contestant, megabytes: float) -> list[str]:
    """Return Markdown rows: seconds, MB/s, peak memory, ratio to one of them."""
    rows = [
        [
            one.name, f"{one.best:.2f}", f"{megabytes / one.best:.0f}",
            f"{one.memory / 2**20:.0f}", f"{one.best / against.best:.2f}",
        ]
        for one in contestants
    ]  # fmt: skip
    return markdown(["program", "seconds", "MB/s", "peak MiB", "wall time / first"], rows)


def highest() -> int:
    """Return the most bytes that this process has held since its peak was set back."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
