"""The functions that are compared: names, how they were compiled, how many blocks they have."""

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import machine_errors
from tokmill.similarity.vector_rows import Rows
from tokmill.store.checks.hashes import first_of_equals, mix, store_digests
from tokmill.store.schema import PHRASE_BIT, Array
from tokmill.store.store import Store

NAMES = ("project", "program", "version", "function", "compiler", "level")
"""Columns of strings; project, program, version and function say what was compiled."""
SOURCE = NAMES[:4]
UNKNOWN = "unknown"
MADE = re.compile("sub_([0-9a-f]{1,16})")
"""A name that lifters make of the address of a function without one."""


@dataclass(slots=True)
class Coded:
    """A string for each of n functions, as numbers of sorted, different strings."""

    codes: Array
    """(n,) i8."""
    names: list[str]

    def take(self, rows: Array) -> "Coded":
        return Coded(self.codes[rows], self.names)


@dataclass(slots=True)
class Functions:
    """n functions, one a row, and the records that each is made of."""

    where: str
    names: dict[str, Coded]
    """A column for each of `NAMES`."""
    blocks: Array
    """(n,) i8, basic blocks; -1: unknown."""
    code: Array | None
    """(n,) u8, equal for functions with equal tokens; None: unknown."""
    named: Array
    """(n,) bool, whether the name is one of the source, not made of the address."""
    record: Array | None
    """(records,) i8, the function of each record; None: record i is function i."""

    def __len__(self) -> int:
        return len(self.blocks)

    def text(self, column: str, row: int) -> str:
        one = self.names[column]
        return one.names[int(one.codes[row])]

    def where_known(self, column: str) -> Array:
        """Return of which functions a column is known, (n,) bool."""
        one = self.names[column]
        unknown = [i for i, name in enumerate(one.names) if name in ("", UNKNOWN)]
        return ~np.isin(one.codes, unknown)


def spelled(column: str, words: list[str]) -> list[str]:
    """Return strings of a column; levels may be written as the compiler's option, -O2."""
    return [word.removeprefix("-") for word in words] if column == "level" else words


def coded(texts: Sequence[str]) -> Coded:
    names = sorted(set(texts))
    number = {name: i for i, name in enumerate(names)}
    return Coded(np.asarray([number[text] for text in texts], np.int64), names)


def functions_of(store: Store) -> Functions:
    """Return the functions of a store of x86 code: its records, with parts of a function joined.

    Of a store of walks, all walks through a function are one. Raises `UsageError` for a store
    without the columns.
    """
    missing = [name for name in NAMES if name not in store.schema]
    if missing or any(store.schema[name].dtype != "utf8" for name in NAMES):
        raise UsageError(
            f"the store has no column of strings {missing[0]!r}" if missing else
            f"the columns {', '.join(NAMES)} must hold strings",
            where=str(store.path),
            hint="`tokmill build x86` makes stores of functions with all that is needed",
        )  # fmt: skip
    words: dict[str, list[str]] = {name: [] for name in NAMES}
    places: dict[str, list[Array]] = {name: [np.zeros(0, np.int64)] for name in NAMES}
    blocks = [np.zeros(0, np.int64)]
    for number, entry in enumerate(store.shards):
        shard = store.shard(number)
        for name in NAMES:
            found, place = shard.text(name, 0, entry.records).distinct()
            places[name].append(place + len(words[name]))
            words[name] += (one.decode("utf-8", "surrogatepass") for one in found)
        blocks.append(_blocks(shard))
    names = {
        name: coded(spelled(name, words[name])).take(np.concatenate(places[name])) for name in NAMES
    }
    record = _of_records(store, names)
    count = int(record.max()) + 1 if len(record) else 0
    first = np.zeros(count, np.int64)
    first[record[::-1]] = np.arange(len(record))[::-1]
    digests = np.zeros(count, np.uint64)
    order = np.arange(len(record)) - first[record]
    part = mix(store_digests(store)["a"] + mix(order.astype(np.uint64)))
    np.add.at(digests, record, part)
    return Functions(
        where=str(store.path),
        names={name: coded.take(first) for name, coded in names.items()},
        blocks=_sums(np.concatenate(blocks), record, count),
        code=digests,
        named=_named(store, names["function"])[first],
        record=None if count == len(record) else record,
    )


def _blocks(shard: Any) -> Array:
    """Return the basic blocks of each record of a shard; -1 where they are not known."""
    if "phrase" in shard:
        ends = shard["phrase_offsets"].astype(np.int64)
        begins = np.concatenate([[0], np.cumsum(shard["phrase"] >= PHRASE_BIT)])
    else:
        ends = shard["offsets"].astype(np.int64)
        if "border" not in shard:
            return np.full(len(ends) - 1, -1, np.int64)
        begins = np.concatenate([[0], np.cumsum(shard["border"] & 2 > 0)])
    return begins[ends[1:]] - begins[ends[:-1]]


def _sums(values: Array, record: Array, count: int) -> Array:
    """Return the sum over the records of each function; -1 where it is unknown."""
    if len(values) and values.min() < 0:
        return np.full(count, -1, np.int64)
    return np.bincount(record, values, count).astype(np.int64)


def _of_records(store: Store, names: dict[str, Coded]) -> Array:
    """Return the number of the function of each record: records of one function share it."""
    key = [coded.codes for coded in names.values()]
    if "walk" in store.schema:
        return _in_order(numbers_of(key))
    if "part" not in store.schema or not len(store):
        return np.arange(len(store))
    begins = store.column("part") == 0
    begins[0] = True
    if "address" in store.schema:
        key.append(store.column("address"))
    for values in key:
        begins[1:] |= values[1:] != values[:-1]
    return np.cumsum(begins) - 1


def numbers_of(columns: Sequence[Array]) -> Array:
    """Return a number for each row of some columns of codes, equal for equal rows: (n,) i8.

    Numbers ascend as the rows do, the first column first.
    """
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        wide = int(column.max(initial=0)) + 1
        _, place = np.unique(number * wide + column, return_inverse=True)
        number = place.reshape(-1).astype(np.int64)
    return number


def _in_order(numbers: Array) -> Array:
    """Return numbers of groups, renumbered in the order of first use."""
    _, first, place = np.unique(numbers, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[place.reshape(-1)]


def _named(store: Store, function: Coded) -> Array:
    """Return of which records the function has a name that is not made of its address."""
    there = np.asarray([bool(name) for name in function.names], bool)
    named = there[function.codes] if len(there) else np.zeros(len(store), bool)
    if "address" not in store.schema:
        return named
    # Only `sub_` with the own address is made up: a function may really be called `sub_1`.
    addresses = np.asarray([_address_in(name) for name in function.names], np.uint64)
    artificial = np.asarray([MADE.fullmatch(name) is not None for name in function.names], bool)
    if len(addresses):
        named &= ~(
            artificial[function.codes] & (addresses[function.codes] == store.column("address"))
        )
    return named


def _address_in(name: str) -> int:
    """Return the address in a name that is made of one, else 0."""
    match = MADE.fullmatch(name)
    return int(match[1], 16) if match else 0


def of_functions(functions: Functions, matrix: Any, *, unit: bool = True) -> Any:
    """Return a row a function, of a matrix (records, d) with a row a record: the mean of its parts.

    With `unit` each record's row counts with length 1, so that no part outweighs the others by its
    length.
    """
    if functions.record is None:
        return matrix
    sparse = plugins.require("scipy.sparse")
    records = np.arange(len(functions.record))
    scale = 1 / np.bincount(functions.record)[functions.record]
    if unit:
        lengths = Rows(matrix).lengths
        scale *= np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    shape = (len(functions), len(records))
    return sparse.csr_array((scale, (functions.record, records)), shape=shape) @ matrix


NEEDED = ("project", "function", "compiler", "level")
BLOCKS, CODE = "blocks", "code"
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
            what = "this is no file" if path.exists() else "there is no such file"
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
            hint="a cell for each column, empty where it is not known",
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
            f"the function stands in line {lines[first[row]]} already; "
            f"{len(again):,} lines stand twice",
            where=f"{path}:{lines[row]}",
            hint="project, program, version, function, compiler and level together name one "
            "function; a column program tells those of several programs apart",
        )
