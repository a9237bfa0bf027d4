"""`tokmill rl replay|show`, and the group of all commands of `rl`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.cli import rl_search, rl_train, rl_tune
from tokmill.cli.options import AsJson
from tokmill.cli.output import print_json, print_table, say
from tokmill.cli.rl_problems import (
    BASELINES,
    Modules,
    Runs,
    Threads,
    problems_of,
    space_called,
)
from tokmill.cli.rl_shown import (
    PUBLISHED,
    print_results,
    published_time,
    shown_times,
)
from tokmill.errors import TokmillError, UsageError
from tokmill.files import read_file
from tokmill.mlir.facts import facts_of_result

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Find and replay schedules of MLIR modules, by measured time.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(rl_search.search)
app.command()(rl_train.train)
app.command("eval")(rl_train.evaluate)
app.command()(rl_tune.tune)


@app.command()
def show(modules: Modules, as_json: AsJson = False) -> None:
    """List the operations of modules: loops, iterators, arithmetic, vectors, producers."""
    problems = problems_of(modules)
    found: list[dict[str, Any]] = [
        {
            "module": problem.name,
            "operation": each.tag,
            "name": each.name,
            "loops": list(each.bounds),
            "iterators": "".join("p" if one else "r" for one in each.parallel),
            "arithmetic": sum(each.arithmetic),
            "vectorizable": each.vectorizable,
            "producers": [f"op_{number}" for _, number in each.producers],
            **published_time(problem),
        }
        for problem in problems
        for each in problem.operations
    ]
    if as_json:
        print_json(found)
        return
    published = [PUBLISHED] * any("published_milliseconds" in row for row in found)
    print_table(
        ["module", "operation", "name", "loops", "iterators", "vectors", "producers", *published],
        [
            [
                row["module"],
                row["operation"],
                row["name"],
                " × ".join(map(str, row["loops"])),
                row["iterators"],
                "yes" if row["vectorizable"] else "no",
                " ".join(row["producers"]),
                *shown_times(row, published),
            ]
            for row in found
        ],
    )
    say("iterators: p parallel, r reduction; vectors: whether it can become vectors uncut if small")


@app.command()
def replay(
    module: Annotated[
        str, typer.Argument(metavar="MODULE", help="A .mlir file, or sizes as for `search`.")
    ],
    schedule: Annotated[
        Path,
        typer.Argument(
            metavar="SCHEDULE", help="A schedule that `search` wrote, or a tuning spec."
        ),
    ],
    runs: Runs = 5,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Apply a schedule to a module, compare the results with those without it, time both.

    A tuning spec of IREE is compiled by IREE, and compared with IREE's default.
    """
    actions = plugins.require("tokmill.mlir.loops.schedule")
    measure = plugins.require("tokmill.mlir.measure")
    problems = problems_of([module])
    if len(problems) != 1:
        raise UsageError(
            f"the folder has {len(problems):,} modules", where=module, hint="name one of them"
        )
    (problem,) = problems
    most = plugins.require("tokmill.mlir.iree.spec").MOST
    data = read_file(schedule, most + 1)
    if len(data) > most:
        raise TokmillError(
            f"the file has more than {most >> 20} MiB",
            where=str(schedule),
            hint="schedules and specs are small: is it another file?",
        )
    text = data.decode("utf-8", "replace")
    space = "loops" if text.startswith(actions.HEADER) else "iree"
    if space == "iree" and "iree_codegen.tuning_spec_entrypoint" not in text:
        # It says what a schedule begins with.
        actions.read(text, str(schedule))
    settings = measure.Settings(runs=runs, threads=threads)
    with measure.Measurements(settings, None, space_called(space)) as made:
        if space == "iree":
            result = made.file(problem, text)
        else:
            result = made(problem, actions.read(text, str(schedule)))
    if as_json:
        print_json({"module": problem.name, "space": space, **facts_of_result(result)})
    else:
        print_results(
            [{"module": problem.name, "counts": {}, **facts_of_result(result)}], BASELINES[space]
        )
    if result.status != "ok":
        raise TokmillError(
            f"the schedule gave no result: {result.status}, {result.reason}",
            where=str(schedule),
            hint="it was made for another module, or by another version of MLIR",
        )
