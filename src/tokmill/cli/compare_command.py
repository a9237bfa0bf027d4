"""`tokmill compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokmill.base.errors import check_name
from tokmill.terminal.options import AsJson
from tokmill.terminal.output import print_json, print_table, say

FORMATS = ("table", "latex")


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Runs, and folders of runs.")],
    metric: Annotated[
        str,
        typer.Option(help="A name in metrics.jsonl.", show_default="val_loss, or else loss"),
    ] = "",
    at: Annotated[
        str,
        typer.Option(
            metavar="best|last|STEP", help="The value at a step, or the best of each run."
        ),
    ] = "last",
    form: Annotated[
        str, typer.Option("--format", metavar="FORM", help="table or latex.")
    ] = "table",
    as_json: AsJson = False,
) -> None:
    """Compare runs; runs that differ only in seeds are one line with mean and 95 % interval."""
    from tokmill.report.comparison import comparison_table as tables
    from tokmill.report.comparison.compare_runs import compare as compare_runs

    check_name("no format is", form, FORMATS)
    comparison = compare_runs(paths, metric, at)
    if as_json:
        print_json(tables.as_json(comparison))
    elif form == "latex":
        sys.stdout.write(tables.write_latex(comparison))
    else:
        headers, rows = tables.text_rows(comparison)
        print_table(headers, rows)
    for note in comparison.notes:
        say(f"note: {note}")
