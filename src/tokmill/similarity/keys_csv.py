"""A table of functions in a CSV file, a line a vector."""

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import machine_errors
from tokmill.similarity.functions import NAMES, Coded, Functions, coded, numbers_of, spelled
from tokmill.store.checks.hashes import first_of_equals
from tokmill.store.schema import Array

NEEDED = ("project", "function", "compiler", "level")
BLOCKS, CODE = "blocks", "code"
LONGEST = 1 << 20
"""Characters of a line."""
COLUMNS = (*NAMES, BLOCKS, CODE)


def read_keys(path: Path) -> tuple[Functions, list[str]]:
    """Return the functions of a CSV file, and the columns of it that are not read.

    The first line names the columns: `NEEDED`, and where they are known `program`, `version`,
    `blocks`, and `code` (any text that is equal for equal code). Function i
    is the one of vector i. Raises `TokmillError` with the line for what is missing or no number,
    and for a function that stands twice.
    """
    with machine_errors("read", path):
        if not path.is_file():
            what = "this is not a file" if path.exists() else "there is no such file"
            raise TokmillError(what, where=str(path), hint="name a CSV file of functions")
        with open(path, encoding="utf-8-sig", errors="strict", newline="") as file:
            rows = _rows(path, file)
            head = next(rows, (0, []))[1]
            _check_head(path, head)
            lines: list[int] = []
            columns: dict[str, list[str]] = {name: [] for name in COLUMNS}
            for line, row in rows:
                _check_row(f"{path}:{line}", head, row)
                lines.append(line)
                cells = dict(zip(head, row, strict=True))
                for name, column in columns.items():
                    # Most cells stand many times.
                    column.append(sys.intern(cells.get(name, "")))
    if not lines:
        raise TokmillError(
            "the file has no functions",
            where=str(path),
            hint="a line a vector, below the line that names the columns",
        )
    functions = Functions(
        where=str(path),
        names={name: coded(spelled(name, columns[name])) for name in NAMES},
        blocks=np.asarray([int(cell.strip() or -1) for cell in columns[BLOCKS]], np.int64),
        code=_code(coded(columns[CODE])) if CODE in head else None,
        named=np.ones(len(lines), bool),
        record=None,
    )
    _check_once(path, functions, lines)
    return functions, [name for name in head if name not in COLUMNS]


def _code(texts: Coded) -> Array:
    """Return a number for the code of each function; those of empty cells are all different."""
    result = texts.codes.astype(np.uint64)
    if texts.names[0] == "":
        empty = np.flatnonzero(texts.codes == 0)
        result[empty] = np.arange(len(texts.names), len(texts.names) + len(empty))
    return result


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST), ""), 1):
        if len(line) == LONGEST:
            what = f"the line has {LONGEST:,} characters or more"
            raise TokmillError(what, where=f"{path}:{number}", hint="is it a CSV file?")
        yield line


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(_lines(path, file), strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise TokmillError(
            f"the line is not CSV: {error}",
            where=f"{path}:{reader.line_num}",
            hint="cells with a comma, a quote or a new line need double quotes",
        ) from None
    except UnicodeDecodeError as error:
        raise TokmillError(
            f"the text is not UTF-8: {error.reason}",
            where=f"{path}:{reader.line_num + 1}",
            hint="write the file as UTF-8",
        ) from None


def _check_head(path: Path, head: list[str]) -> None:
    for name in NEEDED:
        if name not in head:
            raise TokmillError(
                f"the first line names no column {name!r}",
                where=f"{path}:1",
                hint=nearest(name, head, f"needed are {', '.join(NEEDED)}"),
            )
    if twice := next((name for name in head if head.count(name) > 1), None):
        raise TokmillError(
            f"the first line names the column {twice!r} twice",
            where=f"{path}:1",
            hint="name each column once",
        )


def _check_row(where: str, head: list[str], row: list[str]) -> None:
    if len(row) != len(head):
        raise TokmillError(
            f"the line has {len(row)} cells, and the first line names {len(head)} columns",
            where=where,
            hint="a cell for each column, empty if it is unknown",
        )
    for name, cell in zip(head, row, strict=True):
        if name in NEEDED and not cell:
            raise TokmillError(
                f"the {name} is empty",
                where=where,
                hint=f"{', '.join(NEEDED)} are needed of each function; `unknown` leaves it "
                "out, counted",
            )
        if name == BLOCKS and not re.fullmatch("[0-9]{0,18}", cell.strip()):
            raise TokmillError(
                f"the number of blocks is {cell.strip()[:40]!r}",
                where=where,
                hint="a whole number from 0 on, or nothing",
            )


def _check_once(path: Path, functions: Functions, lines: Sequence[int]) -> None:
    first = first_of_equals(numbers_of([one.codes for one in functions.names.values()]))
    again = np.flatnonzero(first != np.arange(len(first)))
    if len(again):
        row = int(again[0])
        raise UsageError(
            f"the function is in line {lines[first[row]]} already; "
            f"{len(again):,} lines are duplicates",
            where=f"{path}:{lines[row]}",
            hint="project, program, version, function, compiler and level together name one "
            "function; a column program distinguishes those of several programs",
        )
