"""Reading a recipe: from a file, the name of a shipped one, a store, nested dicts or a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokmill import recipe as recipes
from tokmill.errors import TokmillError, UsageError
from tokmill.files import machine_errors
from tokmill.inflate import MAGIC
from tokmill.store.manifest import read_json
from tokmill.store.marks import has_store_files
from tokmill.training.recipe.key_names import in_tables, merged

RECIPE = "recipe.json"
"""The resolved recipe in the folder of a run."""
DATA_SUFFIXES = (".txt", ".text", ".md", ".jsonl", *MAGIC, ".parquet", ".bin")
"""Endings of data files, which are no recipes."""
BUILT_FROM = {
    b"\x7fELF": ("programs", "tokmill build x86 FOLDER -o STORE"),
    b"MZ": ("programs", "tokmill build x86 FOLDER -o STORE"),
    b"PAR1": (
        "Parquet files",
        "`tokmill build x86` of graphs of programs, `tokmill build parquet` of texts",
    ),
}
"""First bytes of files from which stores are built → what they are, and the command."""
LOOKED_AT = 100
"""Files of a folder that are checked for these first bytes."""


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
        _check_folder(path)
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


def _check_folder(folder: Path) -> None:
    """Refuse a folder of programs or Parquet files, from which a store must be built first."""
    if has_store_files(folder):
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
    found = merged(value, options, where, options_from)
    asked = in_tables(options, found, options_from).get("run", {})
    if isinstance(asked, Mapping) and asked.get("epochs") and "steps" not in asked:
        found["run"] = {key: one for key, one in found["run"].items() if key != "steps"}
    return found


def read_recipe(run: Path) -> dict[str, Any]:
    """Return the resolved recipe of a run."""
    value: dict[str, Any] = read_json(run / RECIPE, dict[str, Any])
    return value


def run_of(place: Path) -> Path | None:
    """Return the run that a folder is or lies in (as a folder of weights), or None."""
    return next((run for run in (place, *place.parents[:2]) if (run / RECIPE).exists()), None)
