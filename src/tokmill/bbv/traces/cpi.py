"""Cycles per instruction (CPI) and miss rates of the intervals of an execution, from a file.

CSV with a header, JSON (a list of numbers, a list of objects, or an object of lists), or the
timeline of gem5: `simInsts` as a running total, `numCycles` as another or of each interval.

The first line of a CSV file names the columns. A column `interval` says which interval a line is
about, counted from 0; without one, lines stand in the order of the intervals.
"""

import csv
import io
import itertools
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokmill.base.bounds import bounded_reader
from tokmill.base.errors import TokmillError
from tokmill.base.headers import loads_json
from tokmill.base.progress import human_count
from tokmill.bbv.traces.addresses import content
from tokmill.store.schema import Array

Floats = npt.NDArray[np.float64]

INTERVAL, COUNTED = "interval", "instructions"
NUMBER = re.compile(r"[-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf)")
HINT = "a line an interval, no words: a header such as `interval,l1_miss_rate`, then `0,0.012`"
Choose = Callable[[Sequence[str]], Sequence[str]]
Parse = Callable[[bytes], dict[str, Array]]


@bounded_reader
def read_table(
    path: Path, count: int, *, partly: bool = False, parse: Parse = lambda data: _csv(data, list)
) -> dict[str, Floats]:
    """Return the columns of a table, each (intervals,) float64.

    Args:
        partly: whether intervals may be missing; they are NaN then, and `interval` must be there,
            counted from 0. Of all intervals, they may also count from 1.
        parse: gives the columns that are read.

    Raises:
        TokmillError: a cell is no finite number (`instructions` may be empty), a rate is negative,
            or intervals are missing, surplus or stand twice.
    """
    try:
        columns = parse(content(path))
    except (ValueError, csv.Error) as error:
        raise TokmillError(
            f"the table cannot be read: {error}", where=str(path), hint=HINT
        ) from None
    for name, values in columns.items():
        bad = np.isinf(values) | (np.isnan(values) & (name != COUNTED))
        bad |= (values < 0) & (name in RATES)
        if bad.any():
            row = int(bad.argmax())
            raise TokmillError(
                f"{name} of row {row + 1} is {values[row]:g}",
                where=str(path),
                hint="leave out what was not measured: the interval, or the column of the rate",
            )
    if INTERVAL not in columns and partly:
        raise TokmillError(
            "no column says which intervals these are",
            where=str(path),
            hint="add a column `interval`, counted from 0",
        )
    place = columns.pop(INTERVAL, np.arange(max(map(len, columns.values()), default=count)))
    if not partly and np.array_equal(np.sort(place), np.arange(1, count + 1)):
        place = place - 1
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
    for name, column in columns.items():
        result[name] = np.full(count, np.nan)
        result[name][number] = column
    return result


KINDS = ("measured", "simulated", "given", "modelled")
"""What a CPI is: reference cycles of a real machine; cycles of a simulator; not stated; a formula
over counted events. Where a file has several, the first of this order is taken."""
CPI_NAMES = ("cpi_measured", "cpi_simulated", "cpi", "cpi_modelled")
PAGE_FAULTS = "page_faults"
RATES = ("i1_misses", "d1_misses", "ll_misses", "branch_misses", PAGE_FAULTS)
"""Events per 1,000 instructions: first-level caches, last level, mispredicted branches, pages that
the kernel had to bring."""
CYCLES, INSTRUCTIONS = "board.processor.start.core.numCycles", "simInsts"
"""Names in the timeline of gem5, as SemanticBBV's preprocessing reads it."""
CLOSE = 0.01
"""Instructions of an interval in both files may differ by this share."""
FEW = 8
"""With fewer intervals, cycles that rise by chance could be taken for a running total."""
SLOW_START = 3
"""Above so many times the CPI of the others, the cycles of a first interval may be no total."""
MEASURES = (INTERVAL, COUNTED, *CPI_NAMES, *RATES)
LIKE_CPI = re.compile("cpi.*|ipc|cycles|seconds")
"""Columns that say what CPI says."""
FORMS = "CSV with a header (interval, cpi), a JSON list of numbers, or gem5's timeline"


class Measures(NamedTuple):
    """What a file says about the intervals; each array is float64, NaN where it says nothing."""

    cpi: dict[str, Array]
    """Kind → cycles per instruction."""
    rates: dict[str, Array]
    instructions: Array | None
    numbers: Array | None
    """Numbers of the intervals, if the file states them."""
    length: int

    @property
    def kind(self) -> str:
        """The kind of CPI that is taken, "" for none."""
        return next((kind for kind in KINDS if kind in self.cpi), "")


@bounded_reader
def read_measures(path: Path | str) -> Measures:
    """Read a file of measures."""
    data = content(path)
    try:
        columns = _json(data) if data.lstrip()[:1] in (b"[", b"{") else _csv(data)
    except (ValueError, csv.Error) as error:
        raise TokmillError(
            f"the file of CPI cannot be read: {error}", where=str(path), hint=FORMS
        ) from None
    cpi = {KINDS[i]: columns[name] for i, name in enumerate(CPI_NAMES) if name in columns}
    rates = {name: columns[name] for name in RATES if name in columns}
    if not cpi and not rates:
        raise TokmillError(
            f"the file has neither a CPI nor a miss rate, but {', '.join(columns) or 'nothing'}",
            where=str(path),
            hint=f"columns: {', '.join((*CPI_NAMES, *RATES))}",
        )
    for name, values in columns.items():
        bad = (values < 0) | np.isinf(values) | ((values == 0) & name.startswith("cpi"))
        if bad.any():
            row = int(bad.argmax())
            raise TokmillError(
                f"{name} is {values[row]:g}", where=f"{path}, interval {row}",
                hint="leave the value empty where nothing was measured",
            )  # fmt: skip
    length = len(next(iter(columns.values())))
    return Measures(cpi, rates, columns.get(COUNTED), columns.get(INTERVAL), length)


def _csv(data: bytes, choose: Choose | None = None) -> dict[str, Array]:
    """Return the columns that `choose` gives of all names; without it those of `MEASURES`."""
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline=""), strict=True)
    rows: Iterator[list[str]] = (row for row in reader if row and not row[0].startswith("#"))
    first = next(rows, None)
    if first is None:
        raise ValueError("it is empty")
    names = [name.strip().lower() for name in first]
    if len(set(names)) < len(names):
        raise ValueError("a duplicate column")
    if len(names) == 1 and NUMBER.fullmatch(names[0]) and not choose:
        names, rows = ["cpi"], itertools.chain([first], rows)
    if NUMBER.fullmatch(names[0]):
        raise ValueError("its first line does not name the columns")
    read = choose(names) if choose else MEASURES
    columns = {name: array("d") for name in names if name in read}
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise ValueError(f"row {number} has {len(row)} values, the header {len(names)}")
        for name, value in zip(names, row, strict=True):
            if name in columns:
                columns[name].append(_number(value, name))
    return {name: np.array(values, np.float64) for name, values in columns.items()}


def _number(value: Any, name: str) -> float:
    if value is None or (isinstance(value, str) and not value.strip()):
        return float("nan")
    # Python reads 1_5 as 15.
    if isinstance(value, bool) or not isinstance(value, str | int | float) or "_" in str(value):
        raise ValueError(f"{name} holds {str(value)[:40]!r}, which is not a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{name} holds {str(value)[:40]!r}, which is not a number") from None


def _json(data: bytes) -> dict[str, Array]:
    value = loads_json(data)
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        if not all(isinstance(row, Mapping) for row in value):
            raise ValueError("some of its entries are not objects")
        rows = [_flat(row) for row in value]
        names = list(dict.fromkeys(name for row in rows for name in row))
        value = {name: [row.get(name) for row in rows] for name in names}
    elif isinstance(value, list):
        value = {"cpi": value}
    else:
        value = _flat(value)
    if CYCLES in value and INSTRUCTIONS in value:
        return _timeline(value)
    columns = {
        name: np.array([_number(one, name) for one in value[name]], np.float64)
        for name in value
        if name in MEASURES and isinstance(value[name], list)
    }
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError("its lists have different lengths")
    if not columns:
        raise ValueError(f"it holds none of {', '.join(sorted(MEASURES))}")
    return columns


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested objects as one, names joined with dots; `{"value": x}` is x."""
    result: dict[str, Any] = {}
    for name, one in value.items():
        key = f"{before}{name}"
        if isinstance(one, Mapping):
            if "value" in one:
                result[key] = one["value"]
            result |= _flat(one, f"{key}.")
        else:
            result[key] = one
    return result


def _timeline(value: Mapping[str, Any]) -> dict[str, Array]:
    """Return the CPI of gem5's statistics, which were dumped after each interval.

    `simInsts` is never reset. If the statistics are reset at each dump, as for SemanticBBV,
    `numCycles` is of each interval, else a running total too; it is none where it does not rise.
    """
    columns = []
    for name in (CYCLES, INSTRUCTIONS):
        if not isinstance(value[name], list):
            raise ValueError(f"{name} is not a list")
        columns.append(np.array([_number(one, name) for one in value[name]], np.float64))
        if np.isnan(columns[-1]).any():
            raise ValueError(f"a value of {name} is missing")
    cycles, instructions = columns[0], np.diff(columns[1], prepend=0.0)
    if len(cycles) != len(instructions):
        raise ValueError("its lists have different lengths")
    if (instructions < 0).any():
        raise ValueError(f"{INSTRUCTIONS} is not a running total: a value is smaller")
    if (np.diff(cycles)[instructions[1:] > 0] > 0).all():
        each = np.diff(cycles, prepend=0.0)
        if len(cycles) > 1 and (
            len(cycles) < FEW
            or (np.diff(instructions) > 0).all()
            or cycles[0] * np.median(instructions[1:])
            > SLOW_START * np.median(each[1:]) * instructions[0]
        ):
            raise ValueError(
                f"{CYCLES} rises: it may be a running total, or of each of {len(cycles)} intervals"
            )
        cycles = each
    with np.errstate(divide="ignore", invalid="ignore"):
        cpi = np.where(instructions > 0, cycles / instructions, np.nan)
    return {"cpi_simulated": cpi, "instructions": instructions}


def check_measures(measures: Measures, sums: Array, path: Path | str, trace: Path | str) -> None:
    """Compare the intervals of a file with those of a trace."""
    where = str(path)
    hint = f"measures and {trace} are of one execution, with a row an interval"
    if measures.numbers is not None and len(measures.numbers):
        first = measures.numbers[0]
        steps = np.diff(measures.numbers)
        if first not in (0, 1) or (steps != 1).any():
            wrong = 0 if first not in (0, 1) else 1 + int((steps != 1).argmax())
            before = f" after interval {measures.numbers[wrong - 1]:.15g}" if wrong else ""
            raise TokmillError(
                f"row {wrong} is interval {measures.numbers[wrong]:.15g}{before}",
                where=where,
                hint="rows are in the order of their intervals, without gaps, from 0 or 1",
            )
    difference = measures.length - len(sums)
    if difference:
        kind = "missing" if difference < 0 else "surplus"
        raise TokmillError(
            f"{human_count(abs(difference), f'{kind} interval')}: "
            f"{measures.length:,} here and {len(sums):,} in the trace",
            where=where,
            hint=hint,
        )
    if measures.instructions is None or not len(sums):
        return
    here = measures.instructions
    off = np.abs(here - sums) > CLOSE * np.maximum(np.maximum(here, sums), 1)
    # Where no number is given, nothing is above it.
    if not off.any():
        return
    row = int(off.argmax())
    raise TokmillError(
        f"{human_count(int(off.sum()), 'interval')} of {len(sums):,} with other numbers of "
        f"instructions; interval {row}: {measures.instructions[row]:,.0f} here, {sums[row]:,} in "
        "the trace",
        where=where,
        hint=f"{hint}, and not shifted; producers count REP instructions differently",
    )


def read_rates(path: Path, sums: Array, trace: Path) -> dict[str, Floats]:
    """Return the rates in a file of the intervals of a trace, whose instructions are `sums`.

    Those of `RATES` that it has; a table that has none of them: all columns but those like CPI.
    """
    rates = read_table(path, len(sums), parse=_parse_rates)
    check_measures(Measures({}, {}, rates.pop(COUNTED, None), None, len(sums)), sums, path, trace)
    if not rates:
        raise TokmillError("the file has no rate", where=str(path), hint="CPI and time are none")
    return rates


def _parse_rates(data: bytes) -> dict[str, Array]:
    columns = _json(data) if data.lstrip()[:1] in (b"[", b"{") else _csv(data, _of_rates)
    wanted = _of_rates(list(columns))
    return {name: column for name, column in columns.items() if name in wanted}


def _of_rates(names: Sequence[str]) -> Sequence[str]:
    if any(name in RATES for name in names):
        return (INTERVAL, COUNTED, *RATES)
    return [name for name in names if not LIKE_CPI.fullmatch(name)]
