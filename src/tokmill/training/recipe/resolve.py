"""What a training is asked to be: a recipe, a store or a run, and options over it.

Nothing here imports torch before the plain mistakes are found: who mistypes does not wait for it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokmill import recipe as recipes
from tokmill.errors import TokmillError, UsageError
from tokmill.files import machine_errors
from tokmill.store.manifest import read_json
from tokmill.store.store import Store
from tokmill.training.launch import resume_flags
from tokmill.training.recipe import config as configs
from tokmill.training.recipe import key_names as names
from tokmill.training.recipe.config import TrainConfig

RECIPE = "recipe.json"
PLACES = {"data": ("train", "val"), "run": ("start",)}
"""Keys of recipes that name folders."""
DATA_SUFFIXES = (".txt", ".text", ".md", ".jsonl", ".json", ".gz", ".zst", ".parquet", ".bin")
"""Files that are something to learn from, and surely no recipe."""
BUILT_FROM = {
    b"\x7fELF": ("programs", "tokmill build x86 FOLDER -o STORE"),
    b"MZ": ("programs", "tokmill build x86 FOLDER -o STORE"),
    b"PAR1": (
        "Parquet files",
        "`tokmill build x86` of graphs of programs, `tokmill build parquet` of texts",
    ),
}
"""How files begin of which stores are built → what they are, and the command."""
LOOKED_AT = 100
"""Files of a folder without a store, of which is asked what they are."""


def resolve(
    recipe: Path | str | Mapping[str, Any] | None,
    out: Path,
    options: Mapping[str, Any],
    resume: bool,
) -> TrainConfig:
    """Return the checked recipe, from a file, the name of a shipped one, a store's folder or nested
    dicts, and options over it.

    With `resume`, what is not given comes from the run: the whole recipe, or the stores' places.
    """
    if isinstance(recipe, str | Path):
        recipe = recipes.find(recipe)
    before = read_recipe(out) if resume and (out / RECIPE).exists() else {}
    where = "options"
    if recipe is None:
        if resume and not before:
            raise UsageError(
                "there is no run to continue",
                where=str(out),
                hint=f"begin one: tokmill train STORE -o {shlex.quote(str(out))}",
            )
        if not before and not has_stores(options):
            raise UsageError(
                "there is neither a recipe nor a store", hint="name one: tokmill train STORE -o RUN"
            )
        value = dict(before)
    elif isinstance(recipe, Mapping):
        value = dict(recipe)
    elif Path(recipe).is_dir():
        if has_stores(options):
            raise UsageError(
                "stores to learn from are named twice, in front and by --data",
                where=str(recipe),
                hint="name all of them in one way: --data A --data B mixes two",
            )
        _check_folder(Path(recipe))
        value = {"data": {"train": str(recipe)}}
    elif Path(recipe).is_file():
        value, where = read_file(Path(recipe)), str(recipe)
        if "source" in value:
            raise UsageError(
                f"this is a recipe of the build {value['source']}, not of a training",
                where=where,
                hint=f"tokmill build {recipe} INPUT… -o STORE, then tokmill train STORE -o RUN",
            )
    elif Path(recipe).suffix == ".toml":
        raise UsageError(
            "there is no such recipe", where=str(recipe), hint=recipes.other_recipe(recipe)
        )
    else:
        # A store that is not there ends as one that --data or --val names.
        hint = recipes.other_recipe(recipe)
        raise TokmillError(
            "there is no such recipe or store",
            where=str(recipe),
            hint=hint
            if "mean" in hint
            else "`tokmill build` makes a store, `tokmill recipe list` shows recipes",
        )
    value = names.merged(value, options, where)
    for table, keys in PLACES.items():
        part = value.get(table, {})
        if isinstance(part, Mapping):
            value[table] = absolute(part, keys)
    value = recipes.merge(start_tables(value), value)
    data = value["data"]
    if isinstance(data, Mapping) and before:
        value["data"] = {
            **data,
            **{k: before["data"][k] for k in ("train", "val") if not data.get(k)},
        }
    plain = configs.check_plain(value, where)
    if not plain.data.train:
        raise UsageError(
            "the recipe names no store to learn from",
            where=where,
            hint="give one: --data STORE, or --set data.train=STORE",
        )
    for place in filter(None, (*plain.data.stores, plain.data.val)):
        Store(place)
    if plain.run.start and not before and not Path(plain.run.start).exists():
        raise TokmillError(
            "there is no run to start from", where=plain.run.start, hint="--from names its folder"
        )
    return configs.from_dict(value, where)


def _check_folder(folder: Path) -> None:
    """Refuse a folder of programs or Parquet files, of which a store is built first."""
    if any((folder / name).exists() for name in ("manifest.json", "plan.json")):
        return
    with machine_errors("read", folder):
        files = [path for path in sorted(folder.iterdir())[:LOOKED_AT] if path.is_file()]
    for path in files:
        with machine_errors("read", path), open(path, "rb") as file:
            head = file.read(4)
        for magic, (what, hint) in BUILT_FROM.items():
            if head.startswith(magic):
                raise TokmillError(
                    f"the folder holds no store, but {what} ({path.name})",
                    where=str(folder),
                    hint=f"build one first: {hint}",
                )


def has_stores(options: Mapping[str, Any]) -> bool:
    """Say whether options name stores to learn from."""
    data = options.get("data")
    return isinstance(data, Mapping) and bool(data.get("train"))


def absolute(table: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return a table with the paths of some keys made absolute; they are one path or a list."""

    def made(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [made(one) for one in value]
        return str(Path(value).absolute()) if isinstance(value, str) and value else value

    return {key: made(value) if key in keys else value for key, value in table.items()}


def start_tables(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model and the task of the run that a recipe starts from, if it wants no others."""
    options = value.get("run")
    start = options.get("start") if isinstance(options, Mapping) else ""
    run = run_of(Path(start)) if isinstance(start, str) and start else None
    if run is None:
        return {}
    before = read_recipe(run)
    given = {table: value.get(table, {}) for table in configs.LEARNED}
    return {
        table: before[table]
        for table, keys in given.items()
        if isinstance(keys, Mapping) and keys.get("kind") in (None, before[table]["kind"])
    }


def run_of(place: Path) -> Path | None:
    """Return the run that a folder is, or that it lies in as one of its folders with weights."""
    return next((run for run in (place, *place.parents[:2]) if (run / RECIPE).exists()), None)


def read_file(path: Path) -> dict[str, Any]:
    """Return a recipe file as a dict; text to learn from is no recipe."""
    if path.suffix.lower() in DATA_SUFFIXES:
        kinds = {".jsonl": "jsonl", ".parquet": "parquet", ".bin": "bin"}
        kind = kinds.get(path.suffix.lower(), "text")
        raise UsageError(
            "this is no recipe and no store",
            where=str(path),
            hint=f"`tokmill build {kind} {shlex.quote(str(path))} -o STORE` first, "
            "then `tokmill train STORE -o RUN`",
        )
    return recipes.read_toml(path)


def read_recipe(run: Path) -> dict[str, Any]:
    """Return the resolved recipe of a run."""
    value: dict[str, Any] = read_json(run / RECIPE, dict[str, Any])
    return value


def resume_command(run: Path) -> str:
    """Return the command that continues a run."""
    return f"tokmill train --resume -o {shlex.quote(str(run))}{resume_flags()}"
