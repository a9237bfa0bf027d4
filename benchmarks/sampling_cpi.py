"""CPI of programs estimated from a few intervals: SimPoint, and what is newer.

    python benchmarks/sampling_cpi.py DIR [POINTS] [DRAWS]

DIR holds what `tokmill bbv profile` writes: NAME.bb.gz and NAME.intervals.csv, a pair a program.
DRAWS (1,000) samples judge `two-phase`, a fifth of them each of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from resampling import METHODS, Resampled, enough_points, resample
from tokmill.base.errors import TokmillError
from tokmill.bbv.points.choose_points import SAMPLED
from tokmill.bbv.points.executions import Population, as_matrix, population
from tokmill.bbv.traces import cpi, read

OTHERS = 5
"""One of so many draws judges a method that is not the default."""
TARGET = 0.05
SEEDS = 4
"""Clusterings by which SimPoint is judged: nothing else of it is random."""
BLIND, MISSES, ALL = "block vectors", "miss rates", "all rates"
"""What a method sees: block vectors alone, miss rates beside them, page faults too."""
ROWS = (
    ("SimPoint", "simpoint", BLIND),
    ("SimPoint + miss rates", "simpoint", MISSES),
    ("SimPoint + miss rates and page faults", "simpoint", ALL),
    ("two-phase, block vectors", "two-phase", BLIND),
    ("two-phase without page faults", "two-phase", MISSES),
    ("two-phase", "two-phase", ALL),
)
"""(name in the table, method, what it sees)."""


class Program(NamedTuple):
    """A program of which everything is known."""

    name: str
    seen: dict[str, Population]
    """What is seen → the intervals, as far as that."""
    cpi: dict[str, np.ndarray]
    """Kind → of each interval of the populations."""


def load(folder: Path) -> list[Program]:
    """Read all profiles of a folder; intervals without a measured CPI are left out."""
    found = []
    for table in sorted(folder.glob("*.intervals.csv")):
        name = table.name.removesuffix(".intervals.csv")
        traces = [path for path in folder.glob(f"{name}.bb*") if read.stem_of(path).name == name]
        if not traces:
            continue
        vectors = read.read(traces[0])
        measures = cpi.read_measures(table)
        cpi.check_measures(measures, vectors.instructions, table, traces[0])
        matrix, ids = as_matrix(vectors)
        known = vectors.instructions > 0
        for values in measures.cpi.values():
            known &= ~np.isnan(values)
        matrix = matrix[known]
        rates = {rate: values[known] for rate, values in measures.rates.items()}
        of_kind = {kind: values[known] for kind, values in measures.cpi.items()}
        misses = {rate: values for rate, values in rates.items() if rate != cpi.PAGE_FAULTS}
        seen = {BLIND: {}, MISSES: misses, ALL: rates}
        populations = {name: population(matrix, ids, some) for name, some in seen.items()}
        found.append(Program(name, populations, of_kind))
    return found


def judged(
    program: Program, kind: str, row: tuple[str, str, str], points: int, draws: int
) -> Resampled:
    """Return the errors of a method on a program."""
    _, method, seeing = row
    known = program.seen[seeing]
    times = draws if method == SAMPLED and seeing != BLIND else draws // OTHERS
    times = SEEDS if method == "simpoint" else max(times, 2)
    count = min(points, len(known))
    return resample(known, program.cpi[kind], METHODS[method], count, draws=times)


def section(
    programs: list[Program], kind: str, points: int, draws: int, say: Callable[[str], None]
) -> list[str]:
    """Return the lines about one kind of CPI."""
    having = [program for program in programs if kind in program.cpi]
    if not having:
        return []
    head = ["method", "mean", "worst program", "worst 95th", "coverage (lowest)", "half width"]
    table = [_line(head), _line(["---"] * len(head))]
    each = [
        _line(["method", *(program.name for program in having)]),
        _line(["---"] * (1 + len(having))),
    ]
    held = list(each)
    for row in ROWS:
        found = [judged(program, kind, row, points, draws) for program in having]
        means = np.asarray([one.mean for one in found])
        covers = np.asarray([one.coverage for one in found])
        cells = [row[0], f"{means.mean():.1%}", f"{means.max():.1%}",
                 f"{max(one.quantile for one in found):.1%}"]  # fmt: skip
        if np.isfinite(covers).all():
            half = np.median([one.half_width for one in found])
            cells += [f"{covers.mean():.0%} ({covers.min():.0%})", f"{half:.1%}"]
        else:
            cells += ["–", "–"]
        table.append(_line(cells))
        each.append(_line([row[0], *(f"{100 * mean:.1f}" for mean in means)]))
        if np.isfinite(covers).all():
            held.append(_line([row[0], *(f"{100 * cover:.0f}" for cover in covers)]))
        say(table[-1])
    sizes = [len(program.seen[BLIND]) for program in having]
    needed = [_points_needed(program, kind, draws // OTHERS) for program in having]
    counts = [count for count, _ in needed if count]
    return [
        f"**{kind.capitalize()} CPI**: {len(having)} programs of {min(sizes)} to {max(sizes)} "
        f"intervals, {points} points, {draws:,} draws of two-phase with rates, "
        f"{draws // OTHERS} of the others ({SEEDS} seeds of SimPoint). Errors are of the program's "
        "CPI; coverage is that of 95 % intervals.",
        "",
        *table,
        "",
        "Mean error of each program, %:",
        "",
        *each,
        "",
        "Coverage of 95 % intervals of each program, %:",
        "",
        *held,
        "",
        f"For an error of {TARGET:.0%}: {min(counts, default=0)} to {max(counts, default=0)} "
        f"points; {len(having) - len(counts)} of {len(having)} programs do not reach it with half "
        "of their intervals. Points, and the error of 95 of 100 samples, %: "
        + ", ".join(
            f"{program.name} {f'{count} ({100 * error:.1f})' if count else '–'}"
            for program, (count, error) in zip(having, needed, strict=True)
        )
        + ".",
        "",
    ]


def _points_needed(program: Program, kind: str, draws: int) -> tuple[int, float]:
    """Return the points that the target needs and the error of 95 of 100 samples; 0: too many."""
    try:
        found = enough_points(
            program.seen[ALL], program.cpi[kind], METHODS[SAMPLED], TARGET, draws=max(draws, 2)
        )
    except TokmillError:
        return 0, float("nan")
    return found.points, found.quantile


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(
    folder: Path,
    points: int = 30,
    draws: int = 1000,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Return the lines of the section, measured and modelled CPI apart."""
    programs = load(folder)
    if not programs:
        return [f"No profiles are in {folder.name}: `tokmill bbv profile --measured` makes them."]
    lines = []
    for kind in ("measured", "simulated", "modelled"):
        lines += section(programs, kind, points, draws, say)
    return [
        *lines,
        "On modelled CPI methods that see miss rates are judged by the formula that made it.",
    ]


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[2:4]]
    print(
        "\n".join(
            main(
                Path(sys.argv[1]),
                *numbers,
                say=lambda line: print(line, file=sys.stderr, flush=True),
            )
        )
    )
