"""`tokmill vocab`: make, convert and compress vocabularies of x86 columns."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tokmill.base.errors import UsageError
from tokmill.base.progress import human_count, human_share
from tokmill.terminal.frame import Json
from tokmill.terminal.output import print_table
from tokmill.x86.commands import vocab_lists
from tokmill.x86.commands.program_options import Out, Programs, end, left_out_line, reads_programs

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Make, convert and compress vocabularies of x86 code.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@reads_programs
def build(
    programs: Programs,
    kind: Annotated[str, typer.Argument(metavar="x86", help="Kind of the inputs: x86.")],
    out: Out,
    rules: Annotated[str, typer.Option(help="tokmill or semanticbbv.")] = "tokmill",
    min_count: Annotated[
        int, typer.Option(min=1, help="Leave out tokens that occur less often than this.")
    ] = 1,
    json: Json = False,
) -> int:
    """Count the tokens of programs, and write the vocabularies of the six columns.

    Exit code 1 if a named file is refused.
    """
    from tokmill.x86.tokens.vocabularies import vocabulary
    from tokmill.x86.tokens.vocabularies.count import count_programs
    from tokmill.x86.tokens.vocabularies.vocabulary import check_target, write_vocabularies

    if kind != "x86":
        raise UsageError(
            f"vocabularies of {kind!r} are not built here",
            hint="vocab build x86 INPUT…; `tokmill tokenizer train` makes those of text",
        )
    inputs, how = programs
    if not inputs:
        raise UsageError("no program is named", hint="vocab build x86 INPUT…")
    check_target(out, rules)
    counted = count_programs(inputs, rules, **how)
    lists = vocabulary.counted(counted.counts, rules, min_count)
    write_vocabularies(out, lists)
    rows = []
    for column, tokens in lists.items():
        total = sum(counted.counts[column].values())
        unknown = total - sum(tokens.counts or ())
        rows.append([column, len(tokens), total, unknown, human_share(unknown / (total or 1), 4)])
    report = {
        "vocabulary": str(out),
        "rules": rules,
        "programs": counted.programs,
        "instructions": counted.instructions,
        "columns": {row[0]: row[1] for row in rows},
        "counted": {row[0]: {"tokens": row[2], "unknown": row[3]} for row in rows},
        "refused": counted.refused,
        "left_out": counted.left_out,
    }
    lines = [
        f"{out}: {human_count(counted.programs, 'program')}, "
        f"{human_count(counted.instructions, 'instruction')}, rules {rules}",
        *left_out_line(counted.left_out),
    ]
    code = end(inputs, counted.refused, lines, report, json=json)
    if not json:
        print_table(["column", "tokens", "occurrences", "unknown", "share"], rows)
    return code


app.command()(vocab_lists.export)
app.command("import")(vocab_lists.import_)
app.command()(vocab_lists.compress)


@app.command()
@reads_programs
def instructions(
    programs: Programs,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", readable=False, help="A .csv file."),
    ],
    json: Json = False,
) -> int:
    """Write the distinct instructions of programs: text, bytes, counts; the most frequent first.

    Exit code 1 if a named file is refused.
    """
    from tokmill.x86.tokens.instructions import collect

    counted = collect(programs.inputs, out, **programs.how)
    line = (
        f"{out}: {counted.encodings:,} distinct ones of "
        f"{human_count(counted.instructions, 'instruction')} of "
        f"{human_count(counted.programs, 'program')}"
    )
    report = {"file": str(out), **msgspec.to_builtins(counted)}
    lines = [line, *left_out_line(counted.left_out)]
    return end(programs.inputs, counted.refused, lines, report, json=json)
