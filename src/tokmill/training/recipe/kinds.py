"""Kinds of models, tasks and optimisers, and the keys of their tables in a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.base.errors import UsageError, nearest
from tokmill.training.recipe.config import TrainConfig

KINDS = {"model": plugins.MODELS, "task": plugins.TASKS, "optim": plugins.OPTIMIZERS}
"""Table of a recipe whose keys depend on its `kind` → all kinds."""
DEFAULT_KINDS = {"model": "decoder", "task": "next_token", "optim": "adamw"}
"""The kinds of a recipe that names none."""
LEARNED = ("model", "task")
"""The tables that decide which weights there are."""


def config_type(**kinds: str) -> type[TrainConfig]:
    """Return the strict type of recipes with these kinds; by default those of `DEFAULT_KINDS`."""
    fields = []
    for section, kind in (DEFAULT_KINDS | kinds).items():
        check_kind(section, kind)
        part = plugins.load(KINDS[section], kind)
        fields.append((section, part.Config, part.Config()))
    struct: Any = msgspec.defstruct(
        "TrainConfig",
        fields,
        bases=(TrainConfig,),
        module=__name__,
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )
    made: type[TrainConfig] = struct
    return made


def check_kind(section: str, kind: str, where: str = "") -> None:
    """Raise `UsageError` for an unknown kind of a table."""
    if kind not in KINDS[section]:
        name = "optimiser" if section == "optim" else section
        raise UsageError(
            f"no {name} is called {kind!r}", where=where, hint=nearest(kind, KINDS[section])
        )


def kinds_of(value: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of model, task and optimiser of a recipe given as nested dicts."""
    kinds = dict(DEFAULT_KINDS)
    for section in kinds:
        part = value.get(section)
        if isinstance(part, Mapping) and isinstance(part.get("kind"), str):
            kinds[section] = part["kind"]
    return kinds


def with_size(value: Mapping[str, Any], model: str, where: str = "") -> dict[str, Any]:
    """Return a recipe in which `model.size = "base"` is the keys that it stands for.

    Keys that stand beside it win. `model`: the kind of the model.
    """
    table = value.get("model")
    if not isinstance(table, Mapping) or "size" not in table:
        return dict(value)
    check_kind("model", model, where)
    known = getattr(plugins.load(plugins.MODELS, model).Config, "sizes", {})
    size = table["size"]
    if not isinstance(size, str) or size not in known:
        raise UsageError(
            f"model.size: no {model} is called {size!r}"
            if known
            else f"model.size: the sizes of the model {model} have no names",
            where=where,
            hint=nearest(str(size), known) if known else "set model.dim, model.layers, model.heads",
        )
    kept = {key: one for key, one in table.items() if key != "size"}
    return {**value, "model": {**known[size], **kept}}
