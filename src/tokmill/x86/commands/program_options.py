"""Options and reports of the commands that read programs."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tokmill.builds.scan import FolderOptions, in_words, with_lists
from tokmill.terminal.frame import FilesFrom, Quiet
from tokmill.terminal.output import print_json, print_line

MOST_LISTED = 20
Workers = Annotated[
    int | None,
    typer.Option(min=0, help="Worker processes; 0: none.", show_default="all processors"),
]
Out = Annotated[Path, typer.Option("-o", "--out", readable=False, help="Folder to write.")]
Suffix = Annotated[
    list[str] | None,
    typer.Option(help="In folders, read only files with this suffix."),
]
Glob = Annotated[
    list[str] | None,
    typer.Option(help="In folders, read only files that match, such as 'bin/**'; '!…' excludes."),
]


class Programs(NamedTuple):
    """The programs that a command reads."""

    inputs: list[str]
    how: dict[str, Any]
    """Arguments of functions that read programs: levels, workers, choice, quiet."""


def reads_programs(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command INPUT arguments and the options by which programs are read.

    They become its first argument, `Programs`. In its help they are before the last option.
    """

    def command(
        inputs: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="INPUT…",
                help="ELF and PE files for x86, folders of them, saved_index.pkl, *_extract.pkl. "
                "Commands other than cfg also read its graphs.",
            ),
        ] = None,
        files_from: FilesFrom = None,
        levels: Annotated[
            str | None,
            typer.Option(help="O0,O1,…: levels of a saved_index.pkl, in the order of its lists."),
        ] = None,
        workers: Workers = None,
        suffix: Suffix = None,
        glob: Glob = None,
        quiet: Quiet = False,
        **own: Any,
    ) -> int:
        how = {
            "levels": levels.split(",") if levels else None,
            "workers": len(os.sched_getaffinity(0)) if workers is None else workers,
            "choice": FolderOptions(suffix=tuple(suffix or ()), glob=tuple(glob or ())),
            "quiet": quiet,
        }
        return function(Programs(with_lists(inputs, files_from), how), **own)

    shared = inspect.signature(command, eval_str=True).parameters.values()
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    parameters = [
        one.replace(kind=one.KEYWORD_ONLY)
        for one in (*own[1:-1], *shared, own[-1])
        if one.kind is not one.VAR_KEYWORD
    ]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def left_out_line(left_out: Mapping[str, int]) -> list[str]:
    """Return a line about the files in folders that were not read, if there are any."""
    return [f"left out of the folders: {in_words(left_out)}"] if left_out else []


def end(
    inputs: Iterable[str],
    refused: Mapping[str, str],
    lines: Iterable[str],
    report: Any,
    *,
    json: bool,
) -> int:
    """Print the report as JSON, or the refused programs and then the lines.

    Returns the exit code: 1 if a named file is among `refused` (program → why).
    """
    if json:
        print_json(report)
    else:
        for name, why in list(refused.items())[:MOST_LISTED]:
            print_line(f"{name}: refused, {why}")
        if len(refused) > MOST_LISTED:
            print(f"… {len(refused) - MOST_LISTED:,} more refused")
        for line in lines:
            print_line(line)
    named = {Path(path).name for path in inputs if not Path(path).is_dir()}
    return 1 if named & set(refused) else 0
