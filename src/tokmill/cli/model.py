"""`tokmill model`: import and export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.cli.lazy import as_command, lazy_group
from tokmill.cli.output import print_json, say
from tokmill.errors import UsageError

FILES = (".pth", ".safetensors", ".pt")
"""Endings of a name that asks for one file."""
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def import_(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A folder as transformers writes it, a .pth or .safetensors file of RWKV-7, or "
            "a BERT of TensorFlow: its folder or bert_model.ckpt.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="RUN",
            help="Folder of the run; from TensorFlow a folder for transformers.",
        ),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer, or a store or run that carries one, in place of the folder's own."
        ),
    ] = None,
    length: Annotated[
        int, typer.Option(help="Positions that the run sees; 0: the model's own, at most 4096.")
    ] = 0,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Check the checksums of a checkpoint of TensorFlow."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Make a run of a public checkpoint (GPT-2, Llama, RWKV-7, …); convert BERT of TensorFlow."""
    if plugins.require("tokmill.training.runs.find_bundle").is_tensorflow(checkpoint):
        if tokenizer is not None or length:
            raise UsageError(
                "--tokenizer and --length are of a run, and a BERT of TensorFlow becomes a folder "
                "for transformers",
                where=str(checkpoint),
                hint="leave them out",
            )
        import_bert(checkpoint, out, verify, as_json)
        return
    if not verify:
        raise UsageError(
            "--no-verify is for checkpoints of TensorFlow, and this is none",
            where=str(checkpoint),
            hint="leave it out",
        )
    if checkpoint.is_file() or (checkpoint.suffix in FILES and not checkpoint.is_dir()):
        import_ = plugins.require("tokmill.training.runs.weight_files").import_file
    else:
        import_ = plugins.require("tokmill.training.runs.exchange").import_model
    run = import_(checkpoint, out, tokenizer=tokenizer, length=length)
    if as_json:
        print_json({"run": str(run.path), "step": run.step})
        return
    say(f"{run.path}: a run at step 0, with the weights of {checkpoint}")
    say(f"next: tokmill train STORE --from {run.path} -o RUN2")


def import_bert(checkpoint: Path, out: Path, verify: bool, as_json: bool) -> None:
    """Read a BERT of TensorFlow into a folder, and say what it is."""
    found = plugins.require("tokmill.training.runs.google_bert").convert_bert(
        checkpoint, out, verify=verify
    )
    if as_json:
        print_json({
            "folder": str(out), "run": None, "tensors": len(found.tensors),
            "left_out": len(found.left_out), "words": len(found.words), "verified": verify,
        })  # fmt: skip
        return
    say(f"{out}: the {len(found.tensors)} tensors of {checkpoint}")
    if found.left_out:
        say(f"left out: {len(found.left_out)} variables of the optimiser ({found.left_out[0]}, …)")
    if not found.words:
        say("there is no vocab.txt beside the checkpoint: the folder has no tokenizer")
    if not verify:
        say("checksums were not checked")
    say(f"next: BertForPreTraining.from_pretrained({str(out)!r}) of transformers reads it")
    say("it is no run yet: tokmill has no task that an encoder is imported for")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="FOLDER|FILE",
            help="A new folder; or a file: .pth and .safetensors with RWKV-7's official names, .pt "
            "with the run's own (any run).",
        ),
    ],
    at: Annotated[
        str, typer.Option(metavar="best|last|average|STEP", help="Which weights of the run.")
    ] = "last",
    as_json: Json = False,
) -> None:
    """Write the model of a run as a checkpoint that transformers or RWKV's programs read."""
    if out.suffix in FILES:
        file = plugins.require("tokmill.training.runs.weight_files").export_file(run, out, at=at)
        if as_json:
            print_json({"file": str(file)})
        else:
            say(f"{file}: the weights of {run}")
        return
    folder = plugins.require("tokmill.training.runs.exchange").export_model(run, out, at=at)
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
