"""The contestants of `lifting.py`: how each runs on a program; what it found is kept as JSON."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tokmill.errors import TokmillError
from tokmill.store.schema import Array
from tokmill.x86 import angr

PEERS = Path(__file__).parent / "peers"
LIMIT = 1200
"""Seconds that angr and SMDA may take for one program."""
ROUNDS = 3
NAMES = {"tokmill": "tokmill", "angr": "angr", "smda": "SMDA", "objdump": "objdump"}
CALL = re.compile(rb"^ *[0-9a-f]+:\tcall +([0-9a-f]+)\b", re.MULTILINE)
LINE = re.compile(rb"^ *([0-9a-f]+):\t", re.MULTILINE)
ENTRY = re.compile(rb"start address:? 0x([0-9a-f]+)")


class Found(msgspec.Struct):
    """What one contestant made of one program; `angr` keeps its answer beside."""

    seconds: float = 0.0
    """CPU time, imports left out; of objdump that of the whole process."""
    whole: float = 0.0
    """The whole process."""
    peak: int = 0
    """Its largest resident bytes."""
    starts: list[int] = []
    blocks: list[int] = []
    failed: str = ""


class Angr(msgspec.Struct):
    """angr's answer, and the seconds of the whole process."""

    whole: float = 0.0
    answer: angr.Answer = angr.Answer()
    failed: str = ""

    @property
    def seconds(self) -> float:
        """Imports left out."""
        return self.answer.seconds

    @property
    def peak(self) -> int:
        """Its largest resident bytes."""
        return self.answer.peak


@dataclass
class Bench:
    """Where things are, and whether earlier answers count."""

    folder: Path
    peers_python: str
    reuse: bool

    def found(self, who: str, path: Path, make: Callable[[Path], msgspec.Struct]) -> bytes:
        """Return the JSON that a contestant makes of a program, kept by the program's digest."""
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        kept = self.folder / who / f"{path.name}-{digest}.json"
        if self.reuse and kept.exists():
            return kept.read_bytes()
        kept.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.encode(make(path))
        kept.write_bytes(data)
        return data

    def run(self, who: str, path: Path) -> Found:
        """Return what a contestant found."""
        if who == "angr":
            answer = self.angr(path)
            return Found(
                answer.seconds,
                answer.whole,
                answer.peak,
                [address for address, _ in answer.answer.functions],
                [],
                answer.failed,
            )
        make = {"tokmill": self._tokmill, "smda": self._smda, "objdump": _objdump}[who]
        return msgspec.json.decode(self.found(who, path, make), type=Found)

    def angr(self, path: Path) -> Angr:
        """Return what angr found."""
        return msgspec.json.decode(self.found("angr", path, self._angr), type=Angr)

    def _angr(self, path: Path) -> Angr:
        started = time.perf_counter()
        try:
            answer = angr.analyse(path, seconds=LIMIT)
        except TokmillError as error:
            return Angr(failed=error.what)
        return Angr(time.perf_counter() - started, answer)

    def _tokmill(self, path: Path) -> Found:
        script = str(PEERS / "native_lift.py")
        runs = [timed([sys.executable, script, str(path)]) for _ in range(ROUNDS)]
        best = min(runs, key=lambda run: run.seconds)
        best.whole = min(run.whole for run in runs)
        best.peak = max(run.peak for run in runs)
        return best

    def _smda(self, path: Path) -> Found:
        return timed([self.peers_python, str(PEERS / "smda_peer.py"), str(path), str(LIMIT)])


def output(command: Sequence[str]) -> tuple[Found, bytes]:
    """Run a command; return times and memory of its process, and what it prints."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    whole = time.perf_counter() - started
    failed = f"exit code {process.returncode}" if process.returncode else ""
    seconds = usage.ru_utime + usage.ru_stime
    return Found(seconds, whole, usage.ru_maxrss * 1024, failed=failed), printed


def timed(command: Sequence[str]) -> Found:
    """Run a script that prints what it found."""
    whole, printed = output(command)
    if whole.failed:
        return whole
    found = msgspec.json.decode(printed, type=Found)
    found.whole, found.peak = whole.whole, whole.peak
    return found


def _objdump(path: Path) -> Found:
    # A linear sweep names no functions; what its calls lead to is the nearest thing to them.
    found, printed = output(["objdump", "-d", "-w", "--no-show-raw-insn", str(path)])
    _, head = output(["objdump", "-f", str(path)])
    starts = {int(one, 16) for one in CALL.findall(printed) + ENTRY.findall(head)}
    found.starts = sorted(starts)
    return found


def swept(path: Path) -> Array:
    """Return where objdump sees instructions (u8, ascending); it begins anew at each symbol."""
    _, printed = output(["objdump", "-d", "-w", "--no-show-raw-insn", str(path)])
    return np.unique(np.asarray([int(one, 16) for one in LINE.findall(printed)], np.uint64))
