"""`tokmill predict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tokmill.base.errors import UsageError
from tokmill.base.files import write_file
from tokmill.base.progress import human_count
from tokmill.terminal.options import AsJson, At, Device, Quiet, RunFolder
from tokmill.terminal.output import check_outputs, print_json, print_table, say

JSON_LINES, CSV = ".jsonl", ".csv"


def predict(
    run: RunFolder,
    input: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A store, or files of the kind that the run's store was built from, with labels "
            "or without; - reads lines of text from stdin.",
        ),
    ],
    lines: Annotated[
        bool,
        typer.Option(
            "--lines", help="Each line of INPUT is a text; of pairs two, with a tab between them."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write a .csv or .jsonl file."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    at: At = "last",
    batch: Annotated[
        int, typer.Option(min=0, help="Records at a time; 0: as many as in a step of the run.")
    ] = 0,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Print the class of each record with a run of the task `classify`, and all probabilities."""
    if out is not None and out.suffix not in (CSV, JSON_LINES):
        raise UsageError(
            "the predictions are written as .csv or .jsonl", where=str(out), hint="-o FILE.csv"
        )
    check_outputs({"-o": out}, [input])
    from tokmill.inference import predict as module
    from tokmill.report.comparison.comparison_table import csv_text

    found = module.predict(run, input, lines=lines, at=at, batch=batch, device=device, quiet=quiet)
    if as_json:
        about = {"run": str(run), "step": found.step, "classes": found.names}
        print_json({**about, "records": list(found.rows()), "notes": found.notes})
    if out is not None and out.suffix == JSON_LINES:
        write_file(out, msgspec.json.Encoder().encode_lines(list(found.rows())))
    heads = [*found.keys, "label", *(f"p({name})" for name in found.names)]
    cells = [
        [*(value for key, value in row.items() if key != "probabilities"),
         *row["probabilities"].values()]
        for row in found.rows()
    ]  # fmt: skip
    if out is not None and out.suffix == CSV:
        write_file(out, csv_text([heads, *cells]))
    elif as_csv:
        sys.stdout.write(csv_text([heads, *cells]))
    elif out is None and not as_json:
        print_table(heads, [[str(v) if isinstance(v, int) else v for v in row] for row in cells])
    if out is not None:
        say(f"{out}: {human_count(len(cells), 'record')}")
    for note in found.notes:
        say(f"note: {note}")
