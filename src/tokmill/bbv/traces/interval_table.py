"""Numbers of each interval in a CSV file: miss rates, or cycles per instruction.

The first line names the columns. A column `interval` says which interval a line is about, counted
from 0; without one, lines stand in the order of the intervals.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokmill.base.bounds import bounded_reader
from tokmill.base.errors import TokmillError, nearest
from tokmill.base.files import machine_errors

Floats = npt.NDArray[np.float64]

INTERVAL = "interval"
HINT = "a line an interval: a header such as `interval,l1_miss_rate`, then `0,0.012`"


def read_table(path: Path, count: int, *, partly: bool = False) -> dict[str, Floats]:
    """Return the columns of a table, each (intervals,) float64.

    Args:
        path: a CSV file with a header.
        count: number of intervals of the program.
        partly: whether intervals may be missing; they are NaN then, and `interval` must be there.

    Raises:
        TokmillError: a cell is no finite number, or intervals are missing, surplus or stand twice.
    """
    names, cells = read_cells(path)
    if INTERVAL not in names:
        if partly:
            raise TokmillError(
                "no column says which intervals these are",
                where=str(path),
                hint="add a column `interval`, counted from 0",
            )
        if len(cells) != count:
            raise TokmillError(
                f"{len(cells):,} lines for {count:,} intervals",
                where=str(path),
                hint="is it of the same run? a column `interval` would say which are missing",
            )
        return dict(zip(names, cells.T, strict=True))
    place = cells[:, names.index(INTERVAL)]
    outside = (place != np.floor(place)) | (place < 0) | (place >= count)
    number = np.where(outside, -1, place).astype(np.int64)
    times = np.bincount(number[~outside], minlength=count)
    twice, missing = int((times > 1).sum()), int((times == 0).sum())
    if outside.any() or twice or (missing and not partly):
        raise TokmillError(
            f"of {count:,} intervals {missing:,} are missing and {twice:,} stand more than once; "
            f"{int(outside.sum()):,} lines are of other intervals",
            where=str(path),
            hint="is it of the same run? intervals count from 0",
        )
    result = {}
    for name, column in zip(names, cells.T, strict=True):
        if name != INTERVAL:
            result[name] = np.full(count, np.nan)
            result[name][number] = column
    return result


def one_column(path: Path, columns: dict[str, Floats], wanted: Sequence[str]) -> Floats:
    """Return the column with one of the names, the first that is there."""
    for name in wanted:
        if name in columns:
            return columns[name]
    raise TokmillError(
        f"there is no column {wanted[0]!r}", where=str(path), hint=nearest(wanted[0], columns)
    )


@bounded_reader
def read_cells(path: Path) -> tuple[list[str], Floats]:
    """Return the names and the numbers, (lines, columns), of a CSV file with a header."""
    with machine_errors("read", path):
        data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokmillError(f"byte {error.start} is not UTF-8", where=str(path), hint=HINT) from None
    head, _, rest = text.partition("\n")
    try:
        names = [name.strip() for name in next(csv.reader([head.rstrip("\r")]), [])]
    except csv.Error:
        names = []
    if not names or "" in names or len(set(names)) < len(names) or is_number(names[0]):
        raise TokmillError(f"{head[:60]!r} does not name the columns", where=f"{path}:1", hint=HINT)
    if not rest.strip():
        raise TokmillError("there is no line but the header", where=str(path), hint=HINT)
    try:
        cells = np.loadtxt(io.StringIO(rest), delimiter=",", ndmin=2, comments=None)
    except (ValueError, OverflowError) as error:
        raise TokmillError(
            f"after the header: {str(error).rstrip('.')}", where=str(path), hint=HINT
        ) from None
    if cells.shape[1] != len(names):
        raise TokmillError(
            f"{len(names)} names, {cells.shape[1]} columns", where=f"{path}:1", hint=HINT
        )
    if not np.isfinite(cells).all():
        row, column = np.argwhere(~np.isfinite(cells))[0]
        raise TokmillError(
            f"{names[column]} of line {row + 1} after the header is not finite",
            where=str(path),
            hint="leave out what was not measured",
        )
    return names, cells


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
