"""`tokmill train`."""

from __future__ import annotations

import itertools
import math
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill import plugins
from tokmill.base.errors import Interrupted, UsageError
from tokmill.base.progress import (
    human_bytes,
    human_count,
    human_facts,
    human_metric,
    human_share,
    human_time,
)
from tokmill.base.recipe import merge
from tokmill.terminal.options import AsJson, Quiet
from tokmill.terminal.output import print_json, print_table, say
from tokmill.terminal.structs import PANEL, settings


def train(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE|STORE",
            help="A recipe, or a store to train a small decoder on. With --resume it may be left "
            "out: the run's own recipe is used.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="RUN", help="Folder of the run.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the newest checkpoint; if there is none, begin."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print shapes, sizes and memory, and do nothing.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="A.B=C",
            help="Set a key of the recipe, with its table (optim.lr=1e-3) or, if it is unique, "
            "without (lr=1e-3); names of other trainers work too (learning_rate). May be repeated.",
        ),
    ] = None,
    config_: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A JSON file of settings under the names of this or another trainer, such as "
            "DeepSpeed's ds_config.json, over the recipe and below --set. May be repeated.",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="The store to learn from; repeated, several are mixed. Sets data.train.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    val: Annotated[
        Path | None,
        typer.Option(help="The store to evaluate on. Sets data.val.", rich_help_panel=PANEL),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Train on a store that is not complete. Sets data.partial.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Begin with the weights of this run, or of a folder of weights in it. "
            "Sets run.start.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of the optimiser. Sets run.steps.", rich_help_panel=PANEL),
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Save a checkpoint and stop after 90s, 10m, 2h. Sets run.max_time.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda or auto. Sets run.device.", rich_help_panel=PANEL),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(plugins.ENGINES)} or auto. Sets run.engine.", rich_help_panel=PANEL
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Processes on this machine that share each step, one for each GPU. Default: the "
            "number of --devices, or 1."
        ),
    ] = None,
    devices: Annotated[
        str,
        typer.Option(
            metavar="N|LIST",
            help="GPUs of this machine, one for each process: 2 means two GPUs, 0,3 these two.",
        ),
    ] = "",
    nodes: Annotated[int, typer.Option(help="Number of machines; start it on each of them.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Number of this machine, from 0.")] = 0,
    master: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="A free port of machine 0.")
    ] = "",
    over_memory: Annotated[
        bool,
        typer.Option(
            "--over-memory",
            help="Begin even if the training needs more memory than the machine has. "
            "Sets run.over_memory.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on token stores; --resume continues a stopped run to the last bit."""
    given: dict[str, Any] = {
        "data": {
            "train": (str(data[0]) if len(data) == 1 else list(map(str, data))) if data else None,
            "val": val and str(val),
            "partial": partial or None,
        },
        "run": {
            "start": start and str(start),
            "steps": steps,
            "max_time": max_time,
            "device": device,
            "engine": engine,
            "over_memory": over_memory or None,
        },
    }
    flags = {
        section: {key: value for key, value in keys.items() if value is not None}
        for section, keys in given.items()
    }
    options = merge(settings(set_), {section: keys for section, keys in flags.items() if keys})
    if config_:
        options["settings"] = [str(file) for file in config_]
    from tokmill.training import launch as launching
    from tokmill.training.recipe import read_recipe
    from tokmill.training.recipe import resolve as resolving

    if recipe is None and not (data or config_ or set_ or resume):
        wanted = "RECIPE" if context.command_path.endswith(" rl train") else "STORE"
        raise UsageError(
            "there is neither a recipe nor a store",
            hint=f"name one: {context.command_path} {wanted} -o RUN",
        )
    if out is None and not dry_run:
        names = (f"run{number or ''}" for number in itertools.count())
        free = next(name for name in names if not Path(name).exists())
        hint = f"name it: {shlex.join(['tokmill', *context.obj, '-o', free])}"
        if recipe and (recipe / read_recipe.RECIPE).exists():
            hint = f"`{launching.resume_command(recipe)}` continues the run {recipe}"
        elif recipe and not resolving.is_settings(recipe):
            read_recipe.read_given(recipe, bool(data))
        raise UsageError("the run needs a folder", hint=hint)
    launching.begin_worker()
    gpus = launching.gpus_of(devices)
    processes = max(1, len(gpus)) if processes is None else processes
    launch = launching.Launch(processes, nodes, node_rank, master, gpus)
    launch.check()
    with launching.one_a_machine():
        world = max(processes * nodes, launching.place().world)
        config = resolving.resolve(recipe, out or Path("RUN"), options, resume, world)
    if gpus and config.run.device == "cpu":
        raise UsageError("--devices names GPUs, but run.device is the CPU", hint="--device cuda")
    line = launch.line(context.obj) if launch.several else ""
    if dry_run or out is None:
        from tokmill.training.budget.estimate import estimate

        plan = estimate(config, processes * nodes, processes, timed=True)
        if not launching.place().rank and not resume:
            from tokmill.training.recipe.check_recipe import notes

            for note in notes(config):
                say(f"note: {note}")
        if plan["memory_warning"]:
            say(f"warning: {plan['memory_warning']}")
        more = {"gpus": ",".join(gpus)} if gpus else {}
        _print_plan({**plan, **more, **({"torchrun": line} if line else {})}, as_json)
        return
    try:
        if line:
            say(line)
            raise typer.Exit(launch.run(context.obj))
        launch.take_gpus()
        from tokmill.training import session as loop

        result = loop.train(recipe, out, options=options, resume=resume, quiet=quiet)
    except KeyboardInterrupt:
        # The run has not begun, or a second signal came before the checkpoint was saved.
        if not (out / read_recipe.RECIPE).exists():
            raise
        raise Interrupted(
            "stopped at once; nothing was saved since the last checkpoint",
            where=str(out),
            hint=f"`{launching.resume_command(out)}` continues from there",
        ) from None
    if launching.place().rank:
        return
    if as_json:
        print_json({"run": str(result.path), **result.metrics, "step": result.step})
        return
    keys = ("loss", "val_loss", "val_perplexity", "val_bits_per_byte")
    shown = [f"{key} {human_metric(result.metrics[key])}" for key in keys if key in result.metrics]
    say(f"{result.path}: {result.step} steps, {', '.join(shown)}")
    from tokmill.report.comparison.run_summaries import read_run

    sampling = read_run(result.path).sampling
    if sampling and not quiet:
        say(f"next: {sampling}")


def _print_plan(plan: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(plan)
        return
    print_table(
        ["tensor", "shape"], [[n, " × ".join(map(str, s))] for n, s in plan["tensors"].items()]
    )
    print()
    # Where an environment takes the place of stores, its own facts say more than rows and tokens.
    environment, tokens = plan["environment"], not plan["environment"]
    print_table(
        ["plan", ""],
        [
            ["model, task", f"{plan['model']}, {plan['task']}"],
            *([["columns", _columns(plan)]] if tokens else []),
            ["parameters", f"{plan['parameters']:,}"],
            *([name, value] for name, value in human_facts(environment).items()),
            *(_rows(plan) if tokens else []),
            *([["rows", plan["rows_kind"]]] if plan["rows_kind"] else []),
            *([["overlays", ", ".join(plan["overlays"])]] if plan["overlays"] else []),
            ["steps", _steps(plan)],
            *(
                [["time, about", _time(plan["seconds_per_step"], plan["steps"])]]
                if plan["stores"]
                else []
            ),
            *([["tokens in all", f"{plan['tokens']:,}"]] if tokens else []),
            *([["operations in all", f"{plan['flops']:.2e}"]] if tokens else []),
            *([["GPUs of this machine", plan["gpus"]]] if "gpus" in plan else []),
            [
                "memory, about",
                f"{human_bytes(plan['memory_bytes'])} a process, "
                f"{human_bytes(plan['tensor_bytes'])} of it tensors",
            ],
        ],
    )
    if plan["stores"]:
        print()
        _print_stores(plan["stores"])
    if "torchrun" in plan:
        print(f"\n{plan['torchrun']}")


def _columns(plan: dict[str, Any]) -> str:
    return ", ".join(f"{name} ({size:,} ids)" for name, size in plan["columns"].items())


def _rows(plan: dict[str, Any]) -> list[list[str]]:
    """Return how many rows and tokens a step reads."""
    micro = " rows × ".join(map(str, plan["micro_batch"])) + " positions"
    if plan["rows_kind"] == "whole":
        micro = f"rows of similar lengths, at most {math.prod(plan['micro_batch']):,} positions"
    return [
        ["batch", " rows × ".join(map(str, plan["batch"])) + " positions"],
        ["micro-batch", micro],
        ["tokens a step", f"{plan['tokens_per_step']:,}"],
    ]


def _steps(plan: dict[str, Any]) -> str:
    """Return how many steps, and what of the stores they read or else what takes their time."""
    if not plan["stores"]:
        return f"{plan['steps']:,}; most of their time is that of measurements"
    return f"{plan['steps']:,} ({plan['epochs']:.2f} epochs of {plan['rows']:,} rows)"


def _time(seconds: float | None, steps: int) -> str:
    """Return how long a training will take, in words."""
    if seconds is None:
        return "not measured: the device is not here, or the model is too large for a try"
    return (
        f"{human_time(seconds * steps)} ({seconds:.2g} s a step, "
        "as one forward and backward took now)"
    )


def _print_stores(stores: list[dict[str, Any]]) -> None:
    print_table(
        ["store", "share", "rows", "padding", "cut off"],
        [
            [
                store["store"],
                human_share(store["share"]),
                f"{store['rows']:,}",
                human_share(store["padding"], 2),
                f"{human_count(store['cut_tokens'], 'token')} of "
                f"{human_count(store['cut_records'], 'record')}",
            ]
            for store in stores
        ],
    )
