"""A comparison of runs as text columns, LaTeX and JSON; and values as CSV."""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokmill.base.errors import one_line
from tokmill.report.comparison.compare_runs import SEEDS, Comparison, Group
from tokmill.report.describe.recogniser import short_names

INTERVAL = "± 95 %"

SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "…": r"\dots{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip
"""Characters with a special meaning in LaTeX → how they are escaped."""

FORMULA = "=+-@"
NUMBER = re.compile(r"[-+][\d.]+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Column:
    """A column of a table for people; "-" is an unknown value."""

    header: str
    cells: list[str]
    right: bool
    """Whether it holds numbers."""


def columns(comparison: Comparison) -> list[Column]:
    """Return the keys that differ, the metric with its interval, and targets, speed and time."""
    groups = comparison.groups

    def numbers(header: str, value: Callable[[Group], float | None], form: str) -> Column:
        values = [value(one) for one in groups]
        return Column(header, ["-" if v is None else format(v, form) for v in values], True)

    after = [
        numbers("seeds", lambda one: len(one.members), ","),
        Column(comparison.metric, [rounded(one.mean, one.mean) for one in groups], True),
        Column(INTERVAL, [rounded(one.half, one.mean) for one in groups], True),
    ]
    if any(m.value is not None and m.step != m.run.step for one in groups for m in one.members):
        after.append(Column("step", [_step(one) for one in groups], True))
    after += [
        Column("steps", [_steps(one) for one in groups], True),
        numbers("targets", lambda one: one.average("targets"), ",.0f"),
        numbers("parameters", lambda one: one.first.run.parameters, ","),
        numbers("tokens/s", lambda one: one.average("tokens_per_second"), ",.0f"),
        numbers("seconds", lambda one: one.average("seconds"), ",.1f"),
    ]
    # The column "steps" shows this key already.
    keys = [key for key in comparison.columns if key != "run.steps"]
    taken = ["run", *(column.header for column in after), *(k.split(".")[-1] for k in keys)]
    shown = settings(comparison)
    before = [Column("run", [one.name for one in groups], False)]
    for key in keys:
        short = key.rpartition(".")[2]
        values = [one[key] for one in shown]
        are_numbers = any(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        header = short if taken.count(short) == 1 else key
        before.append(Column(header, [_plain(value) for value in values], are_numbers))
    return before + after


def text_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows for a terminal; a star marks the best value."""
    padded = []
    for column in columns(comparison):
        cells = column.cells
        if column.header == comparison.metric and any(one.best for one in comparison.groups):
            marks = ["*" if one.best else " " for one in comparison.groups]
            cells = [cell + mark for cell, mark in zip(cells, marks, strict=True)]
        width = max(map(len, [column.header, *cells])) if column.right else 0
        padded.append([cell.rjust(width) for cell in [column.header, *cells]])
    headers, *rows = map(list, zip(*padded, strict=True))
    return headers, rows


def write_latex(comparison: Comparison) -> str:
    """Return a `tabular` for the package booktabs; the best value is bold."""
    table = [column for column in columns(comparison) if column.header != INTERVAL]
    halves = next(column.cells for column in columns(comparison) if column.header == INTERVAL)
    lines = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{{''.join('r' if column.right else 'l' for column in table)}}}",
        "\\toprule",
        " & ".join(escape(column.header) for column in table) + " \\\\",
        "\\midrule",
    ]
    for number, one in enumerate(comparison.groups):
        cells = []
        for column in table:
            cell = escape(column.cells[number])
            if column.header == comparison.metric:
                cell = f"\\textbf{{{cell}}}" if one.best else cell
                cell += f" $\\pm$ {halves[number]}" if one.half is not None else ""
            cells.append(cell)
        lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def escape(text: str) -> str:
    return "".join(SPECIAL.get(sign, sign) for sign in one_line(text))


def csv_text(lines: Iterable[Iterable[Any]]) -> str:
    """Return lines as CSV, each cell in one line.

    A spreadsheet takes a text that begins with one of `FORMULA` for a formula, which may run
    programs: such a text that is no number gets an apostrophe before it.
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(_cell, line) for line in lines)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = one_line(value)
    return f"'{text}" if text[:1] in FORMULA and text and not NUMBER.fullmatch(text) else text


def as_row(one: Group) -> dict[str, Any]:
    taken = [member.step for member in one.members]
    return {
        "name": one.name,
        "seeds": len(one.members),
        "mean": one.mean,
        "half_width_95": one.half,
        "best": one.best,
        "finished": one.finished,
        "step_min": min(taken),
        "step_max": max(taken),
        "steps": one.first.run.steps,
        "targets": one.average("targets"),
        "parameters": one.first.run.parameters,
        "tokens_per_second": one.average("tokens_per_second"),
        "seconds": one.average("seconds"),
    }


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values, with the value of each seed."""
    groups = []
    for one, shown in zip(comparison.groups, settings(comparison), strict=True):
        runs = [
            {
                "path": str(member.run.path),
                **{key: member.run.flat[key] for key in SEEDS},
                "value": member.value,
                "step": member.step,
                "state": member.run.state,
                "targets": member.targets,
                "tokens_per_second": member.tokens_per_second,
                "seconds": member.seconds,
                "fingerprint": member.run.facts.fingerprint,
                "vocabularies": member.run.vocabularies,
            }
            for member in one.members
        ]
        groups.append({**as_row(one), "settings": shown, "runs": runs})
    return {
        "metric": comparison.metric,
        "at": comparison.at,
        "better": "higher" if comparison.higher else "lower",
        "comparable": comparison.comparable,
        "differ": comparison.columns,
        "groups": groups,
        "notes": comparison.notes,
    }


def settings(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the keys that differ for each group; stores as names, None for a missing key."""
    shown = [
        {key: one.settings.get(key) for key in comparison.columns} for one in comparison.groups
    ]
    for key in {"data.train", "data.val"} & set(comparison.columns):
        digests = [str(one.settings[key] or "") for one in comparison.groups]
        places = {
            d: _place(one, key) for d, one in zip(digests, comparison.groups, strict=True) if d
        }
        names = dict(zip(places, short_names(list(places.values())), strict=True))
        for digest, values in zip(digests, shown, strict=True):
            # Two stores with the same place: it was built again between the runs.
            twice = list(names.values()).count(names.get(digest, "")) > 1
            values[key] = f"{names[digest]} {digest[:8]}" if twice else names.get(digest)
    return shown


def _place(one: Group, key: str) -> Path:
    """Return the place of a store; several stores have one joined name."""
    place = one.first.run.flat[key]
    paths = [Path(path) for path in ([place] if isinstance(place, str) else place)]
    return paths[0].parent / " + ".join(path.name for path in paths)


def rounded(value: float | None, mean: float | None) -> str:
    """Return a value with the decimals that give its mean five digits, at most 6."""
    if value is None or mean is None:
        return "-"
    if 1e6 <= abs(mean) < math.inf:
        return f"{value:.4e}"
    size = math.floor(math.log10(abs(mean))) if mean and math.isfinite(mean) else 0
    return f"{value:,.{min(max(4 - size, 0), 6)}f}"


def _step(one: Group) -> str:
    taken = [member.step for member in one.members]
    return f"{min(taken):,}" if len(set(taken)) == 1 else f"{min(taken):,} to {max(taken):,}"


def _steps(one: Group) -> str:
    steps = f"{one.first.run.steps:,}"
    return steps if one.finished else f"{min(m.run.step for m in one.members):,} of {steps}"


def _plain(value: Any, missing: str = "-") -> str:
    if value is None or value in ("", []):
        return missing
    return value if isinstance(value, str) else json.dumps(value)
