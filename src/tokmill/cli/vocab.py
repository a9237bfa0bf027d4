"""`tokmill vocab`: count, convert, prune and merge vocabularies of x86 columns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tokmill.cli.output import print_json, print_table, say
from tokmill.errors import UsageError, nearest
from tokmill.files import make_folder, write_file

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Make, convert, prune and merge vocabularies of x86 code.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

MOST_LISTED = 20
MAP = "ids.json"
FORMATS = {"txt": "a token a line", "pkl": "{token: frequency}", "json": "the frozen form"}

Programs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT…",
        help="ELF and PE files for x86, folders of them, graphs of `tokmill cfg`, "
        "saved_index.pkl, *_extract.pkl.",
    ),
]
Levels = Annotated[
    str | None,
    typer.Option(help="O0,O1,…: the levels of a saved_index.pkl, in the order of its lists."),
]
Workers = Annotated[
    int | None,
    typer.Option(min=0, help="Processes; 0: in this one.", show_default="all processors"),
]
Out = Annotated[Path, typer.Option("-o", "--out", readable=False, help="Folder to write.")]
Lists = Annotated[
    Path,
    typer.Argument(metavar="VOCAB|STORE", readable=False, help="A folder of lists, or a store."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", help="Report as JSON.")]


@app.command()
def build(
    kind: Annotated[str, typer.Argument(metavar="x86", help="What the inputs are: x86.")],
    out: Out,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT…",
            help="ELF and PE files for x86, folders of them, graphs of `tokmill cfg`, "
            "saved_index.pkl, *_extract.pkl.",
        ),
    ] = None,
    rules: Annotated[str, typer.Option(help="tokmill or semanticbbv.")] = "tokmill",
    min_count: Annotated[
        int, typer.Option(min=1, help="Leave out tokens that stood less often than this.")
    ] = 1,
    closed: Annotated[
        bool,
        typer.Option(
            "--closed", help="All tokens that the rules tokmill can make; no INPUT needed."
        ),
    ] = False,
    unknown_on: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT", help="Report what is unknown of this. May be repeated."),
    ] = None,
    levels: Levels = None,
    workers: Workers = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Count the tokens of programs, and write the vocabularies of the six columns.

    Exit code 1 if a file that was named is refused.
    """
    from tokmill.x86 import vocabulary
    from tokmill.x86.count import count_programs
    from tokmill.x86.count import unknown as unknown_in
    from tokmill.x86.vocabulary_changes import with_counts
    from tokmill.x86.vocabulary_files import write_vocabularies

    if kind != "x86":
        raise UsageError(f"vocabularies of {kind!r} are not built here", hint=_elsewhere(kind))
    if closed and (rules != "tokmill" or min_count > 1):
        raise UsageError(
            "--closed means all tokens of the rules tokmill",
            hint="leave out --rules and --min-count, or --closed",
        )
    if not inputs and not closed:
        raise UsageError("no program was named", hint="give programs, or --closed")
    how: dict[str, Any] = {"workers": processes(workers), "quiet": quiet}
    chosen = levels.split(",") if levels else None
    counted = count_programs(inputs, rules, levels=chosen, **how) if inputs else None
    counts = counted.counts if counted else {}
    if closed:
        made = vocabulary.closed()
        made = with_counts(made, counts) if counted else made
    else:
        made = vocabulary.counted([counts], rules, min_count)
    held_out = count_programs(unknown_on, rules, title="unknown", **how) if unknown_on else None
    write_vocabularies(out, made)
    own = unknown_in(made, counts) if counted else []
    others = unknown_in(made, held_out.counts) if held_out else []
    refused = (counted.refused if counted else {}) | (held_out.refused if held_out else {})
    if json:
        print_json(
            {
                "vocabulary": str(out),
                "rules": rules,
                "programs": counted.programs if counted else 0,
                "instructions": counted.instructions if counted else 0,
                "columns": {column: len(tokens) for column, tokens in made.items()},
                "counted": {one.column: msgspec.structs.asdict(one) for one in own},
                "unknown_on": {one.column: msgspec.structs.asdict(one) for one in others},
                "refused": refused,
            }
        )
    else:
        list_refused(refused)
        if counted:
            print(
                f"{out}: {counted.programs:,} programs, {counted.instructions:,} instructions, "
                f"rules {rules}"
            )
        _print_columns(made, own, others)
    named = {Path(path).name for path in [*(inputs or []), *(unknown_on or [])]}
    return 1 if named & set(refused) else 0


@app.command()
def export(
    path: Lists,
    out: Out,
    form: Annotated[
        str, typer.Option("--format", metavar="FORM", help="txt, pkl or json.")
    ] = "txt",
    json: Json = False,
) -> None:
    """Write vocabularies as asm_tokens.txt …, as asm_tokens_dict.pkl …, or frozen as asm.json …"""
    from tokmill.store.store import Store
    from tokmill.x86 import vocabulary_files as files
    from tokmill.x86.vocabulary_changes import counts_in, with_counts

    if form not in FORMATS:
        raise UsageError(f"no format is called {form!r}", hint=nearest(form, FORMATS))
    found = _lists(path)
    if form == "pkl" and is_store(path):
        found = with_counts(found, counts_in(Store(path)))
    write = {
        "txt": files.write_texts,
        "pkl": files.write_counts,
        "json": files.write_vocabularies,
    }[form]
    _print_files(write(out, found), json)


@app.command("import")
def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|DIR…",
            readable=False,
            help="COLUMN_tokens.txt, COLUMN_tokens_dict.pkl, COLUMN.json, or folders of them.",
        ),
    ],
    out: Out,
    rules: Annotated[
        str, typer.Option(help="Rules that made the tokens, where a list does not say it.")
    ] = "semanticbbv",
    column: Annotated[
        str, typer.Option(help="Column of one FILE whose name does not say it.")
    ] = "",
    json: Json = False,
) -> None:
    """Read lists of tokens that other scripts wrote, and say what was found.

    Ids are kept where the five special tokens come first. Else these are put in front and the
    others sorted, and ids.json holds the new id of each old one.
    """
    from tokmill.x86.rules import COLUMNS
    from tokmill.x86.vocabulary_files import Found, find_lists, read_list, write_vocabularies

    if column and (column not in COLUMNS or len(paths) > 1 or paths[0].is_dir()):
        raise UsageError("--column names the column of one file", hint=" ".join(COLUMNS))
    found: dict[str, Found] = {}
    for path in paths:
        lists = find_lists(path) if path.is_dir() else {"": read_list(path, column=column)}
        for one in lists.values():
            if one.tokens.column in found:
                raise UsageError(
                    f"two lists of {one.tokens.column}: {found[one.tokens.column].path} and "
                    f"{one.path}",
                    hint="`tokmill vocab merge` makes one of several",
                )
            if one.convention != "frozen":
                one.tokens.rules = rules
            found[one.tokens.column] = one
    ordered = {name: found[name] for name in COLUMNS if name in found}
    _check_rules(rules, {one.tokens.rules for one in ordered.values()})
    write_vocabularies(out, {name: one.tokens for name, one in ordered.items()})
    changed = {name: one.ids for name, one in ordered.items() if one.renumbered}
    if changed:
        _write_map(out / MAP, changed)
    rows = [
        {
            "column": name,
            "file": str(one.path),
            "found": one.convention,
            "tokens": len(one.tokens),
            "ids": "none there" if one.ids is None else "renumbered" if one.renumbered else "kept",
            "counts": one.tokens.counts is not None,
        }
        for name, one in ordered.items()
    ]
    missing = [name for name in COLUMNS if name not in found]
    if json:
        print_json({"vocabulary": str(out), "lists": rows, "missing": missing,
                    "map": str(out / MAP) if changed else None})  # fmt: skip
        return
    print_table([*rows[0]], [list(row.values()) for row in rows])
    if changed:
        print(f"{out / MAP}: old id → new id of {', '.join(changed)}")
    if missing:
        say(f"{', '.join(missing)}: no list; a store needs all six")


@app.command()
def prune(
    path: Lists,
    out: Out,
    min_count: Annotated[
        int, typer.Option(min=1, help="Leave out tokens that stood less often than this.")
    ] = 1,
    used_by: Annotated[
        list[str] | None,
        typer.Option(metavar="STORE", help="Keep what stands in this store. May be repeated."),
    ] = None,
    keep: Annotated[
        str, typer.Option(metavar="FILE", help="Keep what is in this list, or folder of lists.")
    ] = "",
    map_: Annotated[
        Path | None,
        typer.Option(
            "--map", metavar="FILE", help="Old id → new id, as JSON.", show_default="ids.json"
        ),
    ] = None,
    workers: Workers = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Leave out tokens; of a store make a new one, in which they are [UNK].

    A store is pruned by its own counts; without an option what does not stand in it goes. That is
    `tokmill build recode`, so the same command again continues.
    """
    from tokmill.store.store import Store
    from tokmill.x86 import vocabulary_changes as changes
    from tokmill.x86.vocabulary_files import write_vocabularies

    old = _lists(path)
    notes: dict[str, int] = {}
    if is_store(path):
        new_store = _recode(
            path,
            out,
            {"min_count": min_count, "used_by": used_by or [], "keep": keep},
            processes(workers),
            quiet,
        )
        new, notes = changes.vocabularies_of(new_store), new_store.manifest.notes
    else:
        if min_count == 1 and not used_by and not keep:
            raise UsageError("nothing says which tokens go", hint=changes.WAYS)
        new = changes.pruned(
            old,
            min_count=min_count,
            used=[changes.counts_in(Store(store)) for store in used_by or ()],
            keep=changes.lists_to_keep(keep) if keep else None,
        )
        write_vocabularies(out, new)
    place = map_ or (out.with_name(f"{out.name}-{MAP}") if is_store(path) else out / MAP)
    maps = {column: changes.id_map(old[column], new[column]) for column in new}
    _write_map(place, maps)
    rows = [[name, len(old[name]), len(new[name])] for name in new]
    if json:
        columns = {name: {"before": before, "after": after} for name, before, after in rows}
        print_json({"out": str(out), "columns": columns, "notes": notes, "map": str(place)})
        return
    print_table(["column", "tokens before", "after"], rows)
    for note, count in notes.items():
        print(f"{count:,} {note}")
    print(f"{place}: old id → new id")


@app.command()
def merge(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="VOCAB|STORE…", readable=False, help="Folders of lists, or stores."),
    ],
    out: Out,
    json: Json = False,
) -> None:
    """Write lists of all tokens that any of the vocabularies has; counts are added."""
    from tokmill.x86.vocabulary_changes import merged
    from tokmill.x86.vocabulary_files import write_vocabularies

    if len(paths) < 2:
        raise UsageError("one vocabulary was named", hint="merge A B … -o VOCAB")
    parts = [_lists(path) for path in paths]
    made = merged(parts)
    write_vocabularies(out, made)
    if json:
        sizes = {column: len(tokens) for column, tokens in made.items()}
        print_json({"vocabulary": str(out), "columns": sizes})
        return
    names = [path.name for path in paths]
    rows = [
        [column, *(len(part.get(column, ())) for part in parts), len(tokens)]
        for column, tokens in made.items()
    ]
    print_table(["column", *names, "all"], rows)


@app.command()
def instructions(
    inputs: Programs,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", readable=False, help="A .csv, .jsonl or .parquet file."),
    ],
    levels: Levels = None,
    workers: Workers = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Write the different instructions of programs: text, bytes, counts, the frequent ones first.

    Exit code 1 if a file that was named is refused.
    """
    from tokmill.x86.instructions import collect

    found = collect(
        inputs,
        out,
        levels=levels.split(",") if levels else None,
        workers=processes(workers),
        quiet=quiet,
    )
    if json:
        print_json({"file": str(out), **msgspec.to_builtins(found)})
    else:
        list_refused(found.refused)
        print(
            f"{out}: {found.encodings:,} different among {found.instructions:,} instructions of "
            f"{found.programs:,} programs"
        )
    return 1 if {Path(path).name for path in inputs} & set(found.refused) else 0


def is_store(path: Path) -> bool:
    """Say whether a folder is a store, finished or not."""
    return (path / "plan.json").exists() or (path / "manifest.json").exists()


def _lists(path: Path) -> Any:
    """Return the vocabularies that there are in a folder, or those that a store carries."""
    from tokmill.store.store import Store
    from tokmill.x86.vocabulary_changes import vocabularies_of
    from tokmill.x86.vocabulary_files import find_lists

    if is_store(path):
        return vocabularies_of(Store(path))
    return {column: found.tokens for column, found in find_lists(path).items()}


def _recode(path: Path, out: Path, options: dict[str, Any], workers: int, quiet: bool) -> Any:
    from tokmill.build.prepare import BuildRecipe, How
    from tokmill.build.resources import Amount
    from tokmill.build.run import run

    chosen = BuildRecipe(source="recode", inputs=(str(path),), out=str(out), options=options)
    return run(chosen, How(amount=Amount(workers=workers, own_process=True), quiet=quiet))


def _check_rules(asked: str, found: set[str]) -> None:
    from tokmill.x86.rules import RULES

    if asked not in RULES:
        raise UsageError(f"no rules are called {asked!r}", hint=nearest(asked, RULES))
    if len(found) > 1:
        raise UsageError(
            f"the lists are for different rules: {', '.join(sorted(found))}",
            hint="--rules says it for lists that do not",
        )


def _write_map(path: Path, maps: Mapping[str, list[int] | None]) -> None:
    make_folder(path.parent)
    write_file(path, msgspec.json.encode(maps) + b"\n")


def processes(asked: int | None) -> int:
    """Return how many processes are to work: as many as there are processors, if none is asked."""
    return len(os.sched_getaffinity(0)) if asked is None else asked


def _elsewhere(kind: str) -> str:
    text = kind in ("text", "jsonl", "parquet")
    return "`tokmill tokenizer train` makes those of text" if text else "vocab build x86 INPUT…"


def list_refused(refused: Mapping[str, str]) -> None:
    """Print the programs that were not read, and why."""
    for name, why in list(refused.items())[:MOST_LISTED]:
        print(f"{name}: refused, {why}")
    if len(refused) > MOST_LISTED:
        print(f"… {len(refused) - MOST_LISTED:,} more refused")


def _print_columns(made: Mapping[str, Any], own: list[Any], others: list[Any]) -> None:
    headers = ["column", "tokens"]
    rows: list[list[Any]] = [[column, len(tokens)] for column, tokens in made.items()]
    for found, title in ((own, ""), (others, " elsewhere")):
        if found:
            headers += [f"stood{title}", f"unknown{title}", "share"]
            for row, one in zip(rows, found, strict=True):
                row += [one.tokens, one.unknown, f"{one.share:.4%}"]
    print_table(headers, rows)
    for one in others:
        if one.examples:
            shown = ", ".join(f"{token} {count:,}" for token, count in one.examples)
            print(f"unknown elsewhere, {one.column}: {one.kinds:,} tokens: {shown}")


def _print_files(paths: list[Path], json: bool) -> None:
    if json:
        print_json({"files": [str(path) for path in paths]})
    else:
        for path in paths:
            print(path)
