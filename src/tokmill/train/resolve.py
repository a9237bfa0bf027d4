"""What a training is asked to be: a recipe, a store or a run, and options over it.

Nothing here imports torch before the plain mistakes are found: who mistypes does not wait for it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokmill import recipe as recipes
from tokmill.errors import UsageError
from tokmill.store.manifest import read_json
from tokmill.store.store import Store
from tokmill.train import config as configs
from tokmill.train.config import TrainConfig

RECIPE = "recipe.json"
DATA_SUFFIXES = (".txt", ".text", ".md", ".jsonl", ".json", ".gz", ".zst", ".parquet")
"""Files that are something to learn from, and surely no recipe."""


def resolve(
    recipe: Path | str | Mapping[str, Any] | None,
    out: Path,
    options: Mapping[str, Any],
    resume: bool,
) -> TrainConfig:
    """Return the checked recipe from a file, a store's folder or nested dicts, and options over it.

    With `resume`, what is not given comes from the run: the whole recipe, or the stores' places.
    """
    before = read_recipe(out) if resume and (out / RECIPE).exists() else {}
    where = "options"
    if recipe is None:
        if resume and not before:
            raise UsageError(
                "there is no run to continue",
                where=str(out),
                hint=f"begin one: tokmill train STORE -o {shlex.quote(str(out))}",
            )
        if not before:
            raise UsageError(
                "there is neither a recipe nor a store", hint="name one: tokmill train STORE -o RUN"
            )
        value = dict(before)
    elif isinstance(recipe, Mapping):
        value = dict(recipe)
    elif Path(recipe).is_dir():
        value = {"data": {"train": str(recipe)}}
    elif Path(recipe).is_file():
        value, where = read_file(Path(recipe)), str(recipe)
    else:
        raise UsageError(
            "there is no such recipe or store", where=str(recipe), hint="`tokmill build` makes one"
        )
    value = recipes.merge(value, options)
    data = value.get("data", {})
    if isinstance(data, Mapping):
        data = dict(data)
        for name in ("train", "val"):
            if not data.get(name) and before:
                data[name] = before["data"][name]
            if isinstance(data.get(name), str) and data[name]:
                data[name] = str(Path(data[name]).absolute())
            elif isinstance(data.get(name), list | tuple):
                data[name] = [str(Path(one).absolute()) for one in data[name]]
    value = {**value, "data": data}
    plain = configs.check_plain(value, where)
    if not plain.data.train:
        raise UsageError(
            "the recipe names no store to learn from",
            where=where,
            hint="give one: --data STORE, or --set data.train=STORE",
        )
    for place in filter(None, (*plain.data.stores, plain.data.val)):
        Store(place)
    return configs.from_dict(value, where)


def read_file(path: Path) -> dict[str, Any]:
    """Return a recipe file as a dict; text to learn from is no recipe."""
    if path.suffix.lower() in DATA_SUFFIXES:
        kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(path.suffix.lower(), "text")
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
    return f"tokmill train --resume -o {shlex.quote(str(run))}"
