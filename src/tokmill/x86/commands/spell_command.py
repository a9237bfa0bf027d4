"""`tokmill spell`: programs as text in the spelling of kTrans."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tokmill.base.progress import human_count
from tokmill.terminal.options import Json
from tokmill.x86.commands.program_options import Out, Programs, end, left_out_line, reads_programs


@reads_programs
def spell(
    programs: Programs,
    out: Out,
    min_instructions: Annotated[
        int, typer.Option(min=1, help="Leave out functions with fewer instructions.")
    ] = 1,
    json: Json = False,
) -> int:
    """Write the functions of programs as kTrans has them: seven streams, in JSON Lines.

    Exit code 1 if a named file is refused.
    """
    from tokmill.x86.tokens.spellings import spell as write

    found = write(programs.inputs, out, least=min_instructions, **programs.how)
    line = (
        f"{out}: {human_count(found.functions, 'function')} of "
        f"{human_count(found.programs, 'program')}"
    )
    report = {"out": str(out), **msgspec.to_builtins(found)}
    lines = [line, *left_out_line(found.left_out)]
    return end(programs.inputs, found.refused, lines, report, json=json)
