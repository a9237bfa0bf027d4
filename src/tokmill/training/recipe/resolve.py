"""From the arguments of `tokmill train` to a checked configuration, step by step.

Simple mistakes are found before torch is imported, so that their errors come at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokmill.base import recipe as recipes
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import address_of, place_of
from tokmill.base.recipe import merge
from tokmill.store.store import Store
from tokmill.training.recipe.check_recipe import (
    MOST_STEPS,
    check_given,
    check_plain,
    check_stores,
    from_dict,
)
from tokmill.training.recipe.config import (
    DEFAULT_KINDS,
    LEARNED,
    OptimConfig,
    TrainConfig,
    kinds_of,
)
from tokmill.training.recipe.deepspeed_config import as_recipe
from tokmill.training.recipe.read_recipe import RECIPE, over, read_given, read_recipe, run_of
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
        options: nested dicts that win over the recipe; under `SETTINGS` files of settings in
            JSON, which win over the recipe alone.
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
        value, where = read_given(recipe, named=names_stores(options))
    elif not before and not files:
        check_something_given(out, options)
    read = [(file, read_settings(Path(file))) for file in files]
    # Those of DeepSpeed come last: they count rows, whose length the others say.
    by_file = dict(sorted(read, key=lambda one: is_of_deepspeed(one[1])))
    # A store, or nothing, says no kind of model.
    if by_file and not isinstance(recipe, Mapping) and value.keys() <= {"data"}:
        base = base_of(by_file, options, alone)
        value = merge(recipes.read_toml(base) if base else {}, value)
        where = base or (files[0] if alone else where)
    # 2. Put the options over them, and each key into its table.
    layers = with_settings(value, where, by_file, options, world)
    value = over(layers[-1][0], options, where)
    # 3. Make places absolute.
    value = with_absolute_places(value)
    # 4. Fill in what is missing from the run to start from, or to resume.
    value = with_stores(merge(start_tables(value), value), before)
    value = with_most_steps(value)
    # 5. Check what needs no torch, then the folders, then the keys of each kind.
    try:
        plain = check_plain(value, where)
    except UsageError as error:
        raise named_after(error, layers) from None
    if kinds_of(value)["task"] == DEFAULT_KINDS["task"]:
        check_given(plain, where)
    check_places(plain, begins=not before)
    config = from_dict(value, where)
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
    """Say whether a recipe is a file of settings in JSON."""
    return path.suffix.lower() == ".json" and path.is_file()


def named_after(error: UsageError, layers: Sequence[tuple[Mapping[str, Any], str]]) -> UsageError:
    """Return an error with the name of the first file that makes it.

    layers: the recipe, then the recipe with each file of settings over those before; and names.
    """
    for value, name in layers:
        try:
            check_plain(value, name)
        except UsageError as found:
            if found.what == error.what:
                return found
    return error


def check_something_given(out: Path, options: Mapping[str, Any]) -> None:
    """Refuse options without a recipe that name nothing to learn from."""
    if not names_stores(options) and kinds_of(options) == kinds_of({}):
        raise UsageError(
            "there is neither a recipe nor a store, and no run to continue",
            where=str(out),
            hint=f"begin one: tokmill train STORE -o {shlex.quote(str(out))}",
        )


def names_stores(options: Mapping[str, Any]) -> bool:
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


def with_absolute_places(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe whose folders are absolute: a run may be continued from elsewhere."""
    made = {
        table: absolute(value[table], keys)
        for table, keys in PLACES.items()
        if isinstance(value.get(table), Mapping)
    }
    return {**value, **made}


def absolute(table: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return a table with the paths of some keys made absolute; they are one path or a list."""

    def made(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [made(one) for one in value]
        return place_of(value) if isinstance(value, str) and value else value

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
