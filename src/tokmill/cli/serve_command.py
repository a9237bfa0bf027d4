"""`tokmill serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from tokmill.terminal.options import At, Device, Quiet, RunFolder
from tokmill.terminal.output import say


def serve(
    run: RunFolder,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every address of the machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    pool: Annotated[
        str,
        typer.Option(
            metavar="auto|mean|last|signature",
            help="How hidden states become a vector; auto: as the run was trained, else mean.",
        ),
    ] = "auto",
    at: At = "last",
    device: Device = "auto",
    max_bytes: Annotated[int, typer.Option(min=1, help="Largest request.")] = 1 << 20,
    max_inputs: Annotated[int, typer.Option(min=1, help="Most sequences of a request.")] = 2048,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Bytes of all requests that wait for their vectors.")
    ] = 256 << 20,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="For a request to come, and for a reply to be taken.")
    ] = 30.0,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Positions that the model reads at a time.")
    ] = 4096,
    quiet: Quiet = False,
) -> None:
    """Answer requests for vectors over HTTP until it is stopped (Ctrl-C, SIGTERM).

    POST /embed with {"inputs": ["…"]}: texts, or machine code in hexadecimal.
    """
    from tokmill.inference import serving
    from tokmill.inference.embedder import Embedder

    embedder = Embedder(run, pool=pool, at=at, device=device, batch_tokens=batch_tokens)
    if not quiet:
        say(f"{run}: step {embedder.step:,}, vectors of {embedder.width}, {embedder.pool}")
    limits = serving.Limits(max_bytes, max_inputs, max_waiting, seconds)
    # With --quiet too: port 0 is known from this line alone.
    requests = serving.serve(
        embedder, host, port, limits=limits, log=lambda line: print(line, flush=True)
    )
    if not quiet:
        say(f"stopped after {requests:,} requests")
