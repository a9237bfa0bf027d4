"""`tokmill rl train|eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from tokmill import plugins
from tokmill.cli import rl_best
from tokmill.cli import train as training
from tokmill.cli.options import AsJson, Quiet
from tokmill.cli.output import print_json, print_table, say
from tokmill.cli.rl_problems import (
    FILES,
    MOST_RUNS,
    MOST_SEED,
    CacheFile,
    continuing,
    problems_of,
)
from tokmill.errors import UsageError
from tokmill.files import make_folder
from tokmill.progress import Progress, human_count, human_share


def train(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe of the task schedules, such as schedules-lstm, or a JSON file of "
            "settings. With --resume it may be left out.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="RUN", help="Folder of the run.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Begin with the weights of this run. Sets run.start."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print shapes, sizes and memory, and do nothing.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Set a key of the recipe. May be repeated."),
    ] = None,
    config_: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A JSON file of settings, over the recipe and below --set. May be repeated.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of task.bench_count evaluations. Sets run.steps.")
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Save a checkpoint and stop after 90s, 10m, 2h."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Learn to schedule modules: `tokmill train` with a recipe of the task schedules."""
    training.train(
        context,
        recipe,
        out,
        resume=resume,
        dry_run=dry_run,
        set_=set_,
        config_=config_,
        start=start,
        steps=steps,
        max_time=max_time,
        quiet=quiet,
        as_json=as_json,
    )


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    modules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODULE...",
            help="A .mlir file, a folder of them, or sizes. Default: those that the run held out.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            min=0, help="Drawn schedules that are measured for each module, beside the likeliest."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of the drawn schedules.")] = 0,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RUNS,
            help="Runs of each schedule; the least time counts. Default: as in the training.",
        ),
    ] = None,
    at: Annotated[
        str, typer.Option(help="Which weights: best, model, or a step. Default: the newest.")
    ] = "",
    cache: CacheFile = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FOLDER", help="Write the best schedules there."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure what a policy schedules: by its likeliest actions, and as the best of some.

    The likeliest schedule is made without any measurement (zero-shot). Gains are geometric means;
    what gives no result counts as 1, because the module without a schedule would run.
    """
    runs_of = plugins.require("tokmill.training.runs.run")
    evaluating = plugins.require("tokmill.rl.evaluate")
    measuring = plugins.require("tokmill.mlir.measure")
    config, _ = runs_of.read_run(run)
    if config.task.kind != "schedules":
        raise UsageError(
            f"the run learned the task {config.task.kind}, not schedules",
            where=str(run),
            hint="`tokmill eval RUN STORE` measures it",
        )
    task = runs_of.load_task(run, at)
    problems = problems_of(modules or [])
    if not modules:
        naming = plugins.require("tokmill.rl.modules")
        problems = naming.held_out(config.task, config.model.sizes)
    if not problems:
        raise UsageError(
            "the run held out no module",
            where=str(run),
            hint="name some: tokmill rl eval RUN MODULE",
        )
    kind = FILES[task.space.name]
    if out is not None:
        folders = [config.task.benchmarks_folder_path, config.task.held_out_folder_path]
        inputs = [*(modules or []), *filter(None, folders)]
        rl_best.check(out, len(problems), kind, inputs, {"--cache": cache})
        make_folder(out)
    settings = plugins.require("tokmill.rl.loop").settings_of(config.task)
    settings = replace(settings, runs=runs or settings.runs)
    count = (1 + samples) * len(problems)
    with (
        continuing(cache),
        measuring.Measurements(settings, cache, task.space) as measure,
        Progress("eval", count, unit="schedules", quiet=quiet) as progress,
    ):
        found = evaluating.evaluate(
            task, problems, measure, samples, seed, lambda: progress.advance(1)
        )
    rows, means = [evaluating.facts(one) for one in found], evaluating.summary(found)
    if out is not None:
        best = [
            # The text of the schedule is in the file.
            rl_best.Best(
                {key: value for key, value in row.items() if key != "schedule"},
                row["schedule"],
                problem.text,
            )
            for row, problem in zip(rows, problems, strict=True)
        ]
        written = rl_best.write(out, kind, best)
        rows = [row | more for row, more in zip(rows, written, strict=True)]
    if as_json:
        print_json({"run": str(run), "samples": samples, **means, "modules": rows})
        return
    _print(rows, means, samples)


def _print(rows: list[dict[str, Any]], means: dict[str, Any], samples: int) -> None:
    best = f"best of {samples + 1}"
    print_table(
        ["module", "unscheduled ms", "zero-shot", *([best] if samples else []), "noise"],
        [
            [
                row["module"],
                f"{row['best']['baseline_milliseconds']:.3f}",
                _gain(row["zero_shot"]),
                *([_gain(row["best"])] if samples else []),
                human_share(row["best"]["noise"]),
            ]
            for row in rows
        ],
    )
    print()
    print_table(
        ["operation", "modules", "zero-shot", *([best] if samples else []), "largest"],
        [
            [
                kind,
                str(one["modules"]),
                f"{one['zero_shot']:.2f}",
                *([f"{one['best']:.2f}"] if samples else []),
                f"{one['largest']:.2f}",
            ]
            for kind, one in means["operations"].items()
        ],
    )
    for name, key in [("zero-shot", "zero_shot"), *([(best, "best")] if samples else [])]:
        found = means[key]
        say(
            f"{name}: {found['speedup']:.3f} times as fast as without a schedule (geometric mean "
            f"of {human_count(len(rows), 'module')}), {human_share(found['regressions'], 0)} "
            f"slower, {human_share(found['failed'], 0)} without a result"
        )


def _gain(found: dict[str, Any]) -> str:
    return f"{found['speedup']:.2f}" if found["status"] == "ok" else str(found["status"])
