"""What the commands of `tokmill rl` share: modules, options, and the folder of best schedules.

`results.json` in that folder says what was found for each module and which files hold it. A later
result takes the place of the earlier one as a whole; other files are never replaced.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tokmill.base.errors import Interrupted, TokmillError, UsageError
from tokmill.base.files import inside, read_file, remove
from tokmill.formats.notes import Export, is_written, write_noted
from tokmill.store.manifest import encode
from tokmill.terminal.output import check_outputs, print_table, say

OWN = b"// tokmill "
"""What a schedule that was written here begins with."""

Modules = Annotated[
    list[str],
    typer.Argument(
        metavar="MODULE...",
        help="A .mlir file, a folder of them, or sizes such as 'matmul 256 512 1024' or "
        "'matmul 64 64 64, relu'.",
    ),
]
MOST_RUNS = 1_000_000
Runs = Annotated[
    int,
    typer.Option(min=1, max=MOST_RUNS, help="Runs of each schedule; the minimum time counts."),
]
MOST_SEED = (1 << 63) - 1
"""As of recipes (`training.recipe.check.SEEDS`), but none below 0."""
SEED = typer.Option(min=0, max=MOST_SEED, help="Seed of random choices and inputs.")
CacheFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File that stores measurements for reuse."),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="FOLDER", help="Folder for the best schedules."),
]


@contextlib.contextmanager
def continuing(cache: Path | None) -> Iterator[None]:
    """Say of an interrupted command what continues it: only a cache keeps measurements."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            "by a signal",
            hint="run the same command again: it continues"
            if cache is not None
            else "nothing is kept; with --cache FILE the same command continues",
        ) from None


def check_files(modules: Sequence[str], outputs: Mapping[str, Path | None]) -> None:
    """Refuse an output that is a module, or another output; `outputs`: option → file."""
    inputs: list[Path] = []
    for name in map(Path, modules):
        inputs += filter(_is_module, name.glob("*.mlir")) if name.is_dir() else [name]
    check_outputs(outputs, inputs)


def _is_module(path: Path) -> bool:
    """Say whether a file in a folder of modules is none of tokmill's own results."""
    return path.is_file() and not read_file(path, len(OWN)).startswith(OWN)


def problems_of(modules: list[str]) -> list[Any]:
    """Return the problems that files, folders and lines of sizes name."""
    from tokmill.mlir.modules import importing, problem

    problems: list[Any] = []
    for name in modules:
        path = Path(name)
        if path.suffix.lower() == importing.ONNX and not path.exists():
            raise TokmillError("there is no such file", where=name, hint="check the path")
        if path.suffix.lower() == importing.ONNX:
            raise UsageError(
                "a model is not a single module",
                where=name,
                hint="`tokmill rl tune` takes it as a whole, `tokmill build mlir` its operations",
            )
        if path.is_dir():
            folder = problem.of_folder(path)
            for line in folder.notes(name):
                say(f"note: {line}")
            problems += folder.problems
        elif path.suffix == ".mlir" or path.exists():
            problems.append(problem.of_file(path))
        else:
            problems.append(problem.of_line(name))
    return problems


RESULTS, KIND = "results.json", "schedules"
"""The file that lists the best schedules of a folder, and the name of its note."""


class Best(NamedTuple):
    """What is written of one module."""

    row: dict[str, Any]
    """What is found, as JSON has it."""
    schedule: str
    """The best schedule as a file; "" for none."""
    module: str


def check_best(
    folder: Path, count: int, inputs: Sequence[str], outputs: Mapping[str, Path | None]
) -> None:
    """Refuse a folder where the best schedules of `count` modules would replace other files.

    `inputs`: modules and folders of them that are read; `outputs`: option → another file that is
    written. Raises `UsageError`.
    """
    files = [RESULTS, *(name for number in range(count) for name in _best_names(number))]
    check_files(inputs, {**outputs, **{f"-o {name}": folder / name for name in files}})
    for name in files:
        if os.path.lexists(folder / name) and not is_written(folder / name):
            raise UsageError(
                "the file is there already, and no earlier result names it",
                where=str(folder / name),
                hint="choose another folder for -o, or move the file",
            )


def write_best(folder: Path, results: Sequence[Best]) -> list[dict[str, Any]]:
    """Write the best schedules; return the rows of all modules, with the paths of their files.

    `file` is that of the schedule, "" if there is none, and `module_file` that of the module.
    """
    rows: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for number, one in enumerate(results):
        schedule, module = _best_names(number)
        rows.append({**one.row, "file": one.schedule and schedule, "module_file": module})
        texts |= {schedule: one.schedule, module: one.module}
    files = {RESULTS: encode({"modules": rows})} | {k: text for k, text in texts.items() if text}
    earlier = Export(folder, KIND, KIND, "").before
    for file in earlier.files if earlier else []:
        if file.name not in files:
            remove(inside(folder, file.name))
    write_noted(folder, KIND, KIND, files)
    return [
        row | {key: row[key] and str(folder / row[key]) for key in ("file", "module_file")}
        for row in rows
    ]


def _best_names(number: int) -> tuple[str, str]:
    return f"{number:03d}.schedule.mlir", f"{number:03d}.mlir"


IREE = "iree_default_milliseconds"
"""Key of a row: the time of the module by IREE's default, NaN if IREE does not run it."""


def row_of(problem: Any, best: Any, iree: Any) -> dict[str, Any]:
    """Return a schedule (`search.Trial`) and IREE's default (`measure.Result`) as JSON has them."""
    return {
        "module": problem.name,
        **best.result.facts(),
        IREE: iree.nanoseconds / 1e6,
        "iree_status": iree.status,
        "actions": [repr(action) for action in best.schedule],
    }


def print_results(results: list[dict[str, Any]]) -> None:
    counted = ["measured"] * any("counts" in one for one in results)
    print_table(
        ["module", "ms", "unscheduled", "IREE's default", "times as fast", "noise", *counted],
        [
            [
                one["module"],
                f"{one['milliseconds']:.5g}",
                f"{one['baseline_milliseconds']:.5g}",
                iree_cell(one),
                f"{one['speedup']:.2f}" if one["status"] == "ok" else one["status"],
                f"{one['noise']:.1%}",
                *[", ".join(f"{n} {status}" for status, n in sorted(one["counts"].items()))
                  for _ in counted],
            ]
            for one in results
        ],
    )  # fmt: skip


def iree_cell(row: dict[str, Any]) -> str:
    return f"{row[IREE]:.5g}" if math.isfinite(row[IREE]) else str(row["iree_status"])


def print_faster_baselines(rows: list[dict[str, Any]]) -> None:
    """Say of each row whether no schedule, or IREE's default, is faster than what was found."""
    for one in rows:
        if one["status"] != "ok":
            say(f"note: {one['module']}: {one['status']}, {one['reason']}")
        elif not one["actions"]:
            say(f"note: {one['module']}: no measured schedule is faster than the baseline")
        if one[IREE] < one["milliseconds"]:
            say(
                f"note: {one['module']}: IREE's default is "
                f"{one['milliseconds'] / one[IREE]:.2f} times as fast; `tokmill rl tune` looks "
                "for its best flags"
            )
