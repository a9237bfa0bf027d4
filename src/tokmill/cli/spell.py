"""`tokmill spell`: programs as text in the spellings of other projects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tokmill.cli.output import print_json
from tokmill.cli.programs import (
    Json,
    Levels,
    Out,
    Programs,
    Quiet,
    Workers,
    list_refused,
    processes,
)


def spell(
    inputs: Programs,
    out: Out,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORM",
            help="ktrans (seven streams, JSON Lines) or asm2vec (text, a file a function).",
        ),
    ],
    min_instructions: Annotated[
        int, typer.Option(min=1, help="Leave out functions with fewer instructions.")
    ] = 1,
    levels: Levels = None,
    workers: Workers = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Write the functions of programs in the spelling of kTrans or asm2vec.

    Exit code 1 if a file that was named is refused.
    """
    from tokmill.x86.spelled_files import spell as write

    found = write(
        inputs,
        out,
        form,
        least=min_instructions,
        levels=levels.split(",") if levels else None,
        workers=processes(workers),
        quiet=quiet,
    )
    if json:
        print_json({"out": str(out), **msgspec.to_builtins(found)})
    else:
        list_refused(found.refused)
        print(
            f"{out}: {found.functions:,} functions of {found.programs:,} programs in "
            f"{found.files:,} files"
        )
    return 1 if {Path(path).name for path in inputs} & set(found.refused) else 0
