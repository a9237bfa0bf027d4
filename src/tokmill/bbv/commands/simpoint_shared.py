"""`tokmill simpoint --signatures`: points that several programs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.base.files import inside, make_folder, write_file
from tokmill.base.progress import Progress, human_count
from tokmill.terminal.output import print_json, print_table, say

UNTRAINED = "untrained"
PUBLISHED = (
    "published, for another measure and other programs: 86.3 % accuracy at a speed-up of 7,143, "
    "14 points for 10 programs of SPEC (SemanticBBV, arXiv 2512.10231)"
)


def share(
    path: Path,
    named: str,
    points: int,
    seed: int,
    out: Path | None,
    quiet: bool,
    json: bool,
) -> None:
    """Choose points for all programs of a store, and print what they estimate."""
    from tokmill.bbv.points import executions
    from tokmill.bbv.points import shared_points as shared
    from tokmill.store.store import Store

    store = Store(path)
    known = executions.read_executions(store)
    if len(known.names) < 2:
        raise UsageError(
            "one program shares nothing", where=str(path), hint="build a store of several programs"
        )
    if named == UNTRAINED:
        vectors = executions.untrained(store, known)
    else:
        vectors = _trained(store, named, known.records, quiet)
    with Progress("programs", len(known.names), unit="programs", quiet=quiet) as bar:
        found = shared.shared_points(known, vectors, points, seed=seed, advance=bar.advance)
    if out is not None:
        _write(out, found, known)
    errors = {
        name: np.abs([getattr(row, name) for row in found.rows])
        for name in found.rows[0]._fields[3:]
    }
    if json:
        print_json(
            {
                "cpi_kind": known.kind,
                "points": known.records[found.points].tolist(),
                "programs": [row._asdict() for row in found.rows],
                "mean_error": {name: float(each.mean()) for name, each in errors.items()},
                "largest_error": {name: float(each.max()) for name, each in errors.items()},
                "speed_up": found.speed_up,
                "speed_up_alone": found.speed_up_alone,
                "left_out": known.left_out,
            }
        )
        return
    print_table(
        ["program", "intervals", f"CPI, {known.kind or 'given'}", "shared", "held out",
         "SimPoint", "constant"],
        [
            [row.program, row.intervals, f"{row.cpi:.4g}", *(f"{100 * e:+z.1f} %" for e in row[3:])]
            for row in found.rows
        ]
        + [
            [what, "", "", *(f"{100 * float(of(each)):.1f} %" for each in errors.values())]
            for what, of in (("mean |error|", np.mean), ("largest", np.max))
        ],
    )  # fmt: skip
    print(
        f"{human_count(len(found.points), 'point')} for {human_count(len(known.names), 'program')}:"
        f" accuracy {1 - float(errors['shared'].mean()):.1%}, speed-up {found.speed_up:,.0f}; "
        f"SimPoint with as many for each program {1 - float(errors['simpoint'].mean()):.1%}, "
        f"{found.speed_up_alone:,.0f}"
    )
    print(PUBLISHED)
    print("held out: points of the other programs alone; nothing of the program was simulated")
    if known.left_out:
        say(f"{human_count(known.left_out, 'interval')} without instructions or CPI left out")


def _trained(store: Any, named: str, records: np.ndarray, quiet: bool) -> np.ndarray:
    """Return signatures of records: of an overlay, an .npy file, or a run that makes them."""
    if Path(named).is_dir():
        from tokmill.inference.embed import embed

        made = embed(named, store.path, quiet=quiet)
        named = made.overlay
        say(f"{store.path}: overlay {named}")
    from tokmill.builds.mining.vector_table import VectorTable

    table = VectorTable(store, named)
    units: np.ndarray = table.units(records).astype(np.float64) / 2048
    return units


def _write(out: Path, found: Any, known: Any) -> None:
    """Write the points, records of the store, and a file of weights a program."""
    from tokmill.bbv.points import simpoint_files as files

    make_folder(out)
    for number, name in enumerate(known.names):
        # A name out of a store is a path of a trace at times.
        stem = name.replace("/", "_")
        for end, text in files.written(known.records[found.points], found.weights[number]).items():
            write_file(inside(out, stem + end), text)
