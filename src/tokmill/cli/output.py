"""Results to stdout, talk to stderr; `--json` wherever something is reported."""

from __future__ import annotations

import sys
from typing import Any

import msgspec


def say(text: str) -> None:
    """Print talk (not a result) to stderr."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a result as indented JSON to stdout."""
    encoded = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(encoded.decode() + "\n")


def print_table(headers: list[str], rows: list[list[Any]]) -> None:
    """Print rows as an aligned plain table to stdout; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max([len(header), *(len(row[i]) for row in cells)]) for i, header in enumerate(headers)
    ]
    right = [bool(rows) and isinstance(rows[0][i], int | float) for i in range(len(headers))]

    def line(values: list[str]) -> str:
        padded = [
            value.rjust(width) if is_right else value.ljust(width)
            for value, width, is_right in zip(values, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    print(line(headers))
    print(line(["-" * width for width in widths]))
    for row in cells:
        print(line(row))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
