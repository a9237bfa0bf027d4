"""`tokmill train`."""

import itertools
import math
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.base.errors import Interrupted, UsageError
from tokmill.base.progress import (
    human_bytes,
    human_count,
    human_facts,
    human_metric,
    human_share,
    human_time,
)
from tokmill.base.recipe import merge, overrides
from tokmill.terminal.frame import PANEL, AsJson, Quiet, given, struct_parameters, with_parameters
from tokmill.terminal.output import print_json, print_table, say
from tokmill.training import launch as launching
from tokmill.training.launch import Launch
from tokmill.training.recipe.config import DataConfig, RunConfig

SHORT = ("steps", "max_time", "device", "engine", "over_memory")
"""Keys of `run` that have a flag of their own."""


Recipe = Annotated[
    Path | None,
    typer.Argument(
        metavar="RECIPE|STORE",
        help="A recipe, or a store to train a small decoder on. Optional if RUN exists: "
        "its recipe is used.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="RUN", help="Folder of the run; an existing run is resumed."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", hidden=True)]
"""As other trainers have it; a run that is there is continued without it."""
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print shapes, sizes and memory; do not train.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Set a key of the recipe, with its table (optim.lr=1e-3) or, if it is unique, "
        "without (lr=1e-3); names of other trainers work too (learning_rate). May be repeated.",
    ),
]
Config = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A JSON file of settings under the names of this or another trainer, such as "
        "DeepSpeed's ds_config.json, over the recipe and below --set. May be repeated.",
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="The training store; may be repeated to mix several. Sets data.train.",
        rich_help_panel=PANEL,
    ),
]
Start = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="Start from the weights of this run, or of a folder of weights in it. Sets run.start.",
        rich_help_panel=PANEL,
    ),
]


def _train(
    context: typer.Context,
    recipe: Recipe = None,
    out: Out = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    set_: Set = None,
    config_: Config = None,
    data: Data = None,
    start: Start = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **more: Any,
) -> None:
    from tokmill.training.recipe import resolve as resolving

    chosen = given(more)
    launch = Launch(**{key: chosen.pop(key) for key in [*chosen] if key in LAUNCH})
    options = _options(set_, config_, data, start, chosen)
    if recipe is None and not (data or config_ or set_ or _is_run(out)):
        wanted = "RECIPE" if context.command_path.endswith(" rl train") else "STORE"
        raise UsageError(
            "there is neither a recipe nor a store",
            hint=f"name one: {context.command_path} {wanted} -o RUN",
        )
    if out is None and not dry_run:
        raise _no_folder(recipe, bool(data), context.obj)
    launching.begin_worker()
    launch.check()
    with launching.one_error_per_machine():
        world = max(launch.processes * launch.nodes, launching.place().world)
        config = resolving.resolve(recipe, out or Path("RUN"), options, world)
    line = launch.line(context.obj) if launch.several else ""
    if dry_run or out is None:
        _dry_run(config, launch, line, _is_run(out), as_json)
        return
    result = _run(launch, recipe, out, options, line, context.obj, quiet)
    if result is not None:
        _print_result(result, quiet, as_json)


def _is_run(out: Path | None) -> bool:
    from tokmill.training.recipe import read_recipe

    return out is not None and (out / read_recipe.RECIPE).exists()


LAUNCH = Launch.__struct_fields__
train = with_parameters(
    _train,
    [
        *struct_parameters(DataConfig, only=("val", "partial"), prefix="data."),
        *struct_parameters(RunConfig, only=SHORT, prefix="run."),
        *struct_parameters(Launch, "several processes", prefix=None),
    ],
    "Train a model on token stores; the same command resumes a run bit for bit.",
)


def _options(
    set_: list[str] | None,
    config: list[Path] | None,
    data: list[Path] | None,
    start: Path | None,
    chosen: dict[str, Any],
) -> dict[str, Any]:
    options = overrides(set_ or [])
    of_data: dict[str, Any] = {key: chosen.pop(key) for key in ("val", "partial") if key in chosen}
    if data:
        of_data["train"] = str(data[0]) if len(data) == 1 else list(map(str, data))
    if start:
        chosen["start"] = str(start)
    for section, keys in (("data", of_data), ("run", chosen)):
        options = merge(options, {section: keys} if keys else {}, once="")
    if config:
        options["settings"] = [str(file) for file in config]
    return options


def _print_result(result: Any, quiet: bool, as_json: bool) -> None:
    if as_json:
        print_json({"run": str(result.path), **result.metrics, "step": result.step})
        return
    keys = ("loss", "val_loss", "val_perplexity", "val_bits_per_byte")
    metrics = result.metrics
    shown = [f"{key} {human_metric(metrics[key])}" for key in keys if key in metrics]
    say(f"{result.path}: {result.step} steps, {', '.join(shown)}")
    from tokmill.training.runs.run import read_run

    config, facts = read_run(result.path)
    use = launching.use_command(result.path, config.task.kind, facts)
    if use and not quiet:
        say(f"next: {use}")


def _no_folder(recipe: Path | None, has_data: bool, words: list[str]) -> UsageError:
    """Return the error for a training without -o; a wrong recipe is an error of its own."""
    from tokmill.training.recipe import read_recipe
    from tokmill.training.recipe import resolve as resolving

    names = (f"run{number or ''}" for number in itertools.count())
    free = next(name for name in names if not Path(name).exists())
    hint = f"name it: {shlex.join(['tokmill', *words, '-o', free])}"
    if recipe and (recipe / read_recipe.RECIPE).exists():
        hint = f"`{launching.resume_command(recipe)}` continues the run {recipe}"
    elif recipe and not resolving.is_settings(recipe):
        read_recipe.read_given(recipe, has_data)
    return UsageError("the run needs a folder", hint=hint)


def _dry_run(config: Any, launch: Launch, line: str, continues: bool, as_json: bool) -> None:
    from tokmill.training.budget.memory import estimate
    from tokmill.training.recipe.resolve import notes

    plan = estimate(config, launch.processes * launch.nodes, launch.processes, timed=True)
    if not launching.place().rank and not continues:
        for note in notes(config):
            say(f"note: {note}")
    if plan["memory_warning"]:
        say(f"warning: {plan['memory_warning']}")
    _print_plan(plan | ({"torchrun": line} if line else {}), as_json)


def _run(
    launch: Launch,
    recipe: Path | None,
    out: Path,
    options: dict[str, Any],
    line: str,
    words: list[str],
    quiet: bool,
) -> Any:
    """Train, here or by torchrun; return the run, or None in all but the first process."""
    try:
        if line:
            say(line)
            raise typer.Exit(launch.run(words))
        from tokmill.training import session as loop

        result = loop.train(recipe, out, options=options, quiet=quiet)
    except KeyboardInterrupt:
        # The run has not begun, or a second signal came before the checkpoint was saved.
        if not _is_run(out):
            raise
        raise Interrupted(
            "stopped at once; nothing was saved since the last checkpoint",
            where=str(out),
            hint=f"`{launching.resume_command(out)}` continues from there",
        ) from None
    return None if launching.place().rank else result


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
    columns = ", ".join(f"{name} ({size:,} ids)" for name, size in plan["columns"].items())
    print_table(
        ["plan", ""],
        [
            ["model, task", f"{plan['model']}, {plan['task']}"],
            *([["columns", columns]] if tokens else []),
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
            *([["total tokens", f"{plan['tokens']:,}"]] if tokens else []),
            *([["total FLOP", f"{plan['flops']:.2e}"]] if tokens else []),
            [
                "memory, about",
                f"{human_bytes(plan['memory_bytes'])} per process, "
                f"{human_bytes(plan['tensor_bytes'])} tensors",
            ],
        ],
    )
    if plan["stores"]:
        print()
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
                for store in plan["stores"]
            ],
        )
    if "torchrun" in plan:
        print(f"\n{plan['torchrun']}")


def _rows(plan: dict[str, Any]) -> list[list[str]]:
    micro = " rows × ".join(map(str, plan["micro_batch"])) + " positions"
    if plan["rows_kind"] == "whole":
        micro = f"rows of similar lengths, at most {math.prod(plan['micro_batch']):,} positions"
    return [
        ["batch", " rows × ".join(map(str, plan["batch"])) + " positions"],
        ["micro-batch", micro],
        ["tokens per step", f"{plan['tokens_per_step']:,}"],
    ]


def _steps(plan: dict[str, Any]) -> str:
    """Return how many steps, and what of the stores they read or else what takes their time."""
    if not plan["stores"]:
        return f"{plan['steps']:,}; most of their time is that of measurements"
    return f"{plan['steps']:,} ({plan['epochs']:.2f} epochs of {plan['rows']:,} rows)"


def _time(seconds: float | None, steps: int) -> str:
    if seconds is None:
        return "not measured: the device is not here, or the model is too large for a try"
    return f"{human_time(seconds * steps)} ({seconds:.2g} s per step, measured now)"
