"""`tokmill bbv shared-points`: simulation points that several programs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from tokmill.base.errors import UsageError
from tokmill.base.progress import Progress, human_count
from tokmill.bbv.points import executions as reading
from tokmill.bbv.points import shared_points as sharing
from tokmill.bbv.points.choose_points import write_points
from tokmill.bbv.points.clusters import Floats, Ints
from tokmill.bbv.points.executions import Executions
from tokmill.bbv.points.shared_points import Shared
from tokmill.builds.mining.vector_table import VectorTable
from tokmill.store.store import Store
from tokmill.terminal.options import Json, Quiet
from tokmill.terminal.output import print_json, print_table, say

UNTRAINED = "untrained"
PUBLISHED = (
    "published, for another measure and other programs: 86.3 % accuracy at a speed-up of 7,143, "
    "14 points for 10 programs of SPEC (SemanticBBV, arXiv 2512.10231)"
)


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
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Write NAME.simpoints, NAME.weights here."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of everything that is random.")
    ] = 493575226,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Choose intervals that stand for all programs of a store, and estimate their CPI."""
    opened = Store(store)
    executions = reading.read_executions(opened)
    if len(executions.names) < 2:
        raise UsageError(
            "one program shares nothing", where=str(store), hint="build a store of several programs"
        )
    if signatures == UNTRAINED:
        vectors = reading.untrained(opened, executions)
    else:
        vectors = _trained(opened, signatures, executions.records, quiet)
    with Progress("programs", len(executions.names), unit="programs", quiet=quiet) as bar:
        shared = sharing.shared_points(executions, vectors, points, seed=seed, advance=bar.advance)
    if out is not None:
        _write(out, shared, executions)
    if json:
        _print_json(shared, executions)
    else:
        _print(shared, executions)


def _errors(shared: Shared) -> dict[str, Floats]:
    return {
        name: np.abs([getattr(row, name) for row in shared.rows])
        for name in shared.rows[0]._fields[3:]
    }


def _print_json(shared: Shared, executions: Executions) -> None:
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
    print(PUBLISHED)
    print("held out: points of the other programs alone; nothing of the program was simulated")
    if executions.left_out:
        say(f"{human_count(executions.left_out, 'interval')} without instructions or CPI left out")


def _trained(store: Store, signatures: str, records: Ints, quiet: bool) -> Floats:
    """Return signatures of records: of an overlay, an .npy file, or a run that makes them."""
    if Path(signatures).is_dir():
        from tokmill.inference.embed import embed_store

        signatures = embed_store(signatures, store.path, quiet=quiet).overlay
        say(f"{store.path}: overlay {signatures}")
    units: Floats = VectorTable(store, signatures).units(records).astype(np.float64) / 2048
    return units


def _write(out: Path, shared: Shared, executions: Executions) -> None:
    """Write the points, records of the store, and a file of weights a program."""
    for number, name in enumerate(executions.names):
        # A name out of a store is a path of a trace at times.
        stem = name.replace("/", "_")
        write_points(out, stem, executions.records[shared.points], shared.weights[number])
