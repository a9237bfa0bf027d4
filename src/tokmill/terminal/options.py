"""Options that several commands share, and where options are that a command does not have."""

from pathlib import Path
from typing import Annotated, Any

import typer

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
At = Annotated[str, typer.Option(metavar="best|last|STEP", help="Which weights of the run.")]
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

OTHER_NAMES = {
    **dict.fromkeys(["output", "output-dir", "output-file", "save-dir"], "-o PATH"),
    **dict.fromkeys(["use-params", "train-cfg", "model-cfg", "deepspeed-config"], "--config FILE"),
    "batch-size": "--preset memory|balanced|speed, which sets the size of blocks",
    "deepspeed": "--engine deepspeed",
    "max-length": "--max-tokens N",
    **dict.fromkeys(["limit-time", "max-minutes", "minutes", "timeout"], "--max-time 10m"),
    "merge-type": "--key function,level, which makes a dict; without it the file is a list",
    "min-length": "--min-tokens N",
    "num-workers": "--workers N",
    "sample-ratio": "--ratio 0.2",
    "save-frequency": "--windows-per-file N",
    "semi-hard": "--negatives semi-hard",
    "special-tokens": "--special TOKEN",
    "tokenizer-path": "--tokenizer PATH",
    "train-file": "--train FILE",
    "val-file": "--val FILE",
    "vocab-dir": "--vocab FOLDER",
}
"""An option of other programs → that of a command which has it."""
INPUTS = ("input", "input-dir", "input-file", "directory", "binary-dir", "cfg-dir", "data-dir")
"""Their options for what a command takes without an option."""
WINDOWS = (
    "`tokmill store export npz STORE --max-length 1024 --stride 512 --windows-per-file 10000 "
    "-o DIR` cuts windows"
)
SELECT = "`tokmill build select STORE --min-length 50 --max-length 2048 --ratio 0.2 -o NEW` chooses"
MINE = "`tokmill build mine STORE --what bbv --negatives semi-hard --margin 0.25 -o TRIPLETS` draws"
DICT = "`tokmill store export token-dicts STORE --key function,level -o FILE` writes a dict"
ELSEWHERE = {
    **dict.fromkeys(["stride", "padding", "save-frequency", "windows-per-file"], WINDOWS),
    **dict.fromkeys(["margin", "negatives", "semi-hard"], f"{MINE} triplets"),
    "max-length": f"{WINDOWS}; {SELECT} records",
    "merge-type": f"{DICT}, without --key a list",
    **dict.fromkeys(["min-length", "ratio", "sample-ratio", "unique"], f"{SELECT} records"),
}
"""An option that a command of data does not have → the command that does."""


def hint_of_option(option: str, context: Any) -> str:
    """Return where to find an option that a command, given by its context, does not have, or ""."""
    name = option.lstrip("-").replace("_", "-")
    parameters = context.command.params
    names = [opt for parameter in parameters for opt in parameter.opts]
    arguments = [p.metavar or p.name.upper() for p in parameters if p.param_type_name == "argument"]
    for form in (f"--{name}", OTHER_NAMES.get(name, "")):
        if form and form.split()[0] in names:
            return f"here it is {form}"
    if name in INPUTS and arguments:
        return f"it needs no option: {context.command_path} {' '.join(arguments)}"
    of_data = context.command_path.startswith(("tokmill build", "tokmill store export"))
    return ELSEWHERE.get(name, "") if of_data else ""
