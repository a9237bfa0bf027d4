"""`tokmill model`: import and export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokmill.terminal.frame import AsJson, At, RunFolder, group_of
from tokmill.terminal.output import print_json, say


def import_(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A folder as transformers writes it, or a BERT of TensorFlow: its folder or "
            "bert_model.ckpt.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="RUN", help="Folder of the run."),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer, or a store or run with one, instead of that of the folder."
        ),
    ] = None,
    length: Annotated[
        int, typer.Option(help="Context length of the run; 0: that of the model, at most 4096.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a run of a public checkpoint (GPT-2, Llama, BERT, DistilBERT)."""
    from tokmill.training.runs.tensorflow.tensor_bundle import is_tensorflow

    if is_tensorflow(checkpoint):
        from tokmill.training.runs.tensorflow.google_bert_run import import_bert

        run = import_bert(checkpoint, out, tokenizer=tokenizer, length=length)
    else:
        from tokmill.training.runs.exchange import import_model

        run = import_model(checkpoint, out, tokenizer=tokenizer, length=length)
    if as_json:
        print_json({"run": str(run.path), "step": run.step, "notes": list(run.notes)})
        return
    say(f"{run.path}: a run at step 0, with the weights of {checkpoint}")
    for line in run.notes:
        say(line)
    say(f"next: tokmill train STORE --from {run.path} -o RUN2")


def export(
    run: RunFolder,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="FOLDER|FILE",
            help="A new folder; or a .pt file with the names of the run's own tensors (any run).",
        ),
    ],
    at: At = "last",
    license: Annotated[str, typer.Option(help="License for README.md, such as mit.")] = "unknown",
    as_json: AsJson = False,
) -> None:
    """Write the model of a run as a checkpoint of transformers, or its weights as a .pt file."""
    from tokmill.training.recipe.read_recipe import read_recipe
    from tokmill.training.runs import exchange

    written = exchange.export(run, out, at=at, license=license)
    whole = written.is_dir()
    if as_json:
        files = {"files": sorted(path.name for path in written.iterdir())} if whole else {}
        print_json({"folder" if whole else "file": str(written), **files})
    elif whole:
        reader = exchange.READERS[read_recipe(run)["task"]["kind"]]
        say(f"{written}: {reader}.from_pretrained({str(written)!r}) reads it")
    else:
        say(f"{written}: the weights of {run}")


app = group_of("model", "Read and write public checkpoints.", {"import": import_, "export": export})
