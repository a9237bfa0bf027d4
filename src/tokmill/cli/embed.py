"""`tokmill embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokmill import plugins
from tokmill.cli.output import print_json, say


def embed(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="A store with the run's vocabularies.")
    ],
    pool: Annotated[
        str,
        typer.Option(
            metavar="mean|last|attention",
            help="How the hidden states of a record become one vector.",
        ),
    ] = "mean",
    npy: Annotated[
        Path | None,
        typer.Option(
            metavar="F",
            help="Write this .npy file alone, float32, and leave the store as it is. One that is "
            "there stays, unless --fresh is given.",
        ),
    ] = None,
    at: Annotated[
        str, typer.Option(metavar="best|last|average|STEP", help="Which weights of the run.")
    ] = "last",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    name: Annotated[
        str,
        typer.Option(help="Name of the overlay; if not given, pooling and digest of the model."),
    ] = "",
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Positions that are read at a time.")
    ] = 16_384,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start the overlay over, or write over the file.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make a vector of every record with a trained model: an overlay of the store, or a file."""
    module = plugins.require("tokmill.inference.embed")
    found = module.embed(
        run,
        store,
        pool=pool,
        at=at,
        name=name,
        npy=npy,
        device=device,
        batch_tokens=batch_tokens,
        fresh=fresh,
        quiet=quiet,
    )
    if found.empty:
        say(f"{found.empty:,} records without tokens have zeros")
    if as_json:
        print_json(found)
        return
    place = found.file or f"{store}: overlay {found.overlay}"
    print(f"{place}: {found.records:,} vectors of {found.width:,}, step {found.step:,}")
