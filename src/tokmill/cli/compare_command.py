"""`tokmill compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokmill.base.errors import UsageError, nearest
from tokmill.terminal.output import print_json, print_table, say

FORMATS = ("table", "csv", "latex", "json")


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
        str, typer.Option("--format", metavar="FORM", help="table, csv, latex or json.")
    ] = "table",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Compare runs; runs that differ only in seeds are one line with mean and 95 % interval."""
    from tokmill.report.comparison import comparison_table as tables
    from tokmill.report.comparison.compare_runs import compare as compare_runs

    if form not in FORMATS:
        raise UsageError(f"no format is called {form!r}", hint=nearest(form, FORMATS))
    comparison = compare_runs(paths, metric, at)
    if as_json or form == "json":
        print_json(tables.as_json(comparison))
    elif form == "table":
        headers, rows = tables.text_rows(comparison)
        print_table(headers, rows)
    else:
        sys.stdout.write(
            tables.write_csv(comparison) if form == "csv" else tables.write_latex(comparison)
        )
    for note in comparison.notes:
        say(f"note: {note}")
