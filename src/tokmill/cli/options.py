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
