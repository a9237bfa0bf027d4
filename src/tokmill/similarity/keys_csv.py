"""A table of functions in a CSV file, a line a vector."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import machine_errors
from tokmill.similarity.functions import NAMES, Coded, Coder, Functions, numbers_of, spelled
from tokmill.store.checks.hashes import first_of_equals
from tokmill.store.schema import Array

NEEDED = ("project", "function", "compiler", "level")
BLOCKS, CODE = "blocks", "code"
COLUMNS = (*NAMES, BLOCKS, CODE)
BATCH = 1 << 14


def read_keys(path: Path) -> tuple[Functions, list[str]]:
    """Return the functions of a CSV file, and the columns of it that are not read.

    The first line names the columns: `NEEDED`, and where they are known `program`, `version`,
    `blocks`, and `code` (any text that is equal for equal code). Function i
    is the one of vector i. Raises `TokmillError` with the line for what is missing or no number,
    and for a function that stands twice.
    """
    coders = {name: Coder() for name in (*NAMES, CODE)}
    blocks: list[Array] = []
    lines: list[Array] = []
    with machine_errors("read", path):
        if not path.is_file():
            what = "this is no file" if path.exists() else "there is no such file"
            raise TokmillError(what, where=str(path), hint="name a CSV file of functions")
        with open(path, encoding="utf-8-sig", errors="strict", newline="") as file:
            rows = _rows(path, file)
            head = next(rows, (0, []))[1]
            place = _columns(path, head)
            while batch := [row for _, row in zip(range(BATCH), rows, strict=False)]:
                _check(path, batch, head, place)
                lines.append(np.asarray([line for line, _ in batch], np.int64))
                for name, coder in coders.items():
                    at = place.get(name)
                    cells = ["" if at is None else row[at] for _, row in batch]
                    coder.add(spelled(name, cells), np.arange(len(cells)))
                blocks.append(_numbers(path, batch, place.get(BLOCKS)))
    if not lines:
        raise TokmillError(
            "the file has no functions",
            where=str(path),
            hint="a line a vector, below the line that names the columns",
        )
    names = {name: coders[name].coded() for name in NAMES}
    _check_once(path, names, np.concatenate(lines))
    functions = Functions(
        where=str(path),
        names=names,
        blocks=np.concatenate(blocks),
        code=_code(coders[CODE].coded()) if CODE in place else None,
        named=np.ones(len(names["function"].codes), bool),
        record=None,
    )
    return functions, [name for name in head if name not in COLUMNS]


def _code(coded: Coded) -> Array:
    """Return a number for the code of each function; those of empty cells are all different."""
    result = coded.codes.astype(np.uint64)
    if coded.names[0] == "":
        empty = np.flatnonzero(coded.codes == 0)
        result[empty] = np.arange(len(coded.names), len(coded.names) + len(empty))
    return result


def _rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of its last line, cells) of each row that is not empty."""
    reader = csv.reader(file, strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise TokmillError(
            f"the line is no CSV: {error}",
            where=f"{path}:{reader.line_num}",
            hint="cells with a comma, a quote or a new line stand in double quotes",
        ) from None
    except UnicodeDecodeError as error:
        raise TokmillError(
            f"the text is not UTF-8: {error.reason}",
            where=f"{path}:{reader.line_num + 1}",
            hint="write the file as UTF-8",
        ) from None


def _columns(path: Path, head: list[str]) -> dict[str, int]:
    """Return column → its place, from the first line."""
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
    return {name: place for place, name in enumerate(head) if name in COLUMNS}


def _check(
    path: Path, batch: list[tuple[int, list[str]]], head: list[str], place: dict[str, int]
) -> None:
    needed = [place[name] for name in NEEDED]
    for line, row in batch:
        if len(row) != len(head):
            raise TokmillError(
                f"the line has {len(row)} cells, and the first line names {len(head)} columns",
                where=f"{path}:{line}",
                hint="a cell for each column, empty where it is not known",
            )
        for at in needed:
            if not row[at]:
                raise TokmillError(
                    f"the {head[at]} is empty",
                    where=f"{path}:{line}",
                    hint=f"{', '.join(NEEDED)} are needed of each function; `unknown` leaves it "
                    "out, counted",
                )


def _numbers(path: Path, batch: list[tuple[int, list[str]]], at: int | None) -> Array:
    """Return the numbers of blocks; -1 where the cell is empty or there is no column."""
    if at is None:
        return np.full(len(batch), -1, np.int64)
    result = np.empty(len(batch), np.int64)
    for i, (line, row) in enumerate(batch):
        cell = row[at].strip()
        if cell and not (cell.isascii() and cell.isdecimal() and len(cell) <= 18):
            raise TokmillError(
                f"the number of blocks is {cell[:40]!r}",
                where=f"{path}:{line}",
                hint="a whole number from 0 on, or nothing",
            )
        result[i] = int(cell) if cell else -1
    return result


def _check_once(path: Path, names: dict[str, Coded], lines: Array) -> None:
    first = first_of_equals(numbers_of([coded.codes for coded in names.values()]))
    again = np.flatnonzero(first != np.arange(len(first)))
    if len(again):
        row = int(again[0])
        raise UsageError(
            f"the function stands in line {lines[first[row]]} already; "
            f"{len(again):,} lines stand twice",
            where=f"{path}:{lines[row]}",
            hint="project, program, version, function, compiler and level together name one "
            "function; a column program tells those of several programs apart",
        )
