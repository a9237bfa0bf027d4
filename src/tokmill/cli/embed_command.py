"""`tokmill embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from tokmill.terminal.options import AsJson, At, Device, Quiet, RunFolder
from tokmill.terminal.output import print_json, say


def embed(
    run: RunFolder,
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="A store with the run's vocabularies.")
    ],
    pool: Annotated[
        str,
        typer.Option(
            metavar="auto|mean|last|signature",
            help="How the hidden states of a record become one vector; auto: as the run was "
            "trained, else mean.",
        ),
    ] = "auto",
    at: At = "last",
    device: Device = "auto",
    name: Annotated[
        str, typer.Option(help="Name of the overlay; by default pooling and digest of the model.")
    ] = "",
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Positions that are read at a time.", show_default="16384"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start the overlay over.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Make a vector of every record with a trained model: an overlay of the store."""
    from tokmill.inference import embed as module
    from tokmill.inference.vectors import BATCH_TOKENS

    vectors = module.embed_store(
        run,
        store,
        pool=cast(Any, pool),
        at=at,
        name=name,
        device=device,
        batch_tokens=batch_tokens or BATCH_TOKENS,
        fresh=fresh,
        quiet=quiet,
    )
    if vectors.empty:
        say(f"records without tokens, whose vectors are zeros: {vectors.empty:,}")
    if as_json:
        print_json(vectors)
        return
    place = f"{store}: overlay {vectors.overlay}"
    print(f"{place}: {vectors.records:,} vectors of {vectors.width:,}, step {vectors.step:,}")
