"""`tokmill rl search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from msgspec.structs import replace

from tokmill import plugins, recipe
from tokmill.cli import rl_best
from tokmill.cli.options import AsJson, Quiet
from tokmill.cli.output import print_json, say
from tokmill.cli.rl_problems import (
    BASELINES,
    FILES,
    RUNS,
    SEED,
    SPACE,
    CacheFile,
    Threads,
    continuing,
    iree_line,
    problems_of,
    space_called,
)
from tokmill.cli.rl_shown import print_results, published_time
from tokmill.errors import UsageError, nearest
from tokmill.files import make_folder
from tokmill.mlir.facts import facts_of_result
from tokmill.progress import Progress, human_count


class Plan(NamedTuple):
    """What is searched, and how it is measured."""

    problems: list[Any]
    inputs: list[str]
    """Files and folders that are read."""
    space: Any
    evaluations: int
    """Schedules that are measured, a module."""
    seed: int
    settings: Any
    cache: Path | None


def search(
    modules: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE...|RECIPE",
            help="A .mlir file, a folder of them, or sizes such as 'matmul 256 512 1024' or "
            "'matmul 64 64 64, relu'. Or a recipe of `rl train`: its modules, as it measures "
            "them, with as many evaluations as it makes, unless options say otherwise.",
        ),
    ],
    method: Annotated[
        str, typer.Option("--with", help="random, greedy or evolution.")
    ] = "evolution",
    space: Annotated[str | None, SPACE] = None,
    evaluations: Annotated[
        int | None, typer.Option(min=1, help="Schedules measured, a module. Default: 64.")
    ] = None,
    seed: Annotated[int | None, SEED] = None,
    runs: Annotated[int | None, RUNS] = None,
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
    if recipe.is_recipe(modules[0]):
        plan = _of_recipe(modules)
    else:
        problems = problems_of(modules)
        plan = Plan(problems, modules, space_called("loops"), 64, 0, measure.Settings(), None)
    plan = Plan(
        plan.problems,
        plan.inputs,
        plan.space if space is None else space_called(space),
        evaluations or plan.evaluations,
        plan.seed if seed is None else seed,
        replace(
            plan.settings,
            runs=runs or plan.settings.runs,
            seed=plan.settings.seed if seed is None else seed,
            threads=threads,
        ),
        cache or plan.cache,
    )
    name = plan.space.name
    if out is not None:
        count = len(plan.problems)
        rl_best.check(out, count, FILES[name], plan.inputs, {"--cache": plan.cache})
        # Before the search: it may take hours.
        make_folder(out)
    found, cached = [], 0
    count = plan.evaluations * len(plan.problems)
    with (
        continuing(plan.cache),
        measure.Measurements(plan.settings, plan.cache, plan.space) as measurements,
        Progress("search", count, unit="schedules", quiet=quiet) as progress,
    ):
        for problem in plan.problems:
            tried = []
            trials = searches.SEARCHES[method](problem, measurements, plan.evaluations, plan.seed)
            for trial in searches.while_it_runs(trials, problem, measurements):
                tried.append(trial)
                progress.advance(1)
            found.append(_best(searches, problem, tried, measurements))
        cached = measurements.hits
    rows = [one.row for one in found]
    if out is not None:
        rows = rl_best.write(out, FILES[name], found)
    if as_json:
        print_json(
            {"method": method, "evaluations": plan.evaluations, "cached": cached, "modules": rows}
        )
        return
    print_results(rows, BASELINES[name])
    for one in rows:
        if one["status"] == "ok" and one["speedup"] <= 1:
            say(f"note: {one['module']}: no schedule that was measured is faster than none")
        if name == "iree" and one.get("file"):
            say(f"to apply it: {iree_line(Path(one['file']), one['module_file'])}")
    if cached:
        say(f"{human_count(cached, 'result')} came from the cache")


def _of_recipe(modules: list[str]) -> Plan:
    """Return what a recipe of `rl train` learns from, and how it measures it."""
    if len(modules) > 1:
        raise UsageError(
            f"a recipe has modules of its own, and {modules[1]} is named too",
            where=modules[0],
            hint="name modules, or one recipe",
        )
    resolving = plugins.require("tokmill.training.recipe.resolve")
    naming = plugins.require("tokmill.rl.modules")
    task = recipe.read_toml(modules[0]).get("task", {})
    kind = task.get("kind") if isinstance(task, dict) else task
    if kind != "schedules":
        raise UsageError(
            f"the recipe is of the task {kind}, not schedules",
            where=modules[0],
            hint="`tokmill recipe list` shows those of the task schedules, such as schedules-lstm",
        )
    config = resolving.resolve(Path(modules[0]), Path("RUN"), {}, resume=False)
    if config.model.kind != "policy":
        raise UsageError(
            "the task schedules needs a policy",
            where=f"{modules[0]}: model.kind",
            hint='kind = "policy" in the table [model]',
        )
    problems = naming.to_learn(config.task, config.model.sizes)
    evaluations = config.run.steps * config.task.bench_count
    folders = [config.task.benchmarks_folder_path, config.task.held_out_folder_path]
    recipes = [modules[0]] if Path(modules[0]).is_file() else []
    return Plan(
        problems,
        [*recipes, *filter(None, folders)],
        space_called(config.model.space),
        max(1, evaluations // len(problems)),
        config.run.seed,
        plugins.require("tokmill.rl.loop").settings_of(config.task),
        Path(config.task.cache) if config.task.cache else None,
    )


def _best(searches: Any, problem: Any, tried: list[Any], measurements: Any) -> rl_best.Best:
    best = searches.best_of(problem, tried, measurements)
    if (
        not any(trial.result.status == "ok" for trial in tried)
        and (alone := measurements(problem, ())).status != "ok"
    ):
        say(f"note: {problem.name}: without a schedule too: {alone.status}, {alone.reason}")
    counts: dict[str, int] = {}
    for trial in tried:
        counts[trial.result.status] = counts.get(trial.result.status, 0) + 1
    row = {
        "module": problem.name,
        "counts": counts,
        **facts_of_result(best.result),
        **published_time(problem),
        "actions": [repr(action) for action in best.schedule],
    }
    text = measurements.space.text(measurements.problem(problem), best.schedule)
    return rl_best.Best(row, text, problem.text)
