"""`tokmill cfg`: programs to graphs of their control flow."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.progress import human_count, human_time
from tokmill.terminal.frame import Json
from tokmill.x86.commands.program_options import (
    Programs,
    end,
    left_out_line,
    reads_programs,
)


@reads_programs
def cfg(
    programs: Programs,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            readable=False,
            help="Folder for one file per program; for one program also a file .parquet or .jsonl.",
        ),
    ],
    lifter: Annotated[str, typer.Option(help="native, or one of an installed package.")] = "native",
    json: Json = False,
) -> int:
    """Find functions, blocks and edges of programs; the same command again resumes.

    Exit code 1 if a named file is refused, or all files are.
    """
    from tokmill.x86.graphs.graph_files import LINES, SUFFIX
    from tokmill.x86.graphs.lifting import lift_files
    from tokmill.x86.image.program import READABLE

    inputs, how = programs
    # One program has a file, whose suffix may be misspelled; several have a folder, and that of
    # `coreutils-9.7` is not a suffix.
    many = out.exists() or len(inputs) > 1 or any(Path(one).is_dir() for one in inputs)
    if not many and out.suffix not in ("", SUFFIX, LINES):
        raise UsageError(
            f"no graph is written as {out.suffix}",
            where=str(out),
            hint=f"a file that ends in {SUFFIX} or {LINES}, or a folder that is there",
        )
    report = lift_files(inputs, out, lifter=lifter, **how)
    if not report.programs:
        raise TokmillError("there are no programs", where=", ".join(inputs), hint=READABLE)
    if report.programs == len(report.refusals) == 1:
        one = report.refusals[0]
        raise TokmillError(one.refused, where=inputs[0], hint=one.hint)
    refused = {one.program: one.refused for one in report.refusals}
    code = end(inputs, refused, _lines(out, report), report, json=json)
    return code if report.made + report.kept else 1


def _lines(out: Path, report: Any) -> list[str]:
    counts = [
        f"{human_count(report.made + report.kept, 'program')} ({report.kept:,} unchanged)",
        human_count(report.functions, "function"),
        human_count(report.blocks, "block"),
        human_count(report.instructions, "instruction"),
        human_count(report.edges, "edge"),
        human_time(report.seconds),
    ]
    lines = [f"{out}: {', '.join(counts)}"]
    for title, why in (("refused", report.refused), ("not followed", report.unresolved)):
        if why:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in why.items())
            lines.append(f"{title}: {reasons}")
    lines += left_out_line(report.left_out)
    for reason, number in report.cut_short.items():
        lines.append(f"not complete: {human_count(number, 'program')}: {reason}")
    return lines
