"""From the arguments of `tokmill train` to a checked configuration, step by step, and the checks.

Simple mistakes are found before torch is imported, so that their errors come at once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.base import recipe as recipes
from tokmill.base.errors import TokmillError, UsageError, check_name, shell_word
from tokmill.base.files import address_of, place_of
from tokmill.base.progress import parse_seconds
from tokmill.base.recipe import merge
from tokmill.store.store import Store
from tokmill.training.recipe.config import (
    DEFAULT_KINDS,
    LARGEST_NUMBER,
    LEARNED,
    MOST_STEPS,
    OptimConfig,
    TrainConfig,
    check_kind,
    config_type,
    kinds_of,
)
from tokmill.training.recipe.deepspeed_config import as_recipe, check_table, stage_of
from tokmill.training.recipe.read_recipe import (
    RECIPE,
    in_tables,
    over,
    read_given,
    read_recipe,
    run_of,
)
from tokmill.training.recipe.settings import (
    base_of,
    is_of_deepspeed,
    read_settings,
    tell,
    used,
)

SETTINGS = "settings"
"""Among options: files of settings in JSON."""
ADAMW = OptimConfig.__struct_fields__
PLACES = {
    "data": ("train", "val"),
    "run": ("start",),
    "task": ("benchmarks_folder_path", "held_out_folder_path", "cache"),
}
"""Keys of recipes that name folders or files."""


def resolve(
    recipe: Path | str | Mapping[str, Any] | None,
    out: Path,
    options: Mapping[str, Any],
    world: int = 1,
) -> TrainConfig:
    """Return the checked recipe.

    Args:
        recipe: a file, the name of a shipped recipe, the folder of a store, or nested dicts.
            A file of settings in JSON stands for the recipe that it says it is for.
        out: the folder of the run; where one is, its recipe and its stores are the default.
        options: nested dicts that win; JSON files under `SETTINGS` win over the recipe alone.
        world: processes that share a step; settings of DeepSpeed say the batch of one of them.
    """
    # 1. Read the recipe, and the settings over it.
    options = dict(options)
    files = [str(file) for file in options.pop(SETTINGS, ())]
    before = read_recipe(out) if (out / RECIPE).exists() else {}
    value, where = dict(before), "options"
    alone = isinstance(recipe, Path | str) and is_settings(Path(recipe))
    if alone:
        value, files = {}, [str(recipe), *files]
    elif recipe is not None:
        value, where = read_given(recipe, named=has_store_options(options))
    elif not (before or files or has_store_options(options)) and kinds_of(options) == kinds_of({}):
        raise UsageError(
            "there is neither a recipe nor a store, and no run to continue",
            where=str(out),
            hint=f"begin one: tokmill train STORE -o {shell_word(out)}",
        )
    # Those of DeepSpeed come last: they count rows, whose length the others say.
    read = ((file, read_settings(Path(file))) for file in files)
    by_file = dict(sorted(read, key=lambda one: is_of_deepspeed(one[1])))
    # A store, or nothing, says no kind of model.
    if by_file and not isinstance(recipe, Mapping) and value.keys() <= {"data"}:
        base = base_of(by_file, options, alone)
        value = merge(recipes.read_toml(base) if base else {}, value)
        where = base or (files[0] if alone else where)
    # 2. Put the options over them, and each key into its table.
    layers = with_settings(value, where, by_file, options, world)
    value = over(layers[-1][0], options, where)
    # 3. Make places absolute: a run may be continued from elsewhere.
    value = {name: absolute(name, table) for name, table in value.items()}
    # 4. Fill in what is missing from the run to start from, or to resume.
    value = with_most_steps(with_stores(merge(start_tables(value), value), before))
    # 5. Check what needs no torch, then the folders, then the keys of each kind.
    try:
        plain = check_plain(value, where)
    except UsageError as error:
        raise named_after(error, layers, options, check_plain) from None
    if kinds_of(value)["task"] == DEFAULT_KINDS["task"]:
        check_given(plain, where)
    check_places(plain, begins=not before)
    try:
        config = from_dict(value, where)
    except UsageError as error:
        raise named_after(error, layers, options, from_dict) from None
    check_stores(config, where)
    return config


def with_settings(
    value: dict[str, Any],
    where: str,
    by_file: Mapping[str, dict[str, Any]],
    options: Mapping[str, Any],
    world: int,
) -> list[tuple[dict[str, Any], str]]:
    """Return the recipe, then it with each file of settings over those before; and their names."""
    layers = [(value, where)]
    for file, names in by_file.items():
        if is_of_deepspeed(names):
            whole = over(value, options, where)
            names = as_recipe(names, merge(start_tables(whole), whole), world, file)
            if "kind" in names["optim"] and isinstance(table := value.get("optim"), Mapping):
                if other := [f"optim.{key}" for key in table if key not in ADAMW]:
                    tell(f"{file}: not used: {', '.join(other)}: AdamW has no such key")
                value["optim"] = {key: table[key] for key in table if key in ADAMW}
        else:
            names = used(names, file)
        value = over(value, names, where, file)
        layers.append((value, file))
    return layers


def is_settings(path: Path) -> bool:
    return path.suffix.lower() == ".json" and path.is_file()


def named_after(
    error: UsageError,
    layers: Sequence[tuple[Mapping[str, Any], str]],
    options: Mapping[str, Any],
    check: Callable[[Mapping[str, Any], str], TrainConfig],
) -> UsageError:
    """Return an error with its place: options that have its key, else the first file that makes it.

    layers: the recipe, then the recipe with each file of settings over those before; and names.
    """
    table, _, key = error.what.partition(":")[0].partition(".")
    given = in_tables(options, over(layers[-1][0], options), "options").get(table)
    if error.where == layers[0][1] and isinstance(given, Mapping) and key in given:
        error.where = "options"
        return error
    for value, name in layers:
        try:
            check(over(value, {}, name), name)
        except TokmillError as other:
            if isinstance(other, UsageError) and other.what == error.what:
                return other
    return error


def has_store_options(options: Mapping[str, Any]) -> bool:
    data = options.get("data")
    return isinstance(data, Mapping) and bool(data.get("train"))


def start_tables(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables model and task of the run to start from, if their kinds stay the same."""
    options = value.get("run")
    start = options.get("start") if isinstance(options, Mapping) else ""
    run = run_of(Path(start)) if isinstance(start, str) and start else None
    if run is None:
        return {}
    before = read_recipe(run)
    given = {table: value.get(table, {}) for table in LEARNED}
    return {
        table: before[table]
        for table, keys in given.items()
        if isinstance(keys, Mapping) and keys.get("kind") in (None, before[table]["kind"])
    }


def with_most_steps(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe whose epochs alone decide the steps, where it names no steps."""
    run = value.get("run", {})
    if not isinstance(run, Mapping) or not run.get("epochs") or "steps" in run:
        return dict(value)
    return {**value, "run": {**run, "steps": MOST_STEPS}}


def with_stores(value: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with the stores of the run to resume, if it names none itself."""
    data = value.get("data", {})
    if not before or not isinstance(data, Mapping):
        return dict(value)
    kept = {key: before["data"][key] for key in ("train", "val") if not data.get(key)}
    return {**value, "data": {**data, **kept}}


def absolute(name: str, table: Any) -> Any:
    """Return a table of the recipe with its paths made absolute; a key has one path or a list."""
    if not isinstance(table, Mapping):
        return table

    def made(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [made(one) for one in value]
        return place_of(value) if isinstance(value, str) and value else value

    keys = PLACES.get(name, ())
    return {key: made(value) if key in keys else value for key, value in table.items()}


def check_places(config: TrainConfig, begins: bool) -> None:
    """Raise `TokmillError` for a store that cannot be opened.

    If a run begins, the run to start from must exist too.
    """
    for place in filter(None, (*config.data.stores, config.data.val)):
        if not begins and not (address_of(place) or Path(place).exists()):
            hint = "where it was moved, say so with --data STORE or --val STORE"
            raise TokmillError("there is no such store", where=place, hint=hint)
        Store(place)
    if config.run.start and begins and not Path(config.run.start).exists():
        raise TokmillError(
            "there is no run to start from",
            where=config.run.start,
            hint="--from names its folder",
        )


LARGEST = {"layers": 1_000, "dim": 1 << 18, "heads": 1 << 14, "hidden": 1 << 22,
           "context": 1 << 24, "length": 1 << 24}  # fmt: skip
"""Keys of models and tasks → their maximum, far above what anybody has trained."""


def check_plain(value: Mapping[str, Any], where: str = "") -> TrainConfig:
    """Check everything that needs no torch: all but the keys of the model, task and optimiser."""
    optim, kind = value.get("optim"), kinds_of(value)["optim"]
    check_kind("optim", kind, where)
    if isinstance(optim, Mapping) and kind != DEFAULT_KINDS["optim"]:
        kept = {key: optim[key] for key in optim if key in OptimConfig.__struct_fields__}
        value = {**value, "optim": kept}
    config = recipes.convert(TrainConfig, value, where)
    check(config, where)
    return config


def check_given(config: TrainConfig, where: str = "") -> None:
    """Refuse a recipe that names no store to learn from."""
    if not any(config.data.stores):
        raise UsageError(
            "the recipe names no store to learn from",
            where=where,
            hint="give one: --data STORE, or --set data.train=STORE",
        )


def check_stores(config: TrainConfig, where: str = "") -> None:
    """Refuse a recipe without a store if its task reads stores, and one with a store if not."""
    task = plugins.load(plugins.TASKS, config.task.kind)
    if plugins.load(plugins.LOOPS, task.loop).reads_stores:
        check_given(config, where)
    elif any(config.data.stores) or config.data.val:
        raise UsageError(
            f"the task {config.task.kind} learns from no store, and the recipe names one",
            where=where,
            hint="leave data.train and data.val out",
        )


def from_dict(value: Mapping[str, Any], where: str = "") -> TrainConfig:
    """Turn a recipe as nested dicts into a checked `TrainConfig`."""
    check_plain(value, where)
    config = recipes.convert(config_type(**kinds_of(value)), value, where)
    for section in LEARNED:
        check_sizes(section, getattr(config, section), where)
    check_optimizer(config, where)
    return config


def check_optimizer(config: TrainConfig, where: str = "") -> None:
    """Refuse impossible values of an optimiser's own keys, and an engine that it cannot use."""
    optimizer = plugins.load(plugins.OPTIMIZERS, config.optim.kind)
    optimizer.check(config.optim, where)
    if config.run.engine != "deepspeed" or optimizer.splits:
        return
    if stage := stage_of(config.engine.deepspeed):
        raise UsageError(
            f"the optimiser {config.optim.kind} needs whole weights, and stage {stage} of "
            "DeepSpeed keeps parts of them",
            where=where or "optim.kind",
            hint="--engine ddp, or --set engine.deepspeed.zero_optimization.stage=0",
        )


def check_sizes(section: str, table: Any, where: str = "") -> None:
    """Refuse sizes of a model or a task that fit into no machine."""
    for field in msgspec.structs.fields(table):
        value, most = getattr(table, field.name), LARGEST.get(field.name, LARGEST_NUMBER)
        if isinstance(value, int) and value > most:
            raise UsageError(
                f"{section}.{field.name}: {value} is above {most}",
                where=where,
                hint=f"--set {section}.{field.name}={most} is the most",
            )


def check(config: TrainConfig, where: str = "") -> None:
    """Refuse impossible numbers and unknown names; needs no torch."""
    data, run = config.data, config.run
    if data.weights and len(data.weights) != len(data.stores):
        raise UsageError(
            f"data.weights: {len(data.weights)} weights for {len(data.stores)} stores",
            where=where,
            hint="one for each store of data.train, in its order",
        )
    check_name("run.engine: no engine is", run.engine, ("auto", *plugins.ENGINES), where)
    for tracker in run.track:
        check_name("run.track: no tracker is", tracker, plugins.TRACKERS, where)
    seconds(run.max_time)
    if config.engine.deepspeed:
        check_table(config.engine.deepspeed, where)


def notes(config: TrainConfig) -> list[str]:
    """Return notes on settings that are allowed but probably not intended."""
    lines = []
    if config.data.val and config.data.val in config.data.stores:
        lines.append("the validation store is also a training store: its loss is not held-out")
    if len(set(config.data.stores)) < len(config.data.stores):
        lines.append("a store is named twice, so it is read twice as often")
    for part in (config.model, config.task):
        lines += part.notes() if hasattr(part, "notes") else []
    places = getattr(config.model, "context", 0)
    if getattr(config.model, "position", "") == "learned" and places < config.task.length:
        lines.append(
            f"a row has up to task.length = {config.task.length} positions, the learned table "
            f"model.context = {places}: a document that is longer will end the training with an "
            f"error; --set task.length={places} cuts it"
        )
    if config.run.steps <= config.optim.warmup:
        lines.append(
            f"optim.warmup = {config.optim.warmup} is not below run.steps = {config.run.steps}: "
            "the peak learning rate is not reached"
        )
    if config.engine.deepspeed and config.run.engine != "deepspeed":
        lines.append(
            f"[engine.deepspeed] is not used, because run.engine is {config.run.engine!r}; "
            "--engine deepspeed uses it"
        )
    return lines


def seconds(text: str) -> float:
    """Return a time such as 90, 90s, 10m, 2h as seconds; empty: infinite."""
    return parse_seconds(text) if text else math.inf
