"""`tokmill serve`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from tokmill import plugins
from tokmill.cli.options import At, Device, Quiet, RunFolder
from tokmill.cli.output import say


def serve(
    run: RunFolder,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every address of the machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 12345,
    pool: Annotated[
        str,
        typer.Option(
            metavar="auto|mean|last|attention",
            help="How hidden states become a vector; auto: as the run was trained, else mean.",
        ),
    ] = "auto",
    at: At = "last",
    device: Device = "auto",
    max_bytes: Annotated[int, typer.Option(min=1, help="Largest request.")] = 1 << 20,
    max_clients: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 256,
    seconds: Annotated[
        float, typer.Option(help="For the rest of a request, and for taking a reply.")
    ] = 30.0,
    idle: Annotated[float, typer.Option(help="Seconds until the next request begins.")] = 300.0,
    batch: Annotated[
        int, typer.Option(min=1, help="Requests that the model reads at a time.")
    ] = 64,
    quiet: Quiet = False,
) -> None:
    """Answer requests for vectors over TCP until it is stopped (Ctrl-C, SIGTERM).

    A request is a 4-byte big-endian length and so many bytes: machine code, or text in UTF-8. The
    reply is a length and a vector of float32. A length of 0 ends the connection.
    """
    serving = plugins.require("tokmill.inference.serving")
    embedder = plugins.require("tokmill.inference.embedder").Embedder(
        run, pool=pool, at=at, device=device
    )
    limits = serving.Limits(
        bytes=max_bytes, seconds=seconds, idle=idle, clients=max_clients, batch=batch
    )
    if not quiet:
        say(f"{run}: step {embedder.step:,}, vectors of {embedder.width}, {embedder.pool}")
    serving.serve(embedder, host, port, limits=limits, log=log_of(quiet))


def log_of(quiet: bool) -> Callable[[str], None]:
    """Return what takes lines of the log; with `quiet` only the address is printed."""

    def log(line: str) -> None:
        if line.startswith("listening"):
            print(line, flush=True)
        elif not quiet:
            say(line)

    return log
