"""`tokmill predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokmill.base.errors import UsageError
from tokmill.base.files import read_file, write_file
from tokmill.terminal.options import AsJson, At, Device, Quiet, RunFolder
from tokmill.terminal.output import check_outputs, print_json, print_table, say

INPUT = (
    "A store; a file of the kind that the run's store was built from, with labels or without; or "
    "-, for lines of text from stdin, of pairs with a tab between the two."
)


def predict(
    run: RunFolder,
    input: Annotated[Path, typer.Argument(metavar="INPUT", help=INPUT)],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE.csv", help="Write CSV."),
    ] = None,
    at: At = "last",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Print the class of each record with a run of the task `classify`, and all probabilities."""
    if out is not None and out.suffix != ".csv":
        raise UsageError("what is written is CSV", where=str(out), hint="-o FILE.csv, or --json")
    check_outputs({"-o": out}, [input])
    head = read_file(out, 10) if out is not None and out.is_file() else b""
    if head and not head.startswith(b"record,"):
        hint = "move it, or name another file"
        raise UsageError("it holds no answers of `predict`", where=str(out), hint=hint)
    from tokmill.inference import predict as module
    from tokmill.report.comparison.comparison_table import csv_text

    found = module.predict(run, input, at=at, device=device, quiet=quiet)
    rows = list(found.rows())
    heads = [*found.keys, "label", *(f"p({name})" for name in found.names)]
    cells = [[*row.values()][:-1] + [*row["probabilities"].values()] for row in rows]
    if out is not None:
        write_file(out, csv_text([heads, *cells]))
        say(f"{out}: written")
    if as_json:
        about = {"run": str(run), "step": found.step, "classes": found.names}
        print_json({**about, "records": rows, "notes": found.notes})
    elif out is None:
        print_table(heads, cells)
    for note in found.notes:
        say(f"note: {note}")
