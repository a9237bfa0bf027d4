"""`tokmill rl search|replay|show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.cli.options import AsJson, Quiet
from tokmill.cli.output import print_json, print_table, say
from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.files import make_folder, read_start, write_file
from tokmill.progress import Progress, human_count

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Find and replay schedules of MLIR modules, by measured time.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Modules = Annotated[
    list[str],
    typer.Argument(
        metavar="MODULE...",
        help="A .mlir file, a folder of them, or sizes such as 'matmul 256 512 1024' or "
        "'matmul 64 64 64, relu'.",
    ),
]
Runs = Annotated[int, typer.Option(min=1, help="Runs of each schedule; the least time counts.")]
CacheFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Measurements are kept there and not made twice."),
]


@app.command()
def show(modules: Modules, as_json: AsJson = False) -> None:
    """List the operations of modules: loops, iterators, arithmetic, producers."""
    problems = _problems(modules)
    found = [
        {
            "module": problem.name,
            "operation": each.tag,
            "name": each.name,
            "loops": list(each.bounds),
            "iterators": "".join("p" if one else "r" for one in each.parallel),
            "arithmetic": sum(each.arithmetic),
            "producers": [f"op_{number}" for _, number in each.producers],
        }
        for problem in problems
        for each in problem.operations
    ]
    if as_json:
        print_json(found)
        return
    print_table(
        ["module", "operation", "name", "loops", "iterators", "producers"],
        [
            [
                row["module"],
                row["operation"],
                row["name"],
                " × ".join(map(str, row["loops"])),
                row["iterators"],
                " ".join(row["producers"]),
            ]
            for row in found
        ],
    )
    say("iterators: p parallel, r reduction")


@app.command()
def search(
    modules: Modules,
    method: Annotated[
        str, typer.Option("--with", help="random, greedy, beam or evolution.")
    ] = "evolution",
    budget: Annotated[int, typer.Option(min=1, help="Schedules measured, a module.")] = 64,
    seed: Annotated[int, typer.Option(help="Of random choices and of the inputs' numbers.")] = 0,
    runs: Runs = 5,
    cache: CacheFile = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FOLDER", help="Write the best schedules there."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the best schedule of each module within a number of measurements.

    Each result is compared with the unscheduled module, and the best one is measured again in a
    fresh process: a gain within the noise of the baseline is none.
    """
    searches = plugins.require("tokmill.mlir.search")
    measure = plugins.require("tokmill.mlir.measure")
    if method not in searches.SEARCHES:
        raise UsageError(
            f"--with {method}: there is no such search", hint=nearest(method, searches.SEARCHES)
        )
    problems = _problems(modules)
    settings = measure.Settings(runs=runs, seed=seed)
    found = []
    with (
        measure.Measurements(settings, cache) as measurements,
        Progress("search", budget * len(problems), unit="schedules", quiet=quiet) as progress,
    ):
        for problem in problems:
            tried = []
            for trial in searches.SEARCHES[method](problem, measurements, budget, seed):
                tried.append(trial)
                progress.advance(1)
            found.append(_best(searches, problem, tried, measurements))
        cached = measurements.hits
    if out is not None:
        folder = make_folder(out)
        for number, one in enumerate(found):
            write_file(folder / f"{number:03d}.schedule.mlir", one["text"])
            write_file(folder / f"{number:03d}.mlir", one["code"])
    for one in found:
        del one["text"], one["code"]
    if as_json:
        print_json({"method": method, "budget": budget, "cached": cached, "modules": found})
        return
    _print_found(found)
    if cached:
        say(f"{human_count(cached, 'result')} came from the cache")


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
    """Apply a schedule to a module, compare the results with the unscheduled ones, time both."""
    actions = plugins.require("tokmill.mlir.schedule")
    measure = plugins.require("tokmill.mlir.measure")
    searches = plugins.require("tokmill.mlir.search")
    (problem,) = _problems([module])
    text = read_start(schedule, actions.MOST + 1).decode("utf-8", "replace")
    taken = actions.read(text, str(schedule))
    with measure.Measurements(measure.Settings(runs=runs)) as measurements:
        result = searches.measured(problem, taken, measurements).result
    if as_json:
        print_json({"module": problem.name, **_facts(result)})
    else:
        _print_found([{"module": problem.name, "counts": {}, **_facts(result)}])
    if result.status != "ok":
        raise TokmillError(
            f"the schedule gave no result: {result.status}, {result.reason}",
            where=str(schedule),
            hint="it was made for another module, or by another version of MLIR",
        )


def _problems(modules: list[str]) -> list[Any]:
    problem = plugins.require("tokmill.mlir.problem")
    found: list[Any] = []
    for name in modules:
        path = Path(name)
        if path.is_dir():
            inside = sorted(path.glob("*.mlir"))
            if not inside:
                raise TokmillError(
                    "no .mlir file lies there", where=name, hint="name files, or another folder"
                )
            if others := sum(1 for _ in path.iterdir()) - len(inside):
                entries = human_count(others, "entry", "entries")
                say(f"note: {name}: {entries} not named .mlir left out")
            found += [problem.of_file(one) for one in inside]
        elif path.suffix == ".mlir" or path.exists():
            found.append(problem.of_file(path))
        else:
            found.append(problem.of_line(name))
    return found


def _best(searches: Any, problem: Any, tried: list[Any], measurements: Any) -> dict[str, Any]:
    best = max(tried, key=searches.score)
    legal = plugins.require("tokmill.mlir.legal")
    parts = legal.decomposed(legal.replay(problem.operations, best.schedule))
    result = best.result
    if result.status == "ok":
        result = measurements(problem.text, best.schedule, parts, problem.length, again=True)
    counts: dict[str, int] = {}
    for trial in tried:
        counts[trial.result.status] = counts.get(trial.result.status, 0) + 1
    actions = plugins.require("tokmill.mlir.schedule")
    return {
        "module": problem.name,
        "counts": counts,
        **_facts(result),
        "actions": [repr(action) for action in best.schedule],
        "text": actions.text(best.schedule, parts),
        "code": problem.text,
    }


def _facts(result: Any) -> dict[str, Any]:
    return {
        "status": result.status,
        "reason": result.reason,
        "milliseconds": result.nanoseconds / 1e6,
        "baseline_milliseconds": result.baseline / 1e6,
        "speedup": result.gain,
        "noise": result.noise,
        "error": result.error,
        "allowed_error": result.allowed,
    }


def _print_found(found: list[dict[str, Any]]) -> None:
    print_table(
        ["module", "ms", "unscheduled", "times as fast", "noise", "measured"],
        [
            [
                one["module"],
                f"{one['milliseconds']:.3f}",
                f"{one['baseline_milliseconds']:.3f}",
                f"{one['speedup']:.2f}" if one["status"] == "ok" else one["status"],
                f"{one['noise']:.1%}",
                ", ".join(f"{count} {status}" for status, count in sorted(one["counts"].items())),
            ]
            for one in found
        ],
    )
