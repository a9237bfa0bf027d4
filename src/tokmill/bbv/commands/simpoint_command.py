"""`tokmill simpoint`: intervals that stand for a program."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.base.errors import UsageError
from tokmill.base.files import inside
from tokmill.base.progress import elapsed, human_count, human_share
from tokmill.bbv.traces.block_vectors import TORN
from tokmill.terminal.frame import Json, Quiet
from tokmill.terminal.output import check_outputs, print_json, print_table, say

LITTLE = 2.0
"""Points with a smaller speed-up than this hardly are worth their error."""


Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="BBV…", help="Basic block vectors, one file per program.", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="DIR", help="Write NAME.simpoints, NAME.weights here."),
]
MethodName = Annotated[
    str,
    typer.Option(
        metavar="simpoint|two-phase",
        help="simpoint: nearest to the centres of clusters, as SimPoint 3.2; two-phase: drawn "
        "from strata of similar intervals, with a confidence interval.",
    ),
]
Points = Annotated[
    int | None,
    typer.Option(min=1, help="Number of points.", show_default="simpoint: by BIC; else 30"),
]
Memory = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Rates of each interval, such as of misses (.intervals.csv of `bbv profile`, or "
        "any CSV); one file for each BBV.",
    ),
]
Cpi = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="CPI of each interval, to compute the error (.intervals.csv of `bbv profile`, "
        "CSV, JSON, gem5's timeline); one file for each BBV.",
    ),
]
Simulated = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="CSV",
        help="`interval,cpi` of the points that were chosen: estimate the CPI; "
        "one file for each BBV.",
    ),
]
MaxPoints = Annotated[
    int | None,
    typer.Option(min=1, help="Largest number of clusters for BIC.", show_default="30"),
]
Dimensions = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Dimensions of the random projection.",
        show_default="15, simpoint: doubled while that explains more",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]

SUFFIXES = (".simpoints", ".weights")


def simpoint(
    traces: Traces,
    out: Out = None,
    method: MethodName = "simpoint",
    points: Points = None,
    memory: Memory = None,
    cpi: Cpi = None,
    simulated: Simulated = None,
    max_points: MaxPoints = None,
    dimensions: Dimensions = None,
    seed: Seed = 493575226,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Choose intervals that represent a whole program, and estimate its CPI from theirs."""
    if stores := [path for path in traces if path.is_dir()]:
        raise UsageError(
            "points of a program are chosen in its file of block vectors",
            where=str(stores[0]),
            hint="`tokmill simpoint TRACE`",
        )
    from tokmill.bbv.points import choose_points as choosing

    if max_points and (points or method != choosing.SIMPOINT):
        raise UsageError(
            "--max-points limits the choice by BIC, which is not used here", hint="--points N"
        )
    options = choosing.Options(
        method=method,
        points=points or 0,
        most=max_points or 30,
        dimensions=dimensions or 0,
        seed=seed,
    )
    names = names_of(traces)
    inputs_of = {
        option: _per_trace(option, paths, traces)
        for option, paths in (("--memory", memory), ("--cpi", cpi), ("--simulated", simulated))
    }
    if out is None and simulated is None and cpi is None:
        raise UsageError(
            "nothing says where the points go",
            hint="give -o DIR; or --cpi FILE, to see how good they are without keeping them",
        )
    if out is not None:
        outputs = {f"-o {n}{end}": inside(out, n + end) for n in names for end in SUFFIXES}
        inputs = [path for paths in inputs_of.values() for path in paths if path] + list(traces)
        check_outputs(outputs, inputs)
    reports = []
    for number, (name, path) in enumerate(zip(names, traces, strict=True)):
        rates, measured, done = (inputs_of[o][number] for o in ("--memory", "--cpi", "--simulated"))
        trace = choosing.load(name, path, rates, measured, quiet=quiet)
        with elapsed(f"{name}: choosing points"):
            chosen = choosing.choose(trace, options, done)
        if out is not None:
            choosing.write_points(out, name, chosen.intervals, chosen.weights)
        reports.append(chosen.report)
    _show(reports, out, json)


def names_of(traces: list[Path]) -> list[str]:
    """Return what the programs of files are called: `gzip` of `runs/gzip.bb.gz`."""
    from tokmill.bbv.traces import read

    names: dict[str, Path] = {}
    for path in traces:
        name = read.stem_of(path).name
        if name in names:
            raise UsageError(
                f"{names[name]} and this would both be called {name!r}",
                where=str(path),
                hint="run them one by one, or rename one",
            )
        names[name] = path
    return list(names)


def _per_trace(option: str, paths: list[Path] | None, traces: list[Path]) -> list[Path | None]:
    if not paths:
        return [None] * len(traces)
    if len(paths) != len(traces):
        raise UsageError(
            f"{human_count(len(paths), 'file')} of {option} for "
            f"{human_count(len(traces), 'file')} of block vectors",
            hint=f"{option} once for each, in the same order",
        )
    return list(paths)


def _show(reports: list[Any], out: Path | None, json: bool) -> None:
    if json:
        print_json(reports)
        return
    judged = any(report.estimated_cpi is not None for report in reports)
    headers = ["program", "intervals", "points", "speed-up"]
    kinds = sorted({report.cpi_kind for report in reports} - {"", "given"})
    headers += (
        [f"CPI, {' or '.join(kinds)}" if kinds else "CPI", "estimate", "error", "95 %"]
        if judged
        else ["unexplained"]
    )
    rows = []
    for one in reports:
        row = [one.program, one.intervals, one.points, f"{one.speed_up:,.1f}"]
        if judged:
            row += [
                _number(one.true_cpi),
                _number(one.estimated_cpi),
                "" if one.error is None else f"{100 * one.error:+z.2f} %",
                "" if one.low is None else f"{one.low:.4g} – {one.high:.4g}",
            ]
        else:
            row.append("" if one.unexplained is None else human_share(one.unexplained))
        rows.append(row)
    print_table(headers, rows)
    for one in reports:
        if one.empty:
            say(f"{one.program}: {human_count(one.empty, 'interval')} without instructions")
        if one.unmeasured:
            say(f"{one.program}: {human_count(one.unmeasured, 'interval')} without a CPI left out")
        if one.other_lines:
            skipped = human_count(one.other_lines, "line")
            say(f"note: {one.program}: {skipped} that begin with neither T nor # were left out")
        if one.torn:
            say(f"note: {one.program}: {TORN}")
        if one.points > 1 and one.speed_up < LITTLE:
            say(
                f"{one.program}: its points are {human_share(1 / one.speed_up, 0)} of what it "
                "executes; shorter intervals (`tokmill bbv profile --every-blocks N`) or a longer "
                "execution save more"
            )
    if out is not None:
        say(f"{out}: .simpoints and .weights of {human_count(len(reports), 'program')}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
