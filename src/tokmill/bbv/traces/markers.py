"""Measured CPI and page faults: what is written at marks that a program passes.

CPI is of time stamps, the fastest of several runs; page faults are counted in one run more.

A small library in C (`markers.c`), made here by the C compiler and loaded before the program, marks
every K-th call of library functions. callgrind cuts its dumps at the same marks, so both see the
same intervals.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokmill.base.bounds import environment_of_users
from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import machine_errors
from tokmill.base.progress import Progress
from tokmill.store.schema import Array

SOURCE = Path(__file__).with_name("markers.c")
MARKER = "tokmill_marker"
KINDS = {"io": "", "heap": "-DHEAP", "memory": "-DMEMORY"}
"""Which functions are marked, from few calls to many: read, write, fread, fwrite, fgets and
getline; malloc and free too; memcpy, memcmp and strlen too."""
FLAGS = ("-O2", "-shared", "-fPIC", "-fno-builtin", "-fno-tree-loop-distribute-patterns")
MOST_MARKS = 1 << 20
"""Marks that a file of time stamps has room for."""
DIGITS = 20
"""Digits of K in the environment, with leading zeros."""
WARNING = re.compile(r"--\d+-- warning: ")
"""Begins a warning of valgrind, such as of a processor whose caches it does not know."""


class Command(NamedTuple):
    """A program with its arguments, and how it is run."""

    words: tuple[str, ...]
    stdin: str = ""
    """File that it reads as its input; "": an empty one."""

    def run(self, before: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> int:
        """Run it to its end without address space randomisation, and return its process id.

        Its output is thrown away.

        `before` are words before the command; `environment` is added for the program alone, as
        programs before it would be marked too.
        """
        added = [f"{name}={value}" for name, value in (environment or {}).items()]
        words = ["setarch", "-R", *before, *(["env", *added] if added else []), *self.words]
        with (
            machine_errors("read", self.stdin or os.devnull),
            open(self.stdin or os.devnull, "rb") as stdin,
            machine_errors("start", words[0]),
        ):
            process = subprocess.Popen(
                words,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment_of_users(),
            )
        with process:
            _, errors = process.communicate()
        if process.returncode:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            messages = [line for line in lines if not WARNING.match(line)]
            last = "" if not messages else f": {messages[-1][:200]}"
            raise TokmillError(
                f"the program ended with exit code {process.returncode}{last}",
                where=shlex.join(self.words),
                hint="run it by itself first; an execution that fails is not a profile",
            )
        return process.pid


FINER = 3
"""Marks an interval, about: intervals of equal instructions are put together of them."""
ENOUGH = 0.6
"""Share of the intervals that are asked for with which a kind of marks is good enough."""
TRIES = 3
"""Runs by which this is judged."""


def make_library(folder: Path, kind: str) -> Path:
    """Make the library that marks one kind of functions."""
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        raise MachineError(
            "measured CPI needs a C compiler",
            hint="install one (apt install gcc libc6-dev), or leave --measured out",
        )
    out = folder.absolute() / f"markers-{kind}.so"
    words = [compiler, *FLAGS, *KINDS[kind].split(), str(SOURCE), "-o", str(out), "-ldl"]
    # The linker looks for libgcc in the working directory.
    done = subprocess.run(words, cwd=folder, capture_output=True, check=False)
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace")[:300]
        raise MachineError(
            f"{compiler} refused the library of marks: {message}",
            where=str(SOURCE),
            hint="libc6-dev is needed, on x86-64",
        )
    return out


def time_marks(
    command: Command, library: Path, folder: Path, every: int, runs: int, progress: Progress
) -> Array:
    """Run the program several times; return the ticks between marks: (runs, marks + 1) int64."""
    spans: list[Array] = []
    for number in range(runs):
        stamps, _ = _stamps(command, library, folder, every)
        if spans:
            _same_marks(command, f"run {number + 1}", len(stamps), len(spans[0]) + 1)
        spans.append(np.diff(stamps))
        progress.advance(1)
    ticks = np.stack(spans)
    if (ticks <= 0).any():
        raise MachineError(
            "the time stamp counter went back between two marks",
            hint="the program moved between processors whose counters differ: taskset -c N",
        )
    return ticks


def count_faults(command: Command, library: Path, folder: Path, every: int, passed: int) -> Array:
    """Run the program once more; return the page faults between marks: (marks + 1,) int64.

    Args:
        passed: number of marks of the runs that were timed, begin and end among them.
    """
    counts, _ = _stamps(command, library, folder, every, faults=True)
    _same_marks(command, "the run that counts page faults", len(counts), passed)
    # Threads that pass marks at once may write their counts in the other order.
    return np.diff(np.maximum.accumulate(counts))


def _same_marks(command: Command, run: str, passed: int, first: int) -> None:
    if passed != first:
        raise TokmillError(
            f"{run} passes {passed - 2:,} marks, and the first {first - 2:,}",
            where=shlex.join(command.words),
            hint="the program does not do the same twice (threads, time, random numbers), so "
            "its intervals cannot be compared",
        )


def _stamps(
    command: Command,
    library: Path,
    folder: Path,
    every: int,
    *,
    most: int = MOST_MARKS,
    faults: bool = False,
) -> tuple[Array, range]:
    """Run the program once; return the time stamps that had room (int64), and all their places.

    With `faults`, page faults since it began stand in place of time stamps.
    """
    path = folder / "marks"
    with machine_errors("write", path), open(path, "wb") as file:
        file.truncate(8 * (most + 1))
    # The environment lies above the stack, so one of another size moves the stack, and with it
    # which pages are touched first and what shares a line of the cache.
    marking = {
        "LD_PRELOAD": str(library), "TOKMILL_EVERY": f"{every:0{DIGITS}}",
        "TOKMILL_MARKS": str(path), "TOKMILL_FAULTS": f"{faults:d}",
    }  # fmt: skip
    command.run(environment=marking)
    words = np.fromfile(path, np.uint64)
    passed = int(words[0])
    if passed < 2:
        raise TokmillError(
            "the program passed no mark, so nothing can be measured",
            where=shlex.join(command.words),
            hint="is it linked statically, a script, or one that starts another program? Without "
            "--measured its CPI is modelled",
        )
    if passed > most and most == MOST_MARKS:
        raise TokmillError(
            f"{passed:,} marks, and there is room for {most:,}",
            where=shlex.join(command.words),
            hint="ask for fewer intervals",
        )
    return words[1 : 1 + min(passed, most)].astype(np.int64), range(passed)


def choose(command: Command, folder: Path, intervals: int) -> tuple[Path, str, int, dict[str, int]]:
    """Return (library, kind, K, calls by kind) of the marks that cut the program best.

    It is the first kind, from few calls to many, whose marks give `ENOUGH` of the intervals that
    are asked for; else the one that gives most. Many calls are not enough: those of a program that
    reads all and then computes cut nothing in the middle.
    """
    calls: dict[str, int] = {}
    by_kind: dict[str, tuple[float, Path, int]] = {}
    for kind in KINDS:
        library = make_library(folder, kind)
        # Begin and end are stamped too.
        calls[kind] = len(_stamps(command, library, folder, 1, most=64)[1]) - 2
        every = max(1, calls[kind] // (FINER * intervals))
        if calls[kind] < 2:
            continue
        runs = [np.diff(_stamps(command, library, folder, every)[0]) for _ in range(TRIES)]
        length = min(map(len, runs))
        # Elsewhere than in the fastest of the runs the processor was with other programs.
        fastest = np.stack([run[:length] for run in runs]).min(axis=0)
        # What lies before the first mark and after the last one is not measured.
        inner = float(fastest[1:-1].sum() / fastest.sum())
        count = inner * len(grouped(fastest.tolist(), intervals))
        by_kind[kind] = count, library, every
        if by_kind[kind][0] >= ENOUGH * intervals:
            break
    if not by_kind:
        raise TokmillError(
            f"the program calls none of the functions that are marked often enough: {calls}",
            where=shlex.join(command.words),
            hint="a longer input, or without --measured",
        )
    best = max(by_kind, key=lambda kind: by_kind[kind][0])
    return by_kind[best][1], best, by_kind[best][2], calls


def grouped(sizes: Sequence[float], wanted: int) -> list[int]:
    """Return where intervals of about equal size begin, put together of what lies between marks.

    The first and the last stay alone, as the program begins and ends in them.
    """
    target, filled = sum(sizes[1:-1]) / wanted, 0.0
    begins = [0, 1] if len(sizes) > 2 else [0]
    for number in range(1, len(sizes) - 1):
        # Where it is nearer to the size that is wanted to end before this one; but little alone,
        # such as a read between long computations, would be the time of the kernel.
        if filled > target / 2 and filled + sizes[number] - target > abs(filled - target):
            begins.append(number)
            filled = 0.0
        filled += sizes[number]
    if filled < target / 2 and len(begins) > 2:
        # What is left over goes with the one before it.
        begins.pop()
    return [*begins, len(sizes) - 1]
