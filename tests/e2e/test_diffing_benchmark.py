"""qbindiff in the benchmark of diffing: it has limits, and ends when the benchmark does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from x86_programs import C_SOURCE, compiles, stripped

PARENT = """
import os, subprocess, sys
peer = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), *sys.argv[2:]])
print(peer.pid, flush=True)
peer.wait()
"""


@pytest.fixture(scope="module")
def script(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return benchmark_script("diffing")


def test_it_ends_with_the_benchmark(repository: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "a.BinExport"
    os.mkfifo(pipe)
    peer = repository / "benchmarks" / "peers" / "qbindiff_peer.py"
    command = [sys.executable, "-c", PARENT, *map(str, (peer, pipe, pipe, 1))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        writer = -1
        try:
            writer = _read_by(child, pipe)
            parent.send_signal(signal.SIGKILL)
            # It would read for ever, as nothing is written into the pipe.
            child.wait(60)
        finally:
            parent.kill()
            if child.is_running():
                child.kill()
            if writer >= 0:
                os.close(writer)


def _read_by(process: psutil.Process, pipe: Path) -> int:
    """Return an open end of a pipe when a process reads from the other."""
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("it ended before it read a program")


def test_its_limit_is_an_answer_that_a_larger_limit_replaces(script: Any, tmp_path: Path) -> None:
    built = [compiles(tmp_path, name, C_SOURCE, f"-{name}") for name in ("O0", "O2")]
    sides = [script.programs.Built(one.name, stripped(one), one, tmp_path) for one in built]
    pair = script.programs.Pair("made", "O0 ↔ O2", *sides)
    before = set(psutil.Process().children())
    bench = script.Bench(tmp_path / "cache", sys.executable, limit=0)
    answer = bench.qbindiff(pair, ())
    assert answer.failed.startswith("took more than 0") and answer.limit == 0
    assert set(psutil.Process().children()) == before
    bench.limit = 300
    answer = bench.qbindiff(pair, ())
    assert not answer.failed and answer.pairs and answer.cpu_seconds > 0
    # What was answered is kept: no process could answer now.
    bench.peers_python, bench.limit = "/no/such/python", 600
    assert bench.qbindiff(pair, ()) == answer
