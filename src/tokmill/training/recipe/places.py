"""The folders that a recipe names: made absolute, and checked before a training begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokmill.errors import TokmillError
from tokmill.store.store import Store
from tokmill.training.recipe.config import TrainConfig

PLACES = {
    "data": ("train", "val"),
    "run": ("start",),
    "task": ("benchmarks_folder_path", "held_out_folder_path", "cache"),
}
"""Keys of recipes that name folders or files."""


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
        return str(Path(value).absolute()) if isinstance(value, str) and value else value

    return {key: made(value) if key in keys else value for key, value in table.items()}


def check_places(config: TrainConfig, begins: bool) -> None:
    """Raise `TokmillError` for a store that cannot be opened.

    If a run begins, the run to start from must exist too.
    """
    for place in filter(None, (*config.data.stores, config.data.val)):
        Store(place)
    if config.run.start and begins and not Path(config.run.start).exists():
        raise TokmillError(
            "there is no run to start from",
            where=config.run.start,
            hint="--from names its folder",
        )
