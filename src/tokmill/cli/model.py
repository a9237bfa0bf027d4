"""`tokmill model`: import and export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.cli.lazy import as_command, lazy_group
from tokmill.cli.output import print_json, say

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A checkpoint as transformers writes it.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="RUN", help="Folder of the run.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer, or a store or run that carries one, in place of the folder's own."
        ),
    ] = None,
    length: Annotated[
        int, typer.Option(help="Positions that the run sees; 0: the model's own, at most 4096.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Make a run of a public checkpoint (GPT-2, Llama, Mistral)."""
    exchange = plugins.require("tokmill.train.exchange")
    run = exchange.import_model(folder, out, tokenizer=tokenizer, length=length)
    if as_json:
        print_json({"run": str(run.path), "step": run.step})
        return
    say(f"{run.path}: a run at step 0, with the weights of {folder}")
    say(f"next: tokmill train STORE --from {run.path} -o RUN2")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="A new folder.")],
    at: Annotated[
        str, typer.Option(metavar="best|last|STEP", help="Which weights of the run.")
    ] = "last",
    as_json: Json = False,
) -> None:
    """Write the model of a run as a checkpoint that transformers reads."""
    folder = plugins.require("tokmill.train.exchange").export_model(run, out, at=at)
    if as_json:
        print_json({"folder": str(folder), "files": sorted(path.name for path in folder.iterdir())})
        return
    say(f"{folder}: AutoModelForCausalLM.from_pretrained({str(folder)!r}) reads it")


COMMANDS: dict[str, Callable[..., Any]] = {"import": import_, "export": export}


def load_command(name: str) -> Any:
    """Return a command of `tokmill model`."""
    function = COMMANDS.get(name)
    return as_command(function, name) if function else None


app = lazy_group(
    "model",
    "Read and write public checkpoints.",
    lambda: {name: (None, (f.__doc__ or "").splitlines()[0]) for name, f in COMMANDS.items()},
    load_command,
)
