"""`tokmill bbv`: execution profiles of programs that run here, and files of basic block vectors."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tokmill.base.errors import UsageError, shell_word
from tokmill.base.progress import Progress, human_bytes, human_count
from tokmill.bbv.commands.simpoint_command import Out, Seed
from tokmill.bbv.points import executions as reading
from tokmill.bbv.points import shared_points as sharing
from tokmill.bbv.points.choose_points import write_points
from tokmill.bbv.points.clusters import SEED, Floats
from tokmill.bbv.points.executions import Executions
from tokmill.bbv.points.shared_points import Shared
from tokmill.bbv.traces.block_vectors import TORN
from tokmill.builds.mining.interval_vectors import VectorTable
from tokmill.store.store import Store
from tokmill.terminal.frame import Json, Quiet, group_of
from tokmill.terminal.output import print_json, print_table, say

FEW = 30
"""Fewer intervals give points little to choose from."""
UNTRAINED = "untrained"


def profile(
    words: Annotated[
        list[str], typer.Argument(metavar="-- PROGRAM ARG…", help="The program and its arguments.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", readable=False, help="Folder to write.")],
    name: Annotated[str, typer.Option(help="Name of the files; default: the program's.")] = "",
    stdin: Annotated[str, typer.Option(metavar="FILE", help="Input of the program.")] = "",
    every_blocks: Annotated[
        int,
        typer.Option(
            min=1000, metavar="N", help="Blocks executed in an interval, or up to 100,000 more."
        ),
    ] = 2_000_000,
    measured: Annotated[
        bool,
        typer.Option(
            "--measured",
            help="Measure CPI too, at marks; intervals then end at marks. Needs a C compiler.",
        ),
    ] = False,
    intervals: Annotated[
        int, typer.Option(min=2, metavar="N", help="With --measured: about how many intervals.")
    ] = 300,
    runs: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --measured: number of timed runs.")
    ] = 25,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Run a program under valgrind: block vectors, modelled or measured CPI, and miss rates."""
    from tokmill.bbv.traces.profile import Asked
    from tokmill.bbv.traces.profile import profile as run_profile

    asked = Asked(every_blocks, measured, intervals, runs)
    profiled = run_profile(words, out, asked, name=name, stdin=stdin, quiet=quiet)
    if json:
        print_json(_facts(profiled))
    else:
        _print_profile(profiled)
    return 0


def _facts(profiled: Any) -> dict[str, Any]:
    return {
        "trace": str(profiled.trace),
        "intervals": len(profiled.vectors),
        "blocks": int(profiled.vectors.ids.max(initial=0)),
        "instructions": int(profiled.vectors.instructions.sum()),
        "cpi": profiled.program_cpi(),
        **profiled.about,
    }


def _print_profile(profiled: Any) -> None:
    cpi = profiled.program_cpi()
    print(
        f"{profiled.trace}: {human_count(len(profiled.vectors), 'interval')}, "
        f"{human_count(int(profiled.vectors.ids.max(initial=0)), 'block')}, "
        f"{profiled.vectors.instructions.sum():,} instructions"
    )
    if forked := profiled.about["forked"]:
        say(f"note: it forked {human_count(forked, 'process', 'processes')}, which are left out")
    for kind, values in profiled.cpi.items():
        low, high = np.nanmin(values), np.nanmax(values)
        print(f"CPI, {kind}: {cpi[kind]:.3f} (intervals: {low:.3f} to {high:.3f})")
    if profiled.timed is not None:
        marks, load = profiled.about["marks"], profiled.about["measured"]["load"]
        print(
            f"measured: fastest of {profiled.timed.runs} runs; the two halves of the runs differ "
            f"by {profiled.timed.halves:.2%} (median); load {load:.1f}; marks at every "
            f"{marks['every']:,}. call ({marks['kind']})"
        )
    if len(profiled.vectors) < FEW:
        asked = profiled.about["asked"]
        blocks = "--every-blocks down to 100,000, or " if asked["every_blocks"] > 100_000 else ""
        option = "a larger --intervals, or " if asked["measured"] else blocks
        say(f"note: few intervals: {option}a longer execution makes more")
    trace = shell_word(profiled.trace)
    table = shlex.quote(str(profiled.trace).removesuffix(".bb.gz") + ".intervals.csv")
    say(f"next: tokmill simpoint {trace} --cpi {table} -o POINTS")


def check(
    trace: Annotated[Path, typer.Argument(metavar="BBV", help="File of basic block vectors.")],
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Describe a file of basic block vectors; exit code 1 if it is truncated."""
    from tokmill.bbv.traces.read import pieces

    rows = entries = 0
    low, high = np.iinfo(np.int64).max, 0
    sums = []
    for piece in pieces(trace, quiet=quiet):
        rows, entries = rows + len(piece), entries + piece.entries
        sums.append(piece.instructions)
        low = min(low, int(piece.ids.min(initial=low)))
        high = max(high, int(piece.ids.max(initial=0)))
    totals = np.concatenate(sums)
    ids = [low, high] * bool(entries)
    sizes = {"smallest": int(totals.min()), "largest": int(totals.max())}
    if json:
        print_json(
            {
                "intervals": rows, "entries": entries, "ids": ids,
                "instructions": int(totals.sum()),
                "declared": piece.declared._asdict(), "sizes": sizes,
                "ignored": piece.ignored, "torn": piece.torn,
            }
        )  # fmt: skip
        return int(piece.torn)
    size = human_bytes(trace.stat().st_size)
    print(
        f"{trace}: {human_count(rows, 'interval')}, {human_count(entries, 'entry', 'entries')}, "
        f"{totals.sum():,} instructions, {f'ids {low:,} to {high:,}, ' if ids else ''}{size}"
    )
    print(f"intervals: {totals.min():,} to {totals.max():,} instructions")
    declared = {
        name: value for name, value in piece.declared._asdict().items() if value is not None
    }
    if declared:
        print("declared: " + ", ".join(f"{name} {value:,}" for name, value in declared.items()))
        lost = (declared.get("instructions") or int(totals.sum())) - int(totals.sum())
        if lost > 0:
            print(f"{lost:,} instructions after the last interval were not written")
        elif lost:
            more = human_count(-lost, "instruction")
            print(f"the intervals execute {more} more than the file declares")
        if declared.get("repetitions"):
            print("repetitions of REP instructions are not counted here; callgrind counts them")
    if piece.ignored:
        ignored = ", ".join(f"{count:,} {kind}" for kind, count in piece.ignored.items())
        print(f"lines that are not intervals: {ignored}")
    if piece.torn:
        print(TORN)
    return int(piece.torn)


def shared_points(
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="Intervals of several programs (`build bbv`).")
    ],
    signatures: Annotated[
        str,
        typer.Option(
            metavar="RUN|OVERLAY|untrained",
            help="Vectors of the intervals; untrained: mix of instructions and miss rates.",
        ),
    ] = UNTRAINED,
    points: Annotated[int, typer.Option(min=1, help="Number of points.")] = 30,
    out: Out = None,
    seed: Seed = SEED,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Choose intervals that represent all programs of a store, and estimate their CPI."""
    opened = Store(store)
    executions = reading.read_executions(opened)
    if len(executions.names) < 2:
        raise UsageError(
            "one program shares nothing", where=str(store), hint="build a store of several programs"
        )
    stems = [] if out is None else _stems(executions.names)
    if signatures == UNTRAINED:
        vectors = reading.untrained(opened, executions)
    else:
        if Path(signatures).is_dir():
            from tokmill.inference.embed import embed_store

            signatures = embed_store(signatures, opened.path, quiet=quiet).overlay
            say(f"{opened.path}: overlay {signatures}")
        vectors = VectorTable(opened, signatures).units(executions.records).astype(float) / 2048
    with Progress("programs", len(executions.names), unit="programs", quiet=quiet) as bar:
        shared = sharing.shared_points(executions, vectors, points, seed=seed, advance=bar.advance)
    if out is not None:
        for number, stem in enumerate(stems):
            write_points(out, stem, executions.records[shared.points], shared.weights[number])
    if not json:
        _print(shared, executions)
        return
    errors = _errors(shared)
    print_json(
        {
            "cpi_kind": executions.kind,
            "points": executions.records[shared.points].tolist(),
            "programs": [row._asdict() for row in shared.rows],
            "mean_error": {name: float(each.mean()) for name, each in errors.items()},
            "largest_error": {name: float(each.max()) for name, each in errors.items()},
            "speed_up": shared.speed_up,
            "speed_up_alone": shared.speed_up_alone,
            "left_out": executions.left_out,
        }
    )


def _stems(names: Sequence[str]) -> list[str]:
    # A name out of a store is a path of a trace at times.
    stems = [name.replace("/", "_") for name in names]
    if len(set(stems)) < len(stems):
        raise UsageError(
            f"files of two programs would have one name: {', '.join(names)}",
            hint="build them with other names: --program NAME",
        )
    return stems


def _errors(shared: Shared) -> dict[str, Floats]:
    return {
        name: np.abs([getattr(row, name) for row in shared.rows])
        for name in shared.rows[0]._fields[3:]
    }


def _print(shared: Shared, executions: Executions) -> None:
    errors = _errors(shared)
    print_table(
        ["program", "intervals", f"CPI, {executions.kind or 'given'}", "shared", "held out",
         "SimPoint", "constant"],
        [
            [row.program, row.intervals, f"{row.cpi:.4g}", *(f"{100 * e:+z.1f} %" for e in row[3:])]
            for row in shared.rows
        ]
        + [
            [what, "", "", *(f"{100 * float(of(each)):.1f} %" for each in errors.values())]
            for what, of in (("mean |error|", np.mean), ("largest", np.max))
        ],
    )  # fmt: skip
    points = human_count(len(shared.points), "point")
    programs = human_count(len(executions.names), "program")
    print(
        f"{points} for {programs}: accuracy {1 - float(errors['shared'].mean()):.1%}, speed-up "
        f"{shared.speed_up:,.0f}; SimPoint with as many for each program "
        f"{1 - float(errors['simpoint'].mean()):.1%}, {shared.speed_up_alone:,.0f}"
    )
    print("held out: only points of the other programs; no interval of the program was simulated")
    if executions.left_out:
        say(f"{human_count(executions.left_out, 'interval')} without instructions or CPI left out")


app = group_of(
    "bbv",
    "Execution profiles: basic block vectors, CPI and miss rates.",
    {"profile": profile, "check": check, "shared-points": shared_points},
)
