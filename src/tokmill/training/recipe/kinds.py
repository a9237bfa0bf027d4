"""Kinds of models, tasks and optimisers: which keys their tables of a recipe have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.errors import UsageError, nearest
from tokmill.training.recipe.config import TrainConfig

KINDS = {"model": plugins.MODELS, "task": plugins.TASKS, "optim": plugins.OPTIMIZERS}
"""Tables of a recipe whose keys depend on their `kind` → the kinds that there are."""
DEFAULT_KINDS = {"model": "decoder", "task": "next_token", "optim": "adamw"}
"""What is meant where a recipe names no kind."""
LEARNED = ("model", "task")
"""The tables that say which weights there are."""


def config_type(**kinds: str) -> type[TrainConfig]:
    """Return the strict type of recipes with these kinds of model, task and optimiser.

    What is not given is of its default kind.
    """
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
    """Refuse a kind of a table that there is not."""
    if kind not in KINDS[section]:
        name = "optimiser" if section == "optim" else section
        raise UsageError(
            f"no {name} is called {kind!r}", where=where, hint=nearest(kind, KINDS[section])
        )


def kinds_of(value: Mapping[str, Any]) -> dict[str, str]:
    """Return which model, task and optimiser a recipe as nested dicts asks for."""
    kinds = dict(DEFAULT_KINDS)
    for section in kinds:
        part = value.get(section)
        if isinstance(part, Mapping) and isinstance(part.get("kind"), str):
            kinds[section] = part["kind"]
    return kinds
