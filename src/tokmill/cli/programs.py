"""Options and reports of the commands that read programs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.builds.scan import FolderOptions, in_words
from tokmill.cli.output import print_json

MOST_LISTED = 20
PROGRAMS = (
    "ELF and PE files for x86, folders of them, graphs of `tokmill cfg`, saved_index.pkl, "
    "*_extract.pkl."
)

Programs = Annotated[list[str], typer.Argument(metavar="INPUT…", help=PROGRAMS)]
Levels = Annotated[
    str | None,
    typer.Option(help="O0,O1,…: the levels of a saved_index.pkl, in the order of its lists."),
]
Workers = Annotated[
    int | None,
    typer.Option(min=0, help="Processes; 0: in this one.", show_default="all processors"),
]
Out = Annotated[Path, typer.Option("-o", "--out", readable=False, help="Folder to write.")]
Suffix = Annotated[
    list[str] | None,
    typer.Option(help="In folders, read only files with this suffix."),
]
Glob = Annotated[
    list[str] | None,
    typer.Option(help="In folders, read only files that match, as 'bin/**'; '!…' excludes."),
]


def processes(asked: int | None) -> int:
    """Return the number of processes; by default that of the processors."""
    return len(os.sched_getaffinity(0)) if asked is None else asked


def choice(suffix: list[str] | None, glob: list[str] | None) -> FolderOptions:
    """Return the choice of files in folders by `--suffix` and `--glob`."""
    return FolderOptions(suffix=tuple(suffix or ()), glob=tuple(glob or ()))


def left_out_line(left_out: Mapping[str, int]) -> list[str]:
    """Return a line about the files in folders that were not read, if there are any."""
    return [f"left out of the folders: {in_words(left_out)}"] if left_out else []


def listed(levels: str | None) -> list[str] | None:
    """Return the optimisation levels of `--levels`."""
    return levels.split(",") if levels else None


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
            print(f"{name}: refused, {why}")
        if len(refused) > MOST_LISTED:
            print(f"… {len(refused) - MOST_LISTED:,} more refused")
        for line in lines:
            print(line)
    named = {Path(path).name for path in inputs if not Path(path).is_dir()}
    return 1 if named & set(refused) else 0
