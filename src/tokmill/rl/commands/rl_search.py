"""`tokmill rl search`."""

from collections import Counter
from typing import Annotated, Any

import typer

from tokmill.base.errors import UsageError, nearest
from tokmill.base.files import make_folder
from tokmill.base.progress import Progress, human_count
from tokmill.rl.commands.rl_problems import (
    SEED,
    Best,
    CacheFile,
    Modules,
    Out,
    Runs,
    check_best,
    continuing,
    print_faster_baselines,
    print_results,
    problems_of,
    row_of,
    write_best,
)
from tokmill.terminal.frame import AsJson, Quiet
from tokmill.terminal.output import print_json, say


def search(
    modules: Modules,
    method: Annotated[str, typer.Option("--with", help="random or evolution.")] = "evolution",
    evaluations: Annotated[int, typer.Option(min=1, help="Schedules measured per module.")] = 64,
    seed: Annotated[int, SEED] = 0,
    runs: Runs = 5,
    cache: CacheFile = None,
    out: Out = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search for a good schedule of each module, by measured time.

    Each schedule is compiled and run in a child process, and its results are compared with those
    of the module without a schedule, the baseline. The best ones are measured again in a new
    process: a gain within the noise of the baseline does not count. The table also has the time
    of IREE's default.
    """
    from tokmill.mlir import measure
    from tokmill.mlir import search as searches
    from tokmill.mlir.space import IreeDefault

    if method not in searches.SEARCHES:
        raise UsageError(
            f"--with {method}: there is no such search", hint=nearest(method, searches.SEARCHES)
        )
    problems = problems_of(modules)
    if out is not None:
        check_best(out, len(problems), modules, {"--cache": cache})
        # Before the search: it may take hours.
        make_folder(out)
    settings = measure.Settings(runs=runs, seed=seed)
    results = []
    with (
        continuing(cache),
        measure.Measurements(settings, cache) as measurements,
        measure.Measurements(settings, cache, IreeDefault()) as iree,
        Progress("search", evaluations * len(problems), unit="schedules", quiet=quiet) as progress,
    ):
        for problem in problems:
            results.append(
                best_of(problem, method, evaluations, seed, measurements, iree, progress)
            )
        cached = measurements.hits
    rows: list[dict[str, Any]] = [one.row for one in results]
    if out is not None:
        rows = write_best(out, results)
    if as_json:
        print_json(
            {"method": method, "evaluations": evaluations, "cached": cached, "modules": rows}
        )
        return
    print_results(rows)
    print_faster_baselines(rows)
    if cached and cache is not None:
        say(f"{human_count(cached, 'result')} from the cache")


def best_of(
    problem: Any,
    method: str,
    evaluations: int,
    seed: int,
    measurements: Any,
    iree: Any,
    progress: Progress,
) -> Best:
    """Return the best schedule of a module that a search finds, as it is written."""
    from tokmill.mlir import search as searches

    tried = []
    for trial in searches.SEARCHES[method](problem, measurements, evaluations, seed):
        tried.append(trial)
        progress.advance(1)
    best = searches.best_of(problem, tried, measurements)
    counts = dict(Counter(trial.result.status for trial in tried))
    row = row_of(problem, best, searches.iree_default(problem, iree)) | {"counts": counts}
    text = measurements.space.text(problem, best.schedule) if best.schedule else ""
    return Best(row, text, problem.text)
