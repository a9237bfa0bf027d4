"""CPI of programs estimated from a few intervals: SimPoint, and what is newer.

    python benchmarks/sampling_cpi.py DIR
    python benchmarks/sampling_cpi.py made-up

DIR holds what `tokmill bbv profile` writes: NAME.bb.gz and NAME.intervals.csv, a pair a program.
`DRAWS` samples judge `two-phase`, a fifth of them each of the others.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from measure import markdown
from tokmill.bbv.points import clusters
from tokmill.bbv.points.choose_points import SAMPLED
from tokmill.bbv.points.clusters import Floats
from tokmill.bbv.points.designs import Estimate, Random, Sample, expansion, two_phase
from tokmill.bbv.points.executions import Population, as_matrix, population
from tokmill.bbv.traces import cpi, read

POINTS, DRAWS = 30, 1000
OTHERS = 5
"""One of so many draws judges a method that is not the default."""
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
    cpi: Floats
    """Measured, of each interval of the populations."""


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
        misses = {rate: values for rate, values in rates.items() if rate != cpi.PAGE_FAULTS}
        seen = {BLIND: {}, MISSES: misses, ALL: rates}
        populations = {name: population(matrix, ids, some) for name, some in seen.items()}
        found.append(Program(name, populations, measures.cpi["measured"][known]))
    return found


Method = Callable[[Population, int, Random], Sample]


def centres(population: Population, n: int, random: Random) -> Sample:
    """Choose the interval nearest to the centre of each of `n` clusters, as SimPoint does."""
    labels, means = clusters.k_means(
        population.features, population.shares, n, seed=int(random.integers(2**31))
    )
    off = ((population.features - means[labels]) ** 2).sum(axis=1)
    firsts = clusters.nearest(labels, off, population.shares)
    heavy: Floats = np.bincount(labels, population.shares).astype(np.float64)
    count = len(firsts)
    return Sample(firsts, heavy, np.zeros(count, bool), np.arange(count), n / len(population))


METHODS: dict[str, Method] = {"simpoint": centres, "two-phase": two_phase}


class Resampled(NamedTuple):
    """Errors of many samples of one program; as shares of its CPI."""

    mean: float
    """Mean of the absolute errors."""
    coverage: float
    """Share of the confidence intervals that hold the truth; NaN if the method has none."""


def resample(
    population: Population, cpi: Floats, method: Method, points: int, draws: int
) -> Resampled:
    """Draw many samples of so many points, and compare their estimates with the truth.

    `cpi` (N,) is that of all intervals. Only intervals that are drawn have a confidence interval.
    """
    truth = float(population.shares @ cpi)
    found: list[Estimate] = []
    for number in range(draws):
        random = np.random.default_rng([0, number])
        sample = method(population, points, random)
        known = cpi[sample.places]
        if method is centres:
            found.append(Estimate(float(sample.shares @ known), -np.inf, np.inf))
        else:
            found.append(expansion(sample, known))
    off = np.abs([one.cpi / truth - 1 for one in found])
    finite = all(np.isfinite(one.high) for one in found)
    # Rounding: where all intervals are equal, the interval is a point.
    room = 1e-9 * abs(truth)
    inside = [one.low - room <= truth <= one.high + room for one in found]
    return Resampled(
        float(off.mean()),
        float(np.mean(inside)) if finite else float("nan"),
    )


def judged(program: Program, row: tuple[str, str, str]) -> Resampled:
    """Return the errors of a method on a program."""
    _, method, seeing = row
    known = program.seen[seeing]
    times = DRAWS if method == SAMPLED and seeing != BLIND else DRAWS // OTHERS
    times = SEEDS if method == "simpoint" else times
    return resample(known, program.cpi, METHODS[method], min(POINTS, len(known)), times)


def section(programs: list[Program]) -> list[str]:
    table = []
    for row in ROWS:
        found = [judged(program, row) for program in programs]
        means = np.asarray([one.mean for one in found])
        covers = np.asarray([one.coverage for one in found])
        known = np.isfinite(covers).all()
        cover = f"{covers.mean():.0%} ({covers.min():.0%})" if known else "–"
        table.append([row[0], f"{means.mean():.1%}", f"{means.max():.1%}", cover])
        print(*table[-1], file=sys.stderr, flush=True)
    sizes = [len(program.seen[BLIND]) for program in programs]
    return [
        f"Measured CPI: {len(programs)} programs of {min(sizes)} to {max(sizes)} "
        f"intervals, {POINTS} points, {DRAWS:,} draws of two-phase with rates, "
        f"{DRAWS // OTHERS} of the others ({SEEDS} seeds of SimPoint). Errors are of the program's "
        "CPI; coverage is that of 95 % intervals.",
        "",
        *markdown(["method", "mean error", "largest program", "coverage (lowest program)"], table),
    ]


def main(folder: Path) -> list[str]:
    """Return the lines of the section."""
    programs = load(folder)
    if not programs:
        return [f"No profiles are in {folder.name}: `tokmill bbv profile --measured` makes them."]
    return section(programs)


SETTINGS: tuple[dict[str, float], ...] = (
    {}, {"kinds": 3}, {"kinds": 12}, {"drift": 0.0}, {"drift": 0.95}, {"noise": 0.2}, {"tail": 0.5},
    {"tail": 1.0}, {"intervals": 150}, {"intervals": 1500},
)  # fmt: skip
"""Of programs that never ran (`tests/helpers/phases.py`)."""


def made_up() -> list[str]:
    """Return the coverage of two-phase on programs that never ran, four of each setting."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
    from phases import phases

    covers = []
    for settings in SETTINGS:
        for seed in range(1, 5):
            one = phases(seed, **settings)  # type: ignore[arg-type]
            covers.append(resample(one.population, one.cpi, two_phase, POINTS, 200).coverage)
    return [f"coverage of {len(covers)} programs: {np.mean(covers):.1%}, least {min(covers):.1%}"]


if __name__ == "__main__":
    if sys.argv[1] == "made-up":
        print("\n".join(made_up()))
    else:
        print("\n".join(main(Path(sys.argv[1]))))
