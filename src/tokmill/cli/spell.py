"""`tokmill spell`: programs as text in the spellings of other projects."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tokmill.cli.options import Json
from tokmill.cli.programs import Out, Programs, end, left_out_line, reads_programs
from tokmill.progress import human_count


@reads_programs
def spell(
    programs: Programs,
    out: Out,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORM",
            help="ktrans (seven streams, JSON Lines) or asm2vec (text, a file per function).",
        ),
    ],
    min_instructions: Annotated[
        int, typer.Option(min=1, help="Leave out functions with fewer instructions.")
    ] = 1,
    json: Json = False,
) -> int:
    """Write the functions of programs in the spelling of kTrans or asm2vec.

    Exit code 1 if a named file is refused.
    """
    from tokmill.x86.tokens.spelled_files import spell as write

    found = write(programs.inputs, out, form, least=min_instructions, **programs.how)
    line = (
        f"{out}: {human_count(found.functions, 'function')} of "
        f"{human_count(found.programs, 'program')} in {human_count(found.files, 'file')}"
    )
    report = {"out": str(out), **msgspec.to_builtins(found)}
    lines = [line, *left_out_line(found.left_out)]
    return end(programs.inputs, found.refused, lines, report, json=json)
