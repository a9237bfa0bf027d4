"""Profile a program that runs here: block vectors, CPI and miss rates of the same intervals."""

import contextlib
import csv
import io
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.base.files import inside, make_folder, write_file
from tokmill.base.locks import writing
from tokmill.base.progress import Progress, elapsed
from tokmill.bbv.traces.addresses import write_addresses, write_maps
from tokmill.bbv.traces.block_vectors import BlockVectors, write
from tokmill.bbv.traces.callgrind import Code, Dump, merge_dumps, read_dump, vectors_of
from tokmill.bbv.traces.cpi import PAGE_FAULTS
from tokmill.bbv.traces.markers import MARKER, Command, choose, count_faults, grouped, time_marks
from tokmill.store.schema import Array

CACHES = {"I1": "32768,8,64", "D1": "32768,8,64", "LL": "8388608,16,64"}
"""Bytes, ways and bytes of a line of the caches that are modelled: fixed, as valgrind would take
those of this machine."""
ALONE = "--command-line-only=yes"
"""Keeps valgrind from reading options in the working directory (`.valgrindrc`)."""
DUMPED = ("--dump-instr=yes", "--dump-line=no", "--compress-pos=no", "--cache-sim=yes",
          "--branch-sim=yes")  # fmt: skip
EVENTS = {
    "instructions": ("Ir",),
    "l1_misses": ("I1mr", "D1mr", "D1mw"),
    "ll_misses": ("ILmr", "DLmr", "DLmw"),
    "branch_misses": ("Bcm", "Bim"),
}
"""Term of the formula → the events of callgrind that are added."""
USUAL = {"instructions": 1.0, "l1_misses": 10.0, "ll_misses": 100.0, "branch_misses": 10.0}
"""Cycles an event of the usual estimate (`CEst` of kcachegrind)."""
RATES = {
    "i1_misses": ("I1mr",),
    "d1_misses": ("D1mr", "D1mw"),
    "ll_misses": ("ILmr", "DLmr", "DLmw"),
    "branch_misses": ("Bcm", "Bim"),
}
"""Column of a store → the events of callgrind that are added, per 1,000 instructions."""


class Asked(NamedTuple):
    """How a program is profiled."""

    every_blocks: int = 2_000_000
    """Executed basic blocks of an interval, where nothing is measured."""
    measured: bool = False
    intervals: int = 300
    """Intervals that are asked for, where CPI is measured."""
    runs: int = 25


class Timed(NamedTuple):
    """Ticks of the intervals in several runs of a program, and page faults of one."""

    ticks: Array
    """Smallest number of ticks of the time stamp counter of each interval: int64."""
    halves: float
    """Median of the relative difference between the first and the second half of the runs."""
    runs: int
    faults: Array
    """Page faults of each interval: int64."""


class Profile(NamedTuple):
    """What was written."""

    trace: Path
    vectors: BlockVectors
    cpi: dict[str, Array]
    timed: Timed | None
    about: dict[str, Any]

    def program_cpi(self) -> dict[str, float]:
        """Return the CPI of the whole program by kind, of the intervals that have one."""
        instructions = self.vectors.instructions
        return {
            kind: float(np.nansum(values * instructions) / instructions[~np.isnan(values)].sum())
            for kind, values in self.cpi.items()
        }


def profile(
    words: Sequence[str],
    out: Path,
    asked: Asked,
    *,
    name: str = "",
    stdin: str = "",
    quiet: bool = True,
) -> Profile:
    """Run a program under callgrind and write NAME.bb.gz, NAME.pc, NAME.map, NAME.intervals.csv
    and NAME.about.json into a folder.

    CPI by the formula is called modelled. With `measured` the program also runs natively, and the
    same intervals get a measured CPI: ticks of the time stamp counter (reference cycles) an
    instruction; the first and the last interval have none, as the program begins and ends in them.
    One run more counts the page faults of each interval.
    """
    program = _program(words)
    name = name or Path(program).name
    stem = inside(out, name)
    command = Command((program, *words[1:]), stdin)
    trace = stem.with_name(f"{name}.bb.gz")
    with writing(trace), tempfile.TemporaryDirectory(prefix="tokmill-profile-") as place:
        folder = Path(place)
        ticks, faults, about = None, None, _about(command, asked)
        cutting, environment = [f"--dump-every-bb={asked.every_blocks}"], {}
        if asked.measured:
            library, kind, every, calls = choose(command, folder, asked.intervals)
            about["marks"] = {"kind": kind, "every": every, "calls": calls}
            with Progress("timed runs", asked.runs, unit="runs", quiet=quiet) as progress:
                ticks = time_marks(command, library, folder, every, asked.runs, progress)
            passed = ticks.shape[1] + 1
            faults = count_faults(command, library, folder, every, passed)
            cutting = [f"--dump-before={MARKER}"]
            environment = {"LD_PRELOAD": str(library), "TOKMILL_EVERY": str(every)}
        dumps, code, about["forked"] = _callgrind(command, folder, cutting, environment, quiet)
    timed = None
    if ticks is not None and faults is not None:
        dumps, timed = _intervals(dumps, ticks, faults, asked.intervals, command)
    else:
        dumps = [dump for dump in dumps if dump.totals["Ir"]]
    make_folder(out)
    return _written(stem, dumps, code, timed, about)


def _written(
    stem: Path, dumps: list[Dump], code: Code, timed: Timed | None, about: dict[str, Any]
) -> Profile:
    vectors, addresses, mapped = vectors_of(dumps, code)
    totals = [dump.totals for dump in dumps]
    cpi = {}
    if timed is not None:
        cpi["measured"] = timed.ticks / vectors.instructions
        cpi["measured"][[0, -1]] = np.nan
        load = float(Path("/proc/loadavg").read_text().split()[0])
        about["measured"] = {
            "runs": timed.runs, "halves_differ": timed.halves, "unit": "ticks of the time stamp "
            "counter an instruction; repetitions of REP instructions count", "load": load,
        }  # fmt: skip
    cpi["modelled"] = modelled(totals)
    about["modelled"] = {"weights": USUAL}
    files = {
        end: stem.with_name(stem.name + end)
        for end in (".bb.gz", ".pc", ".map", ".about.json", ".intervals.csv")
    }
    write(files[".bb.gz"], vectors)
    write_addresses(files[".pc"], addresses)
    # The library of marks is gone by now, and it is not a part of the program.
    there = [one for one in mapped if Path(one.path).is_file()]
    write_maps(files[".map"], there)
    write_file(files[".about.json"], msgspec.json.encode(about) + b"\n")
    # The last one: whoever continues sees by it that a profile is whole.
    write_file(files[".intervals.csv"], _table(vectors, cpi, totals, timed))
    return Profile(files[".bb.gz"], vectors, cpi, timed, about)


def _program(words: Sequence[str]) -> str:
    if not words:
        raise UsageError("no program was named", hint="tokmill bbv profile -o DIR -- PROGRAM ARG…")
    program = shutil.which(words[0])
    if program is None:
        if Path(words[0]).is_file():
            raise UsageError("it may not be run", where=words[0], hint="chmod +x, or a path with /")
        raise UsageError("there is no such program", where=words[0], hint="check the path")
    if platform.machine() != "x86_64":
        raise MachineError("programs are profiled on x86-64", hint="read traces of other producers")
    for needed, package in (("valgrind", "valgrind"), ("setarch", "util-linux")):
        if shutil.which(needed) is None:
            raise MachineError(f"{needed} is not installed", hint=f"apt install {package}")
    # As it is called: what a link names does another thing under its own name (xzcat, venvs).
    return os.path.abspath(program)


def _about(command: Command, asked: Asked) -> dict[str, Any]:
    version = subprocess.run(
        ["valgrind", ALONE, "--version"], capture_output=True, text=True, check=False
    )
    return {
        "command": list(command.words),
        "stdin": command.stdin,
        "valgrind": version.stdout.strip(),
        "caches": CACHES,
        "asked": asked._asdict(),
    }


def _callgrind(
    command: Command,
    folder: Path,
    cutting: Sequence[str],
    environment: dict[str, str],
    quiet: bool,
) -> tuple[list[Dump], Code, int]:
    """Run a command under callgrind; return its dumps and code, and how many processes it forked.

    What these execute is in none of the dumps.
    """
    out = folder / "callgrind.%p"
    before = ["env", *(f"{name}={value}" for name, value in environment.items())]
    caches = [f"--{name}={value}" for name, value in CACHES.items()]
    valgrind = ["valgrind", ALONE, "-q", "--tool=callgrind", f"--callgrind-out-file={out}", *DUMPED,
                *caches, *cutting]  # fmt: skip
    # LD_PRELOAD is set for valgrind, which hands it on.
    with contextlib.nullcontext() if quiet else elapsed("under callgrind"):
        process = command.run([*before, *valgrind])
    code = Code({}, set(), {})
    by_process: dict[str, list[Path]] = {}
    for path in folder.glob("callgrind.*"):
        by_process.setdefault(path.name.split(".")[1], []).append(path)
    files = by_process.pop(str(process), [])
    with Progress("reading dumps", len(files), unit="dumps", quiet=quiet) as progress:
        dumps = []
        for path in files:
            dumps.append(read_dump(path, code))
            progress.advance(1)
    dumps.sort(key=lambda dump: dump.part)
    if [dump.part for dump in dumps] != list(range(1, len(dumps) + 1)):
        raise TokmillError(
            f"callgrind left {len(dumps)} dumps with gaps between their numbers",
            where=shlex.join(command.words),
            hint="run the same command again",
        )
    return dumps, code, len(by_process)


def _intervals(
    dumps: list[Dump], ticks: Array, faults: Array, wanted: int, command: Command
) -> tuple[list[Dump], Timed]:
    """Put what lies between marks together to intervals of about equal numbers of instructions."""
    if ticks.shape[1] != len(dumps):
        raise TokmillError(
            f"{ticks.shape[1]:,} intervals were timed, and callgrind cut {len(dumps):,}",
            where=shlex.join(command.words),
            hint="the program does not do the same natively and under valgrind",
        )
    sizes = [dump.totals["Ir"] for dump in dumps]
    groups = grouped(sizes, wanted)
    ticks, faults = np.add.reduceat(ticks, groups, axis=1), np.add.reduceat(faults, groups)
    half = max(1, len(ticks) // 2)
    first, second = ticks[:half].min(axis=0), ticks[-half:].min(axis=0)
    halves = float(np.median(np.abs(first - second) / second))
    return merge_dumps(dumps, groups), Timed(ticks.min(axis=0), halves, len(ticks), faults)


def _table(
    vectors: BlockVectors,
    cpi: dict[str, Array],
    totals: Sequence[dict[str, int]],
    timed: Timed | None,
) -> str:
    instructions = vectors.instructions
    columns: dict[str, list[str]] = {
        "interval": [str(n) for n in range(len(vectors))],
        "instructions": [str(n) for n in instructions.tolist()],
    }
    for kind, values in cpi.items():
        columns[f"cpi_{kind}"] = ["" if v != v else f"{v:.6g}" for v in values.tolist()]
    counted = {name: summed(totals, events) for name, events in RATES.items()}
    if timed is not None:
        counted[PAGE_FAULTS] = timed.faults.astype(np.float64)
    for name, events in counted.items():
        rates = 1000 * events / np.maximum(instructions, 1)
        columns[name] = [f"{value:.6g}" for value in rates.tolist()]
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(columns)
    table.writerows(zip(*columns.values(), strict=True))
    return out.getvalue()


def summed(totals: Sequence[Mapping[str, int]], events: Sequence[str]) -> Array:
    return np.array([sum(row.get(name, 0) for name in events) for row in totals], np.float64)


def modelled(totals: Sequence[Mapping[str, int]]) -> Array:
    """Return the modelled CPI of each interval; NaN for one without instructions."""
    values = np.stack([summed(totals, events) for events in EVENTS.values()], axis=1)
    cycles = values @ np.array([USUAL[name] for name in EVENTS])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values[:, 0] > 0, cycles / values[:, 0], np.nan)
