"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
At = Annotated[
    str, typer.Option(metavar="best|last|average|STEP", help="Which weights of the run.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Json = Annotated[bool, typer.Option("--json", help="Report as JSON.")]
FilesFrom = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LIST",
        help="Text file with an INPUT on each line; - for stdin. Lines with # are ignored, and "
        "relative paths are relative to the folder of the list. May be repeated.",
    ),
]
