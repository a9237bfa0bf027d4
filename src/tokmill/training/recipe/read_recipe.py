"""Reading a recipe: from a file, the name of a shipped one, a store, nested dicts or a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokmill.base import recipe as recipes
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.inflate import MAGIC
from tokmill.store.manifest import read_json
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.key_names import in_tables, merged

FREE = {
    "data.train", "data.val", "data.verify", "run.device", "run.log_every", "run.eval_every",
    "run.eval_rows", "run.checkpoint_every", "run.keep", "run.max_time", "run.prefetch",
    "run.best", "run.track", "run.peak_flops", "run.recompute", "run.engine", "run.over_memory",
}  # fmt: skip
"""Keys that may change when a run is continued, because they do not decide the weights. The content
of `data.train` is checked by its fingerprint; another device changes only rounding, and is
reported."""

ENGINE = "engine."
"""Keys with this prefix (settings of engines) may change too."""

RATE = {
    "run.steps", "run.epochs",
    "optim.lr", "optim.schedule", "optim.warmup", "optim.warmup_share", "optim.decay",
    "optim.floor",
}  # fmt: skip
"""Keys that decide only the learning rates: they may change within a run if the steps that are
done had the same rates."""


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one: {"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat.update(flatten(inner, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def is_free(key: str) -> bool:
    """Say whether a key may change within a run."""
    return key in FREE or key.startswith(ENGINE)


def differences(before: Mapping[str, Any], after: TrainConfig) -> dict[str, str]:
    """Return key → "old → new" for the keys that decide the weights and differ."""
    # `before` was read from JSON, which turns tuples into lists.
    old, new = flatten(before), flatten(msgspec.json.decode(msgspec.json.encode(after)))
    return {
        key: f"{old.get(key)!r} → {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if not is_free(key) and old.get(key) != new.get(key)
    }


RECIPE = "recipe.json"
"""The resolved recipe in the folder of a run."""
DATA_SUFFIXES = (".txt", ".text", ".md", ".jsonl", *MAGIC, ".parquet", ".bin")
"""Endings of data files, which are no recipes."""


def read_given(recipe: Path | str | Mapping[str, Any], named: bool) -> tuple[dict[str, Any], str]:
    """Return the recipe before options as nested dicts, and its name in errors.

    `named`: whether the options name stores to learn from.
    """
    if isinstance(recipe, Mapping):
        return dict(recipe), "options"
    path = Path(recipes.find(recipe))
    if path.is_dir():
        if named:
            raise UsageError(
                "stores to learn from are named twice, as an argument and by --data",
                where=str(path),
                hint="name all of them by --data: --data A --data B mixes two",
            )
        return {"data": {"train": str(path)}}, "options"
    if path.is_file():
        return read_file(path), str(path)
    hint = recipes.other_recipe(path)
    if path.suffix == ".toml":
        raise UsageError("there is no such recipe", where=str(path), hint=hint)
    # The exit code is that of a missing store of --data or --val.
    raise TokmillError(
        "there is no such recipe or store",
        where=str(path),
        hint=hint
        if "mean" in hint
        else "`tokmill build` makes a store, `tokmill recipe list` shows recipes",
    )


def read_file(path: Path) -> dict[str, Any]:
    """Return a recipe file as a dict; a data file is refused."""
    if path.suffix.lower() in DATA_SUFFIXES:
        kinds = {".jsonl": "jsonl", ".parquet": "parquet", ".bin": "bin"}
        kind = kinds.get(path.suffix.lower(), "text")
        raise UsageError(
            "this is neither a recipe nor a store",
            where=str(path),
            hint=f"`tokmill build {kind} {shlex.quote(str(path))} -o STORE` first, "
            "then `tokmill train STORE -o RUN`",
        )
    value = recipes.read_toml(path)
    if "source" in value:
        raise UsageError(
            f"this is a recipe of the build {value['source']}, not of a training",
            where=str(path),
            hint=f"tokmill build {path} INPUT… -o STORE, then tokmill train STORE -o RUN",
        )
    return value


def over(
    value: Mapping[str, Any],
    options: Mapping[str, Any],
    where: str = "",
    options_from: str = "options",
) -> dict[str, Any]:
    """Return a recipe with options over it, every key of both in its table.

    Epochs that options ask for are not ended by the steps of the recipe. In errors the recipe is
    called `where`, and the options `options_from`.
    """
    tables = merged(value, options, where, options_from)
    asked = in_tables(options, tables, options_from).get("run", {})
    if isinstance(asked, Mapping) and asked.get("epochs") and "steps" not in asked:
        tables["run"] = {key: one for key, one in tables["run"].items() if key != "steps"}
    return tables


def read_recipe(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = read_json(run / RECIPE, dict[str, Any])
    return value


def run_of(place: Path) -> Path | None:
    """Return the run that a folder is or lies in (as a folder of weights), or None."""
    return next((run for run in (place, *place.parents[:2]) if (run / RECIPE).exists()), None)
