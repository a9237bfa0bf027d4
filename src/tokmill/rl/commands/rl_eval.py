"""`tokmill rl eval`."""

import math
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from msgspec.structs import replace

from tokmill.base.errors import UsageError
from tokmill.base.files import make_folder
from tokmill.base.progress import Progress, human_count, human_share
from tokmill.rl.commands.rl_problems import (
    IREE,
    MOST_RUNS,
    MOST_SEED,
    Best,
    CacheFile,
    Out,
    check_best,
    continuing,
    iree_cell,
    print_faster_baselines,
    problems_of,
    write_best,
)
from tokmill.terminal.frame import AsJson, Quiet
from tokmill.terminal.output import print_json, print_table, say

Modules = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODULE...",
        help="A .mlir file, a folder of them, or sizes. Default: the run's held-out modules.",
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        min=0, help="Sampled schedules measured for each module, in addition to the likeliest."
    ),
]
Runs = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_RUNS,
        help="Runs of each schedule; the minimum time counts. Default: as in the training.",
    ),
]
At = Annotated[
    str, typer.Option(help="Which weights: best, model, or a step. Default: the newest.")
]


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    modules: Modules = None,
    samples: Samples = 0,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the samples.")] = 0,
    runs: Runs = None,
    at: At = "",
    cache: CacheFile = None,
    out: Out = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a policy: its likeliest schedule, and the best of several samples.

    The likeliest schedule is chosen without measurements (zero-shot). The best is measured again
    against no schedule, which is the answer if nothing is faster. The table also has the time of
    IREE's default. Speed-ups are geometric means; a module without a result counts as 1.
    """
    from tokmill.mlir import measure as measuring
    from tokmill.mlir import search as searches
    from tokmill.mlir.space import IreeDefault
    from tokmill.rl import evaluate_policy as evaluating
    from tokmill.rl.ppo_loop import settings_of
    from tokmill.training.runs import run as runs_of

    config, _ = runs_of.read_run(run)
    problems = _problems(run, config, modules or [])
    task = runs_of.load_task(run, at)
    if out is not None:
        folders = [config.task.benchmarks_folder_path, config.task.held_out_folder_path]
        inputs = [*(modules or []), *filter(None, folders)]
        check_best(out, len(problems), inputs, {"--cache": cache})
        make_folder(out)
    settings = replace(own := settings_of(config.task), runs=runs or own.runs)
    count = (1 + samples) * len(problems)
    with (
        continuing(cache),
        measuring.Measurements(settings, cache) as measure,
        measuring.Measurements(settings, cache, IreeDefault()) as iree,
        Progress("eval", count, unit="schedules", quiet=quiet) as progress,
    ):
        results = evaluating.evaluate(
            cast(Any, task), problems, measure, samples, seed, lambda: progress.advance(1)
        )
        rows = [
            evaluating.facts(one) | {IREE: default.nanoseconds / 1e6, "iree_status": default.status}
            for one in results
            for default in [searches.iree_default(one.problem, iree)]
        ]
    means = evaluating.summary(results)
    if out is not None:
        rows = _write(out, rows, problems)
    if as_json:
        print_json({"run": str(run), "samples": samples, **means, "modules": rows})
        return
    _print(rows, means, samples)


def _write(out: Path, rows: list[dict[str, Any]], problems: list[Any]) -> list[dict[str, Any]]:
    best = [
        # The text of the schedule is in the file.
        Best(
            {key: value for key, value in row.items() if key != "schedule"},
            row["schedule"],
            problem.text,
        )
        for row, problem in zip(rows, problems, strict=True)
    ]
    return [row | more for row, more in zip(rows, write_best(out, best), strict=True)]


def _problems(run: Path, config: Any, modules: list[str]) -> list[Any]:
    from tokmill.rl import modules as naming

    if config.task.kind != "schedules":
        raise UsageError(
            f"the run learned the task {config.task.kind}, not schedules",
            where=str(run),
            hint="`tokmill eval RUN STORE` measures it",
        )
    problems = problems_of(modules)
    if not modules:
        problems = naming.held_out(config.task, config.model.sizes)
    if not problems:
        raise UsageError(
            "the run held out no module",
            where=str(run),
            hint="name some: tokmill rl eval RUN MODULE",
        )
    return problems


def _print(rows: list[dict[str, Any]], means: dict[str, Any], samples: int) -> None:
    best = f"best of {samples + 1}"
    print_table(
        ["module", "unscheduled ms", "IREE's default", "zero-shot", best, "noise"],
        [
            [
                row["module"],
                f"{row['best']['baseline_milliseconds']:.5g}",
                iree_cell(row),
                _gain(row["zero_shot"]),
                _gain(row["best"]),
                human_share(row["best"]["noise"]),
            ]
            for row in rows
        ],
    )
    for name, key in (("zero-shot", "zero_shot"), (best, "best")):
        mean = means[key]
        say(
            f"{name}: {mean['speedup']:.3f} times as fast as without a schedule"
            f"{_against_iree(rows, key)} (geometric means of {human_count(len(rows), 'module')}), "
            f"{human_share(mean['regressions'], 0)} slower, {human_share(mean['failed'], 0)} "
            "without a result"
        )
    print_faster_baselines([{**row, **row["best"]} for row in rows])


def _against_iree(rows: list[dict[str, Any]], key: str) -> str:
    logs = []
    for row in rows:
        # Without a result the module would run as it is.
        own = row[key]["milliseconds"], row["best"]["baseline_milliseconds"]
        if math.isfinite(ratio := row[IREE] / (own[1] if math.isnan(own[0]) else own[0])):
            logs.append(math.log(ratio))
    if not logs:
        return ""
    of = f" in {len(logs):,} of them" if len(logs) < len(rows) else ""
    return f", {math.exp(sum(logs) / len(logs)):.3f} times as fast as by IREE's default{of}"


def _gain(means: dict[str, Any]) -> str:
    return f"{means['speedup']:.2f}" if means["status"] == "ok" else str(means["status"])
