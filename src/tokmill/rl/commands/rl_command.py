"""`tokmill rl replay|show`, and the group of all commands of `rl`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import read_file
from tokmill.cli import train_command as training
from tokmill.rl.commands import rl_eval, rl_search, rl_tune
from tokmill.rl.commands.rl_problems import (
    Modules,
    Runs,
    print_faster_baselines,
    print_results,
    problems_of,
    row_of,
)
from tokmill.terminal.frame import AsJson
from tokmill.terminal.output import print_json, print_table, say

LARGEST = 16 << 20
"""Bytes that a schedule may have."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Find and replay schedules of MLIR modules, by measured time.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(rl_search.search)
app.command(
    "train",
    help="Learn to schedule modules: `tokmill train` with a recipe of the task schedules, such as "
    "schedules-lstm, or a JSON file of settings.",
)(training.train)
app.command("eval")(rl_eval.evaluate)
app.command()(rl_tune.tune)


@app.command()
def show(modules: Modules, as_json: AsJson = False) -> None:
    """List the operations of modules: loops, iterators (p parallel, r reduction), producers."""
    rows: list[dict[str, Any]] = [
        {
            "module": problem.name,
            "operation": each.tag,
            "name": each.name,
            "loops": list(each.bounds),
            "iterators": "".join("p" if parallel else "r" for parallel in each.parallel),
            "arithmetic": sum(each.arithmetic),
            "vectorizable": each.vectorizable,
            "producers": [f"op_{number}" for _, number in each.producers],
        }
        for problem in problems_of(modules)
        for each in problem.operations
    ]
    if as_json:
        print_json(rows)
        return
    values = [[" ".join(map(str, v)) if isinstance(v, list) else v for v in row.values()]
              for row in rows]  # fmt: skip
    print_table(list(rows[0]) if rows else [], values)


@app.command()
def replay(
    module: Annotated[
        str, typer.Argument(metavar="MODULE", help="A .mlir file, or sizes as for `search`.")
    ],
    schedule: Annotated[
        Path, typer.Argument(metavar="SCHEDULE", help="A schedule that `search` wrote.")
    ],
    runs: Runs = 5,
    as_json: AsJson = False,
) -> None:
    """Apply a schedule to a module, compare the results with those without it, time both."""
    from tokmill.mlir import measure
    from tokmill.mlir import search as searches
    from tokmill.mlir.loops import schedule as actions
    from tokmill.mlir.space import IreeDefault

    problems = problems_of([module])
    if len(problems) != 1:
        raise UsageError(
            f"the folder has {len(problems):,} modules", where=module, hint="name one of them"
        )
    (problem,) = problems
    data = read_file(schedule, LARGEST + 1)
    if len(data) > LARGEST:
        raise TokmillError(
            f"the file has more than {LARGEST >> 20} MiB",
            where=str(schedule),
            hint="schedules are small: is it another file?",
        )
    text = data.decode("utf-8", "replace")
    taken = actions.read(text, str(schedule))
    settings = measure.Settings(runs=runs)
    with measure.Measurements(settings) as measurements:
        said = measurements.space.text(problem, taken).partition("\n")[2].split()
        if text.partition("\n")[2].split() not in ([], said):
            say(f"note: {schedule}: only its first line is used; the rest differs from it")
        result = measurements(problem, taken)
    with measure.Measurements(settings, None, IreeDefault()) as iree:
        row = row_of(problem, searches.Trial(taken, result), searches.iree_default(problem, iree))
    if as_json:
        print_json(row)
    else:
        print_results([row])
        print_faster_baselines([row] * (result.status == "ok"))
    if result.status != "ok":
        raise TokmillError(
            f"the schedule gave no result: {result.status}, {result.reason}",
            where=str(schedule),
            hint="it was made for another module, or by another version of MLIR",
        )
