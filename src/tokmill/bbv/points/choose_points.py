"""`tokmill simpoint`: points of a program's file of block vectors, and what they estimate."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import inside, make_folder, write_file
from tokmill.bbv.points import clusters, designs, simpoint
from tokmill.bbv.points.clusters import Floats, Ints
from tokmill.bbv.points.executions import as_matrix, population, rates_of
from tokmill.bbv.points.simpoint import Matrix
from tokmill.bbv.traces import read
from tokmill.bbv.traces.cpi import CPI_NAMES, check_measures, read_measures, read_rates, read_table

POINTS = 30
"""Points of methods that draw, where no number is asked for."""
SIMPOINT = "simpoint"
SAMPLED = "two-phase"
"""The method whose intervals hold the truth most evenly over programs (docs/simpoint.md)."""


@dataclass(frozen=True)
class Options:
    """What is asked for, of every program."""

    method: str = SIMPOINT
    points: int = 0
    """How many; 0: by BIC, or `POINTS`."""
    most: int = clusters.MOST
    dimensions: int = 0
    seed: int = clusters.SEED

    def __post_init__(self) -> None:
        if self.method not in (SIMPOINT, SAMPLED):
            raise UsageError(
                f"no method is called {self.method!r}",
                hint=nearest(self.method, (SIMPOINT, SAMPLED)),
            )


@dataclass(frozen=True)
class Trace:
    """What is known of a program's run; `Report` has what the last fields mean."""

    name: str
    vectors: Matrix
    ids: Ints
    memory: dict[str, Floats] = field(default_factory=dict)
    cpi: Floats | None = None
    kind: str = ""
    unmeasured: int = 0
    torn: bool = False
    other_lines: int = 0


class Report(msgspec.Struct, kw_only=True):
    """What was chosen of a program, and how good it is."""

    program: str
    intervals: int
    empty: int
    """Intervals without instructions; none of them is a point."""
    unmeasured: int = 0
    """Intervals with instructions but without a CPI, where CPI was given; they are left out."""
    torn: bool = False
    """Whether the last line of the block vectors does not end: the file may be cut off."""
    other_lines: int = 0
    """Lines that are neither intervals nor comments."""
    cpi_kind: str = ""
    """measured, simulated, given or modelled."""
    instructions: int
    method: str
    points: int
    speed_up: float
    """Instructions of the program over those of the points."""
    dimensions: int | None = None
    unexplained: float | None = None
    """Share of the variance of the block vectors inside of clusters."""
    true_cpi: float | None = None
    estimated_cpi: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    """Error of the estimate, as a share of the true CPI."""


@dataclass(frozen=True)
class Chosen:
    """Points of a program."""

    intervals: Ints
    weights: Floats
    report: Report


def load(name: str, path: Path, memory: Path | None, cpi: Path | None, *, quiet: bool) -> Trace:
    """Read the files of a program's run: block vectors, memory vectors, CPI."""
    trace = read.read(path, quiet=quiet)
    vectors, ids = as_matrix(trace)
    rates = read_rates(memory, trace.instructions, path) if memory else {}
    known = Trace(name, vectors, ids, rates, torn=trace.torn, other_lines=trace.other_lines)
    if cpi is None:
        return known
    measures = read_measures(cpi)
    check_measures(measures, trace.instructions, cpi, path)
    if not measures.kind:
        raise TokmillError(
            "the file has no CPI", where=str(cpi), hint="a column `cpi`, `cpi_measured`, …"
        )
    values, ran = measures.cpi[measures.kind], trace.instructions > 0
    unknown = np.isnan(values) & ran
    if ran.any() and (unknown == ran).all():
        raise TokmillError(
            "no interval with instructions has a CPI",
            where=str(cpi),
            hint=f"is it the right file? its CPI, {measures.kind}, is empty there",
        )
    if unknown.any():
        vectors = plugins.require("scipy.sparse").diags_array((~unknown).astype(float)) @ vectors
    return replace(
        known,
        vectors=vectors.tocsr(),
        cpi=np.where(np.isnan(values), 1.0, values),
        kind=measures.kind,
        unmeasured=int(unknown.sum()),
    )


def choose(trace: Trace, options: Options, simulated: Path | None = None) -> Chosen:
    """Choose the points of a program.

    Args:
        simulated: a table of `interval` and `cpi` of the points that the same options chose.
    """
    method = by_clusters if options.method == SIMPOINT else by_sample
    return method(trace, options, simulated)


def by_clusters(trace: Trace, options: Options, simulated: Path | None) -> Chosen:
    points = simpoint.simpoints(
        trace.vectors,
        trace.ids,
        memory=rates_of(trace.memory),
        dimensions=options.dimensions,
        most=options.most,
        exactly=options.points,
        seed=options.seed,
    )
    report = _report(trace, options.method, points.intervals)
    report.dimensions, report.unexplained = points.dimensions, points.unexplained
    cpi = _cpi_of(trace, points.intervals, simulated)
    if cpi is not None:
        fill(report, designs.Estimate(float(points.weights @ cpi), -np.inf, np.inf), trace)
    return Chosen(points.intervals, points.weights, report)


def by_sample(trace: Trace, options: Options, simulated: Path | None) -> Chosen:
    frame = population(
        trace.vectors, trace.ids, trace.memory or None, dimensions=options.dimensions
    )
    points = min(options.points or POINTS, len(frame))
    sample = designs.two_phase(frame, points, np.random.default_rng(options.seed))
    intervals = frame.intervals[sample.places]
    report = _report(trace, options.method, intervals)
    cpi = _cpi_of(trace, intervals, simulated)
    if cpi is not None:
        fill(report, designs.expansion(sample, cpi), trace)
    return Chosen(intervals, sample.shares, report)


def _cpi_of(trace: Trace, intervals: Ints, path: Path | None) -> Floats | None:
    """Return the CPI of points: those that were simulated, or else those of the trace."""
    if path is None:
        return None if trace.cpi is None else trace.cpi[intervals]
    table = read_table(path, trace.vectors.shape[0], partly=True)
    named = [name for name in CPI_NAMES[:-1] if name in table]
    if not named:
        raise TokmillError("there is no column 'cpi'", where=str(path), hint=nearest("cpi", table))
    cpi = table[named[0]]
    if (wrong := np.flatnonzero(cpi <= 0)).size:
        raise TokmillError(
            f"the CPI of interval {wrong[0]} is {cpi[wrong[0]]:g}",
            where=str(path),
            hint="cycles over instructions are above 0",
        )
    result = cpi[intervals]
    if missing := int(np.isnan(result).sum()):
        first = int(intervals[np.argmax(np.isnan(result))])
        raise TokmillError(
            f"the CPI of {missing:,} of {len(intervals):,} points is missing, such as of interval "
            f"{first}",
            where=str(path),
            hint="give method, points, seed and memory vectors as when they were chosen",
        )
    return result


def _report(trace: Trace, name: str, intervals: Ints) -> Report:
    sums = np.asarray(trace.vectors.sum(axis=1)).reshape(-1)
    return Report(
        program=trace.name,
        intervals=len(sums),
        empty=int((sums <= 0).sum()) - trace.unmeasured,
        unmeasured=trace.unmeasured,
        torn=trace.torn,
        other_lines=trace.other_lines,
        cpi_kind=trace.kind,
        instructions=int(sums.sum()),
        method=name,
        points=len(intervals),
        speed_up=float(sums.sum() / sums[intervals].sum()),
    )


def fill(report: Report, estimate: designs.Estimate, trace: Trace) -> None:
    report.estimated_cpi = float(estimate.cpi)
    if np.isfinite(estimate.high):
        report.low, report.high = float(estimate.low), float(estimate.high)
    if trace.cpi is not None:
        weights = simpoint.instructions(trace.vectors)
        report.true_cpi = float(weights @ trace.cpi / weights.sum())
        report.error = float(estimate.cpi / report.true_cpi - 1)


def write_points(folder: Path, name: str, intervals: Ints, weights: Floats) -> None:
    """Write NAME.simpoints and NAME.weights into a folder, as SimPoint 3.2 writes them.

    `.simpoints` has a line `INTERVAL CLUSTER` a point, `.weights` a line `WEIGHT CLUSTER`.
    Intervals count from 0.
    """
    pairs = list(zip(intervals.tolist(), weights.tolist(), strict=True))
    texts = {
        ".simpoints": "".join(f"{interval} {k}\n" for k, (interval, _) in enumerate(pairs)),
        ".weights": "".join(f"{weight:.9g} {k}\n" for k, (_, weight) in enumerate(pairs)),
    }
    make_folder(folder)
    for end, text in texts.items():
        write_file(inside(folder, name + end), text)
