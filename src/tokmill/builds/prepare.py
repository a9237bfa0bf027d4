"""The recipe of a build, and the plan that follows from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from tokmill import plugins, recipe
from tokmill.builds.plan import make_plan
from tokmill.builds.resources import Amount
from tokmill.builds.scan import OWN
from tokmill.builds.source import Frozen, Request, Source
from tokmill.errors import UsageError
from tokmill.files import path_to_text
from tokmill.store.manifest import Plan, PlannedItem
from tokmill.store.references import written_in


class BuildRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to build: source, inputs, options."""

    source: str
    inputs: tuple[str, ...] = ()
    out: str = ""
    tokenizer: str | None = None
    """Tokenizer of text sources; for imported token files, the one that made them, if known."""
    roles: dict[str, str] = {}
    """Role → special token, if the names of the tokens do not show it."""
    options: dict[str, Any] = {}
    """The source's own keys (`tokmill recipe schema KIND`)."""


class How(msgspec.Struct, frozen=True, kw_only=True):
    """How to build; no field changes a byte of the store."""

    amount: Amount = Amount()
    part: tuple[int, int] | None = None
    limit_seconds: float | None = None
    max_rejects: float = 0.01
    fresh: bool = False
    yes: bool = False
    quiet: bool = False


class Prepared(msgspec.Struct, frozen=True):
    """A planned build that has not begun."""

    recipe: BuildRecipe
    config: msgspec.Struct
    frozen: dict[str, Frozen]
    plan: Plan
    planned: list[PlannedItem]

    def source(self) -> Source:
        """Make the source, to read from."""
        kind = plugins.load(plugins.SOURCES, self.recipe.source)
        resources = Amount().resources()
        source: Source = kind(self.config, self.recipe.inputs, self.frozen, resources)
        return source


def folder_of(chosen: BuildRecipe) -> Path:
    """Return the folder of a build: the named one, or for an overlay a folder in its store."""
    kind = plugins.load(plugins.SOURCES, chosen.source)
    if not kind.is_overlay:
        if not chosen.out:
            raise UsageError("no folder for the store was named", hint="-o STORE")
        return Path(chosen.out)
    if chosen.out:
        raise UsageError(
            "an overlay lies in its store", hint="leave -o out; --name chooses its name"
        )
    config = recipe.convert(kind.Config, chosen.options, f"options of {chosen.source}")
    folder: Path = kind.folder(config, chosen.inputs)
    return folder


def prepare(chosen: BuildRecipe) -> Prepared:
    """Check the options, make the vocabularies and the plan; nothing is written."""
    kind = plugins.load(plugins.SOURCES, chosen.source)
    config = recipe.convert(kind.Config, chosen.options, f"options of {chosen.source}")
    request = Request(inputs=chosen.inputs, tokenizer=chosen.tokenizer, roles=chosen.roles)
    own = OWN.set(os.path.abspath(chosen.out) if chosen.out else "")
    try:
        config = kind.resolve(config, request)
        frozen = kind.freeze(config, request)
        source: Source = kind(config, chosen.inputs, frozen, Amount().resources())
        plan, planned = make_plan(chosen.source, source, config, frozen, chosen.inputs)
    finally:
        OWN.reset(own)
    if isinstance(plan.references, dict):
        placed = written_in(folder_of(chosen), plan.references)
        plan = msgspec.structs.replace(plan, references=placed)
    if chosen.tokenizer is not None:
        plan = msgspec.structs.replace(
            plan, tokenizer=path_to_text(str(Path(chosen.tokenizer).absolute()))
        )
    if chosen.roles:
        plan = msgspec.structs.replace(plan, roles=chosen.roles)
    return Prepared(chosen, config, frozen, plan, planned)
