"""`tokmill simpoint`: intervals that stand for a program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.base.errors import UsageError
from tokmill.base.files import inside, make_folder, write_file
from tokmill.base.progress import elapsed, human_count, human_share
from tokmill.bbv.commands.simpoint_shared import share
from tokmill.bbv.traces.block_vectors import TORN
from tokmill.terminal.options import Json, Quiet
from tokmill.terminal.output import check_outputs, print_json, print_table, say

WITH_SIGNATURES = {"traces", "signatures", "points", "seed", "out", "quiet", "json"}
WITH_FROM = {"traces", "points_from", "cpi", "out", "quiet", "json"}
"""Parameters that mean something beside --signatures, and beside --from."""
LITTLE = 2.0
"""Points with a smaller speed-up than this hardly are worth their error."""


def simpoint(
    context: typer.Context,
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="BBV…|STORE",
            help="Basic block vectors, a file a program; with --signatures a store.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Write NAME.simpoints, NAME.weights here."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="simpoint|two-phase",
            help="simpoint: nearest to the centres of clusters, as SimPoint 3.2; two-phase: drawn "
            "from strata of similar intervals, with a confidence interval.",
            show_default="simpoint; with --target-error two-phase",
        ),
    ] = "",
    points: Annotated[
        int | None,
        typer.Option(min=1, help="Number of points.", show_default="simpoint: by BIC; else 30"),
    ] = None,
    target_error: Annotated[
        str,
        typer.Option(
            metavar="5%", help="With --simulated: say how many points this error of the CPI needs."
        ),
    ] = "",
    memory: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Rates of each interval, such as of misses (.intervals.csv of `bbv profile`, or "
            "any CSV); one file for each BBV.",
        ),
    ] = None,
    cpi: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="CPI of each interval, to judge the points by (.intervals.csv of `bbv profile`, "
            "CSV, JSON, gem5's timeline); one file for each BBV.",
        ),
    ] = None,
    simulated: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="CSV",
            help="`interval,cpi` of the points that were chosen: estimate the CPI; "
            "one file for each BBV.",
        ),
    ] = None,
    points_from: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="Choose none: judge NAME.simpoints and .weights here."
        ),
    ] = None,
    signatures: Annotated[
        str,
        typer.Option(
            metavar="RUN|OVERLAY|untrained",
            help="Choose points that all programs of a store of `build bbv` share, by vectors of "
            "their intervals; untrained: mix of instructions and miss rates.",
        ),
    ] = "",
    max_points: Annotated[
        int, typer.Option("--max-points", min=1, help="BIC chooses at most so many clusters.")
    ] = 30,
    bic_threshold: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="The fewest clusters whose BIC reaches this share of its range."
        ),
    ] = 0.9,
    dimensions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Dimensions of the random projection.",
            show_default="15, simpoint: doubled while that explains more",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=1, help="Starts of each k-means; the best counts.")
    ] = 5,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of everything that is random.")
    ] = 493575226,
    confidence: Annotated[float, typer.Option(help="Confidence of the intervals of CPI.")] = 0.95,
    labels: Annotated[
        bool, typer.Option("--labels", help="Write NAME.labels, too: cluster and distance.")
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Choose intervals of a program that stand for all of it, and estimate its CPI from theirs."""
    if signatures:
        _check_unused(context, "--signatures", WITH_SIGNATURES)
        if len(traces) > 1 or not traces[0].is_dir():
            raise UsageError(
                "--signatures are of the intervals of one store",
                where=str(traces[0]),
                hint="`tokmill build bbv` makes a store of several programs",
            )
        share(traces[0], signatures, points or 30, seed, out, quiet, json)
        return
    if stores := [path for path in traces if path.is_dir()]:
        raise UsageError(
            "points of one program are chosen in its file of block vectors",
            where=str(stores[0]),
            hint="`tokmill simpoint TRACE`; of a store --signatures chooses points of all programs",
        )
    if points_from is not None:
        _check_unused(context, "--from", WITH_FROM)
    from tokmill.bbv.points import choose_points as choosing

    # SimPoint's points tell nothing about their error.
    method = method or (choosing.SAMPLED if target_error else choosing.SIMPOINT)
    options = choosing.Options(
        method=method,
        points=points or 0,
        most=max_points,
        threshold=bic_threshold,
        dimensions=dimensions or 0,
        restarts=restarts,
        seed=seed,
        target=_share(target_error),
        confidence=confidence,
    )
    names = names_of(traces)
    beside = {
        option: _one_each(option, paths, traces)
        for option, paths in (("--memory", memory), ("--cpi", cpi), ("--simulated", simulated))
    }
    if labels and method != "simpoint":
        raise UsageError("--labels are of clusters", hint="with --method simpoint")
    if out is None and points_from is None and simulated is None and cpi is None:
        raise UsageError(
            "nothing says where the points go",
            hint="give -o DIR; or --cpi FILE, to see how good they are without keeping them",
        )
    if out is not None:
        ends = (".simpoints", ".weights", *([".labels"] if labels else []))
        made = {f"-o {name}{end}": inside(out, name + end) for name in names for end in ends}
        inputs = [path for paths in beside.values() for path in paths if path] + list(traces)
        check_outputs(made, inputs)
    reports = []
    for number, (name, path) in enumerate(zip(names, traces, strict=True)):
        rates, known, done = (beside[o][number] for o in ("--memory", "--cpi", "--simulated"))
        trace = choosing.load(name, path, rates, known, quiet=quiet)
        with elapsed(f"{name}: choosing points"):
            if points_from is not None:
                from tokmill.bbv.points import simpoint_files as files

                pair = (inside(points_from, f"{name}{end}") for end in (".simpoints", ".weights"))
                chosen = choosing.given(trace, *files.read(*pair))
            else:
                chosen = choosing.choose(trace, options, done)
        if out is not None:
            _write(out, name, chosen, labels)
        reports.append(chosen.report)
    _show(reports, out, options.target, json)


def _check_unused(context: typer.Context, option: str, used: set[str]) -> None:
    """Refuse options that would be ignored beside `option`."""
    for one in context.command.params:
        source = context.get_parameter_source(one.name or "")
        if one.name not in used and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{option} does not use {one.opts[0]}", hint=f"leave {one.opts[0]} out"
            )


def names_of(traces: list[Path]) -> list[str]:
    """Return what the programs of files are called: `gzip` of `runs/gzip.bb.gz`."""
    from tokmill.bbv.traces import trace_files as beside

    names: dict[str, Path] = {}
    for path in traces:
        name = beside.stem_of(path).name
        if name in names:
            raise UsageError(
                f"{names[name]} and this would both be called {name!r}",
                where=str(path),
                hint="run them one by one, or rename one",
            )
        names[name] = path
    return list(names)


def _one_each(option: str, paths: list[Path] | None, traces: list[Path]) -> list[Path | None]:
    if not paths:
        return [None] * len(traces)
    if len(paths) != len(traces):
        raise UsageError(
            f"{human_count(len(paths), 'file')} of {option} for "
            f"{human_count(len(traces), 'file')} of block vectors",
            hint=f"{option} once for each, in the same order",
        )
    return list(paths)


def _share(text: str) -> float:
    """Return 0.05 for `5%` or `0.05`; 0 for no text."""
    if not text:
        return 0.0
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = -1.0
    if not 0 < number < 1:
        raise UsageError(f"--target-error {text!r} is no share", hint="such as 5% or 0.05")
    return number


def _write(out: Path, name: str, chosen: Any, labels: bool) -> None:
    from tokmill.bbv.points import simpoint_files as files

    make_folder(out)
    for end, text in files.written(chosen.intervals, chosen.weights).items():
        write_file(inside(out, name + end), text)
    if labels:
        write_file(
            inside(out, f"{name}.labels"), files.labels_text(chosen.labels, chosen.distances)
        )


def _show(reports: list[Any], out: Path | None, target: float, json: bool) -> None:
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
        if one.points_left_out:
            left_out = human_count(one.points_left_out, "point")
            say(f"{one.program}: {left_out} of intervals without instructions or a CPI left out")
        if one.other_lines:
            others = human_count(one.other_lines, "line")
            say(f"note: {one.program}: {others} that begin with neither T nor # were left out")
        if one.torn:
            say(f"note: {one.program}: {TORN}")
        if one.points > 1 and one.speed_up < LITTLE:
            say(
                f"{one.program}: its points are {human_share(1 / one.speed_up, 0)} of what it "
                "executes; shorter intervals (`tokmill bbv profile --every-blocks N`) or a longer "
                "execution save more"
            )
        if one.points_needed is not None and one.points_needed > one.points:
            say(f"{one.program}: about {one.points_needed:,} points reach {target:.3g}")
    if out is not None:
        say(f"{out}: .simpoints and .weights of {human_count(len(reports), 'program')}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
