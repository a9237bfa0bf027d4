"""`tokmill rl search|replay|show`, and the group of all commands of `rl`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.cli import rl_train, rl_tune
from tokmill.cli.options import AsJson, Quiet
from tokmill.cli.output import print_json, print_table, say
from tokmill.cli.rl_problems import (
    BASELINES,
    FILES,
    CacheFile,
    Modules,
    Runs,
    SpaceName,
    Threads,
    continuing,
    iree_line,
    problems_of,
    space_called,
)
from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.files import make_folder, read_start, write_file
from tokmill.progress import Progress, human_count

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Find and replay schedules of MLIR modules, by measured time.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

LONGEST_SPEC = 16 << 20
PUBLISHED = "published ms"
"""Unscheduled, on another machine."""

app.command()(rl_train.train)
app.command("eval")(rl_train.evaluate)
app.command()(rl_tune.tune)


@app.command()
def show(modules: Modules, as_json: AsJson = False) -> None:
    """List the operations of modules: loops, iterators, arithmetic, producers."""
    problems = problems_of(modules)
    found: list[dict[str, Any]] = [
        {
            "module": problem.name,
            "operation": each.tag,
            "name": each.name,
            "loops": list(each.bounds),
            "iterators": "".join("p" if one else "r" for one in each.parallel),
            "arithmetic": sum(each.arithmetic),
            "producers": [f"op_{number}" for _, number in each.producers],
            **_published(problem),
        }
        for problem in problems
        for each in problem.operations
    ]
    if as_json:
        print_json(found)
        return
    published = [PUBLISHED] * any("published_milliseconds" in row for row in found)
    print_table(
        ["module", "operation", "name", "loops", "iterators", "producers", *published],
        [
            [
                row["module"],
                row["operation"],
                row["name"],
                " × ".join(map(str, row["loops"])),
                row["iterators"],
                " ".join(row["producers"]),
                *_shown(row, published),
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
    space: SpaceName = "loops",
    budget: Annotated[int, typer.Option(min=1, help="Schedules measured, a module.")] = 64,
    seed: Annotated[int, typer.Option(help="Of random choices and of the inputs' numbers.")] = 0,
    runs: Runs = 5,
    threads: Threads = 1,
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
    problems = problems_of(modules)
    settings = measure.Settings(runs=runs, seed=seed, threads=threads)
    found = []
    with (
        continuing(cache),
        measure.Measurements(settings, cache, space_called(space)) as measurements,
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
            name = f"{number:03d}.{FILES[space]}.mlir"
            write_file(folder / name, one["text"])
            write_file(folder / f"{number:03d}.mlir", one["code"])
            one["file"] = str(folder / name) if one["text"] else ""
    for one in found:
        del one["text"], one["code"]
    if as_json:
        print_json({"method": method, "budget": budget, "cached": cached, "modules": found})
        return
    _print_found(found, BASELINES[space])
    for one in found:
        if space == "iree" and one.get("file"):
            say(f"to apply it: {iree_line(Path(one['file']))}")
    if cached:
        say(f"{human_count(cached, 'result')} came from the cache")


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
    text = read_start(schedule, LONGEST_SPEC + 1).decode("utf-8", "replace")
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
        print_json({"module": problem.name, "space": space, **_facts(result)})
    else:
        _print_found([{"module": problem.name, "counts": {}, **_facts(result)}], BASELINES[space])
    if result.status != "ok":
        raise TokmillError(
            f"the schedule gave no result: {result.status}, {result.reason}",
            where=str(schedule),
            hint="it was made for another module, or by another version of MLIR",
        )


def _best(searches: Any, problem: Any, tried: list[Any], measurements: Any) -> dict[str, Any]:
    best = max(tried, key=searches.score)
    result = best.result
    if result.status == "ok":
        result = searches.confirmed(problem, best.schedule, measurements)
    elif (alone := measurements(problem, ())).status != "ok":
        say(f"note: {problem.name}: without a schedule too: {alone.status}, {alone.reason}")
    counts: dict[str, int] = {}
    for trial in tried:
        counts[trial.result.status] = counts.get(trial.result.status, 0) + 1
    return {
        "module": problem.name,
        "counts": counts,
        **_facts(result),
        **_published(problem),
        "actions": [repr(action) for action in best.schedule],
        "text": measurements.space.text(measurements.problem(problem), best.schedule),
        "code": problem.text,
    }


def _published(problem: Any) -> dict[str, float]:
    """Return the time that a folder of benchmarks says, which was taken on another machine."""
    if problem.published is None:
        return {}
    return {"published_milliseconds": problem.published / 1e6}


def _shown(row: dict[str, Any], published: list[str]) -> list[str]:
    time = row.get("published_milliseconds")
    return ["" if time is None else f"{time:.3f}" for _ in published]


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


def _print_found(found: list[dict[str, Any]], baseline: str) -> None:
    published = [PUBLISHED] * any("published_milliseconds" in one for one in found)
    print_table(
        ["module", "ms", baseline, "times as fast", "noise", "measured", *published],
        [
            [
                one["module"],
                f"{one['milliseconds']:.3f}",
                f"{one['baseline_milliseconds']:.3f}",
                f"{one['speedup']:.2f}" if one["status"] == "ok" else one["status"],
                f"{one['noise']:.1%}",
                ", ".join(f"{count} {status}" for status, count in sorted(one["counts"].items())),
                *_shown(one, published),
            ]
            for one in found
        ],
    )
