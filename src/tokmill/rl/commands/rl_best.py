"""The folder with the best schedules that `rl search` and `rl eval` write.

`results.json` in it says what was found for each module and which files hold it. It is the mark of
such a folder: only files that it names are replaced or removed. A later result takes the place of
the earlier one as a whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tokmill.base.errors import UsageError
from tokmill.base.files import read_file, remove, write_file
from tokmill.base.headers import loads_json
from tokmill.rl.commands.rl_problems import check_files
from tokmill.store.manifest import encode

RESULTS = "results.json"
FORMAT = "tokmill best schedules 1"
NAME = re.compile(r"\d{3,}(\.schedule)?\.mlir")
"""Names that are written: others are never removed, whatever `results.json` says."""
LARGEST = 64 << 20
"""Bytes that `results.json` may have."""


class Best(NamedTuple):
    """What is written of one module."""

    row: dict[str, Any]
    """What is found, as JSON has it."""
    schedule: str
    """The best schedule as a file; "" for none."""
    module: str
    """The text of the module."""


class _Row(msgspec.Struct, frozen=True):
    file: str = ""
    module_file: str = ""


class _Results(msgspec.Struct, frozen=True):
    format: Literal["tokmill best schedules 1"]
    modules: tuple[_Row, ...] = ()


def check(
    folder: Path, count: int, inputs: Sequence[str], others: Mapping[str, Path | None]
) -> None:
    """Refuse a folder where the best schedules of `count` modules would replace other files.

    `inputs`: modules and folders of them that are read; `others`: option → another file that is
    written. Raises `UsageError`.
    """
    files = [RESULTS]
    for number in range(count):
        files += _names(number)
    check_files(list(inputs), {**others, **{f"-o {name}": folder / name for name in files}})
    own = _earlier(folder)
    for name in files:
        if name not in own and os.path.lexists(folder / name):
            raise UsageError(
                "the file is there already, and no earlier result names it",
                where=str(folder / name),
                hint="choose another folder for -o, or move the file",
            )


def write(folder: Path, found: Sequence[Best]) -> list[dict[str, Any]]:
    """Write the best schedules; return the rows of all modules, with the paths of their files.

    `file` is that of the schedule, "" if there is none, and `module_file` that of the module.
    The files of an earlier result are removed before.
    """
    for name in _earlier(folder) - {RESULTS}:
        remove(folder / name)
    rows: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for number, one in enumerate(found):
        schedule, module = _names(number)
        rows.append({**one.row, "file": one.schedule and schedule, "module_file": module})
        texts |= {schedule: one.schedule, module: one.module}
    # Before the files that it names: what is killed here is still a result of tokmill.
    write_file(folder / RESULTS, encode({"format": FORMAT, "modules": rows}))
    for name, text in texts.items():
        if text:
            write_file(folder / name, text)
    return [
        row | {key: row[key] and str(folder / row[key]) for key in ("file", "module_file")}
        for row in rows
    ]


def _names(number: int) -> tuple[str, str]:
    return f"{number:03d}.schedule.mlir", f"{number:03d}.mlir"


def _earlier(folder: Path) -> set[str]:
    """Return the names of the files of an earlier result, `results.json` too; none without one."""
    path = folder / RESULTS
    with contextlib.suppress(ValueError):
        if path.is_file():
            held: _Results = loads_json(read_file(path, LARGEST), _Results)
            named = {name for row in held.modules for name in (row.file, row.module_file) if name}
            return {RESULTS, *filter(NAME.fullmatch, named)}
    return set()
