"""`tokmill eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokmill import plugins
from tokmill.cli.output import print_json, print_table


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="A store with the run's vocabulary.")
    ],
    at: Annotated[
        str, typer.Option(metavar="best|last|STEP", help="Which weights of the run.")
    ] = "last",
    rows: Annotated[
        int, typer.Option(metavar="N", min=0, help="Evenly spaced rows; 0: every token once.")
    ] = 0,
    batch: Annotated[
        int, typer.Option(min=0, help="Rows at a time; 0: as many as in a step of the run.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    partial: Annotated[
        bool, typer.Option("--partial", help="Take a store that is not complete.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure the loss of a run on a store: nats a token, perplexity, bits a byte."""
    module = plugins.require("tokmill.train.evaluate")
    found = module.evaluate(
        run, store, at=at, rows=rows, batch=batch, device=device, partial=partial
    )
    if as_json:
        print_json(found)
    else:
        shown = {
            k: f"{v:.4f}" if isinstance(v, float) else f"{v:,}"
            for k, v in found.items()
            if k not in ("run", "store", "fingerprint")
        }
        print_table(["measure", "value"], [[name, value] for name, value in shown.items()])
