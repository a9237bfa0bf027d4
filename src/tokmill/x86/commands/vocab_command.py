"""`tokmill vocab`: make, convert and prune vocabularies of x86 columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tokmill.base.errors import UsageError
from tokmill.base.progress import human_count, human_share
from tokmill.terminal.options import Json
from tokmill.terminal.output import print_table
from tokmill.x86.commands import vocab_lists
from tokmill.x86.commands.program_options import Out, Programs, end, left_out_line, reads_programs

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Make, convert and prune vocabularies of x86 code.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@reads_programs
def build(
    programs: Programs,
    kind: Annotated[str, typer.Argument(metavar="x86", help="What the inputs are: x86.")],
    out: Out,
    rules: Annotated[str, typer.Option(help="tokmill or semanticbbv.")] = "tokmill",
    min_count: Annotated[
        int, typer.Option(min=1, help="Leave out tokens that occur less often than this.")
    ] = 1,
    closed: Annotated[
        bool,
        typer.Option(
            "--closed", help="All tokens that the rules tokmill can make; no INPUT needed."
        ),
    ] = False,
    unknown_on: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT", help="Report the unknown tokens of this. May be repeated."),
    ] = None,
    json: Json = False,
) -> int:
    """Count the tokens of programs, and write the vocabularies of the six columns.

    Exit code 1 if a named file is refused.
    """
    from tokmill.x86.tokens.vocabularies import vocabulary
    from tokmill.x86.tokens.vocabularies.count import count_programs
    from tokmill.x86.tokens.vocabularies.count import unknown as unknown_in
    from tokmill.x86.tokens.vocabularies.vocabulary_changes import with_counts
    from tokmill.x86.tokens.vocabularies.vocabulary_files import check_target, write_vocabularies

    if kind != "x86":
        raise UsageError(f"vocabularies of {kind!r} are not built here", hint=_elsewhere(kind))
    if closed and (rules != "tokmill" or min_count > 1):
        raise UsageError(
            "--closed means all tokens of the rules tokmill",
            hint="leave out --rules and --min-count, or --closed",
        )
    inputs, how = programs
    if not inputs and not closed:
        raise UsageError("no program is named", hint="give programs, or --closed")
    check_target(out, rules)
    counted = count_programs(inputs, rules, **how) if inputs else None
    counts = counted.counts if counted else {}
    if closed:
        made = vocabulary.closed()
        made = with_counts(made, counts) if counted else made
    else:
        made = vocabulary.counted([counts], rules, min_count)
    how |= {"title": "unknown", "levels": None}
    held_out = count_programs(unknown_on, rules, **how) if unknown_on else None
    write_vocabularies(out, made)
    own = unknown_in(made, counts) if counted else []
    others = unknown_in(made, held_out.counts) if held_out else []
    refused = (counted.refused if counted else {}) | (held_out.refused if held_out else {})
    report = {
        "vocabulary": str(out),
        "rules": rules,
        "programs": counted.programs if counted else 0,
        "instructions": counted.instructions if counted else 0,
        "columns": {column: len(tokens) for column, tokens in made.items()},
        "counted": {one.column: msgspec.structs.asdict(one) for one in own},
        "unknown_on": {one.column: msgspec.structs.asdict(one) for one in others},
        "refused": refused,
        "left_out": counted.left_out if counted else {},
    }
    lines = []
    if counted:
        lines = [
            f"{out}: {human_count(counted.programs, 'program')}, "
            f"{human_count(counted.instructions, 'instruction')}, rules {rules}",
            *left_out_line(counted.left_out),
        ]
    code = end([*inputs, *(unknown_on or [])], refused, lines, report, json=json)
    if not json:
        _print_columns(made, own, others)
    return code


app.command()(vocab_lists.export)
app.command("import")(vocab_lists.import_)
app.command()(vocab_lists.prune)
app.command()(vocab_lists.compress)


@app.command()
@reads_programs
def instructions(
    programs: Programs,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", readable=False, help="A .csv, .jsonl or .parquet file."),
    ],
    json: Json = False,
) -> int:
    """Write the distinct instructions of programs: text, bytes, counts; the most frequent first.

    Exit code 1 if a named file is refused.
    """
    from tokmill.x86.tokens.instructions import collect

    found = collect(programs.inputs, out, **programs.how)
    line = (
        f"{out}: {found.encodings:,} distinct ones of "
        f"{human_count(found.instructions, 'instruction')} of "
        f"{human_count(found.programs, 'program')}"
    )
    report = {"file": str(out), **msgspec.to_builtins(found)}
    lines = [line, *left_out_line(found.left_out)]
    return end(programs.inputs, found.refused, lines, report, json=json)


def _elsewhere(kind: str) -> str:
    text = kind in ("text", "jsonl", "parquet")
    return "`tokmill tokenizer train` makes those of text" if text else "vocab build x86 INPUT…"


def _print_columns(made: Mapping[str, Any], own: list[Any], others: list[Any]) -> None:
    headers = ["column", "tokens"]
    rows: list[list[Any]] = [[column, len(tokens)] for column, tokens in made.items()]
    for found, title in ((own, ""), (others, " elsewhere")):
        if found:
            headers += [f"occurrences{title}", f"unknown{title}", "share"]
            for row, one in zip(rows, found, strict=True):
                row += [one.tokens, one.unknown, human_share(one.share, 4)]
    print_table(headers, rows)
    for one in others:
        if one.examples:
            shown = ", ".join(f"{token} {count:,}" for token, count in one.examples)
            print(f"unknown elsewhere, {one.column}: {human_count(one.kinds, 'token')}: {shown}")
