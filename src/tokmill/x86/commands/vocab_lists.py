"""`tokmill vocab export|import|compress`: changes and conversions of vocabularies."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, check_name
from tokmill.base.files import make_folder, remove, write_file
from tokmill.formats.notes import write_noted
from tokmill.formats.pickles.token_dicts_export import pickled_counts
from tokmill.terminal.frame import Json
from tokmill.terminal.output import print_json, print_line, print_table, say
from tokmill.x86.commands.program_options import Out
from tokmill.x86.tokens.vocabularies.vocabulary import TokenList

MAP = "ids.json"
BECAME = "tokens.json"

Lists = Annotated[
    Path,
    typer.Argument(metavar="VOCAB|STORE", readable=False, help="A folder of lists, or a store."),
]
ColumnName = Annotated[
    str, typer.Option(help="Column of a single FILE, if its name does not have it.")
]


def export(
    path: Lists,
    out: Out,
    form: Annotated[str, typer.Option("--format", metavar="FORM", help="txt or pkl.")] = "txt",
    json: Json = False,
) -> None:
    """Write vocabularies as asm_tokens.txt …, or with their counts as asm_tokens_dict.pkl …"""
    check_name("no format is", form, FORMATS)
    lists, _ = _lists(path)
    files = write_lists(out, lists, form)
    if json:
        print_json({"files": [str(path) for path in files]})
    else:
        print_line(*map(str, files))


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
        str, typer.Option(help="Rules that made the tokens, if a list does not name them.")
    ] = "semanticbbv",
    column: ColumnName = "",
    json: Json = False,
) -> None:
    """Read lists of tokens that other scripts wrote, and report what was found.

    If the five special tokens come first, ids are kept. Otherwise they are put first, the other
    tokens are sorted, and ids.json has the new id of each old one.
    """
    from tokmill.x86.tokens.rules import COLUMNS
    from tokmill.x86.tokens.vocabularies.vocabulary import write_vocabularies

    if column and (column not in COLUMNS or len(paths) > 1 or paths[0].is_dir()):
        raise UsageError("--column names the column of one file", hint=" ".join(COLUMNS))
    lists = _read_lists(paths, rules, column)
    ordered = {name: lists[name] for name in COLUMNS if name in lists}
    _check_rules(rules, {one.tokens.rules for one in ordered.values()})
    write_vocabularies(out, {name: one.tokens for name, one in ordered.items()})
    changed = {name: one.ids for name, one in ordered.items() if one.renumbered}
    if changed:
        _write_map(out / MAP, changed)
    else:
        # A map of an earlier import would be taken for the map of this one.
        remove(out / MAP)
    _print_imported(out, ordered, [name for name in COLUMNS if name not in lists], changed, json)


def _read_lists(paths: Sequence[Path], rules: str, column: str) -> dict[str, Any]:
    from tokmill.x86.tokens.vocabularies.vocabulary import find_lists, read_list

    result: dict[str, Any] = {}
    for path in paths:
        lists = find_lists(path) if path.is_dir() else {"": read_list(path, column=column)}
        for one in lists.values():
            if one.tokens.column in result:
                raise UsageError(
                    f"two lists of {one.tokens.column}: {result[one.tokens.column].path} and "
                    f"{one.path}",
                    hint="name one of them",
                )
            if one.convention != "frozen":
                one.tokens.rules = rules
            result[one.tokens.column] = one
    return result


def _print_imported(
    out: Path, lists: Mapping[str, Any], missing: list[str], changed: Iterable[str], json: bool
) -> None:
    rows = [
        {
            "column": name,
            "file": str(one.path),
            "found": one.convention,
            "tokens": len(one.tokens),
            "ids": "none there" if one.ids is None else "renumbered" if one.renumbered else "kept",
            "counts": one.tokens.counts is not None,
            "twice": len(one.repeated),
        }
        for name, one in lists.items()
    ]
    if json:
        print_json({"vocabulary": str(out), "lists": rows, "missing": missing,
                    "map": str(out / MAP) if changed else None})  # fmt: skip
        return
    print_table([*rows[0]], [list(row.values()) for row in rows])
    if changed:
        print_line(f"{out / MAP}: old id → new id of {', '.join(changed)}")
    for one in lists.values():
        if one.repeated:
            shown = ", ".join(map(repr, one.repeated[:5])) + ", …" * (len(one.repeated) > 5)
            say(f"{one.path}: duplicate lines were dropped: {shown}")
    if missing:
        say(f"{', '.join(missing)}: no list; a store needs all six")


def compress(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|VOCAB|STORE",
            readable=False,
            help="A list, a folder of lists, or a store with lists.",
        ),
    ],
    out: Out,
    column: ColumnName = "",
    json: Json = False,
) -> None:
    """Merge tokens that differ only in a number or a register: MEM_dword[REG+IMM], IMM.

    OUT/ids.json has the new id of each old one, OUT/tokens.json the new token of each old one.
    """
    from tokmill.x86.tokens.vocabularies.operand_classes import compressed
    from tokmill.x86.tokens.vocabularies.vocabulary import read_list, write_vocabularies

    if path.is_dir():
        old, ids = _lists(path)
    else:
        one = read_list(path, column=column)
        old, ids = {one.tokens.column: one.tokens}, {one.tokens.column: one.ids}
    result = compressed(old)
    write_vocabularies(out, result.lists)
    maps = {
        name: [
            result.lists[name].ids[result.became[name].get(token, token)] for token in one.tokens
        ]
        for name, one in old.items()
    }
    _write_map(out / MAP, maps, ids)
    write_file(out / BECAME, msgspec.json.encode(result.became) + b"\n")
    rows = [
        [name, len(old[name]), len(result.lists[name]), len(result.became[name])] for name in old
    ]
    if json:
        columns = {
            name: {"before": before, "after": after, "changed": changed}
            for name, before, after, changed in rows
        }
        print_json({"out": str(out), "columns": columns, "map": str(out / MAP)})
        return
    print_table(["column", "tokens before", "after", "changed"], rows)
    print_line(f"{out / MAP}: old id → new id; {out / BECAME}: old token → new token")


def _lists(path: Path) -> tuple[Any, dict[str, list[int] | None]]:
    """Return the vocabularies of a folder or of a store, and the ids of the file as `ReadList`."""
    from tokmill.x86.tokens.vocabularies.vocabulary import find_lists

    lists = find_lists(path)
    return {n: one.tokens for n, one in lists.items()}, {n: one.ids for n, one in lists.items()}


def _check_rules(asked: str, rules: set[str]) -> None:
    check_name("no rules are", asked, plugins.RULES)
    if len(rules) > 1:
        raise UsageError(
            f"the lists are for different rules: {', '.join(sorted(rules))}",
            hint="--rules names those of lists that do not tell",
        )


def _write_map(
    path: Path,
    maps: Mapping[str, list[int] | None],
    ids: Mapping[str, list[int] | None] | None = None,
) -> None:
    """Write old id → new id; `ids`: id in the file → id that `maps` begin with (`ReadList.ids`)."""
    for name, own in (ids or {}).items():
        step = maps[name]
        maps = {**maps, name: step and own and [step[number] for number in own]}
    make_folder(path.parent)
    write_file(path, msgspec.json.encode(maps) + b"\n")


def write_lists(
    folder: Path, vocabularies: Mapping[str, TokenList], form: str = "txt"
) -> list[Path]:
    """Write lists in one of `FORMATS`; raises `TokmillError` for those that have no such form."""
    ending, encode = FORMATS[form]
    files = {f"{column}{ending}": encode(tokens) for column, tokens in vocabularies.items()}
    make_folder(folder)
    # Other scripts write lists with the same names and the same form.
    return write_noted(folder, f"lists{ending}", "vocabulary", files)


def _text(tokens: TokenList) -> bytes:
    for token in tokens.tokens:
        if not token or token.splitlines() != [token] or token != token.strip():
            raise TokmillError(
                f"the token {token!r} of {tokens.column} cannot be written as a line",
                hint="the frozen form can have any token",
            )
    return "".join(f"{token}\n" for token in tokens.tokens).encode()


def _pickle(tokens: TokenList) -> bytes:
    if tokens.counts is None:
        raise TokmillError(
            f"the list of {tokens.column} has no counts, which a pickle needs",
            hint="count programs: `tokmill vocab build x86`",
        )
    pairs = zip(tokens.tokens, tokens.counts, strict=True)
    return pickled_counts({token: count for token, count in pairs if count})


FORMATS = {"txt": ("_tokens.txt", _text), "pkl": ("_tokens_dict.pkl", _pickle)}
"""Format → the end of the names of its files, and what makes the content: a token per line in the
order of the ids; {token: frequency} of tokens with a count above 0."""
