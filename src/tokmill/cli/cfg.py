"""`tokmill cfg`: programs to graphs of their control flow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tokmill.cli.output import print_json
from tokmill.errors import TokmillError
from tokmill.progress import human_time

MOST_LISTED = 20
KNOWN = "ELF and PE files for x86 are read"


def cfg(
    programs: Annotated[
        list[str],
        typer.Argument(
            metavar="BINARY…",
            help="ELF and PE files for x86, folders of them, saved_index.pkl, *_extract.pkl.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            readable=False,
            help="Folder that gets a file a program; for one program also a .parquet or .jsonl.",
        ),
    ],
    lifter: Annotated[str, typer.Option(help="native or angr.")] = "native",
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORM",
            help="parquet or jsonl; of one file its suffix says it.",
            show_default="parquet",
        ),
    ] = "",
    levels: Annotated[
        str | None,
        typer.Option(help="O0,O1,…: the levels of a saved_index.pkl, in the order of its lists."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes; 0: in this one.", show_default="one a core"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> int:
    """Find functions, blocks and edges of programs; the same command again continues.

    Exit code 1 if a file that was named is refused, or all of them are.
    """
    from tokmill.x86.lifting import lift_files

    report = lift_files(
        programs,
        out,
        lifter=lifter,
        form=form or out.suffix.removeprefix(".") or "parquet",
        levels=levels.split(",") if levels else None,
        workers=len(os.sched_getaffinity(0)) if workers is None else workers,
        quiet=quiet,
    )
    if not report.programs:
        raise TokmillError("there are no programs", where=", ".join(programs), hint=KNOWN)
    if report.programs == len(report.refusals) == 1:
        one = report.refusals[0]
        raise TokmillError(one.refused, where=programs[0], hint=one.hint)
    if json:
        print_json(report)
    else:
        for one in report.refusals[:MOST_LISTED]:
            print(f"{one.program}: refused, {one.refused}")
        print(
            f"{out}: {report.made + report.kept:,} programs ({report.kept:,} there already), "
            f"{report.functions:,} functions, {report.blocks:,} blocks, "
            f"{report.instructions:,} instructions, {report.edges:,} edges, "
            f"{human_time(report.seconds)}"
        )
        for title, counts in (("refused", report.refused), ("not followed", report.unresolved)):
            if counts:
                reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts.items())
                print(f"{title}: {reasons}")
        if report.others:
            shown = ", ".join(report.others[:MOST_LISTED])
            more = ", …" if len(report.others) > MOST_LISTED else ""
            kind = "graph" if len(report.others) == 1 else "graphs"
            print(
                f"{len(report.others):,} {kind} of programs that are not among the inputs: "
                f"{shown}{more}"
            )
    named = {Path(program).name for program in programs if not Path(program).is_dir()}
    refused = any(one.program in named for one in report.refusals)
    return 1 if refused or not report.made + report.kept else 0
