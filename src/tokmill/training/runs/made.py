"""What a run keeps of how its store was made, where whoever asks the model has to know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.files import write_file
from tokmill.store.manifest import PLAN, Plan, encode, read_json, read_sealed
from tokmill.store.store import Store

MADE = "made.json"


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """The source of the store that a run learned from, and its options."""

    source: str
    options: dict[str, Any]


def keep_made(store: Store, out: Path) -> None:
    """Write how a store was made, where its kind of source is one that prompts are written like."""
    path = store.path / PLAN
    if store.manifest.source not in plugins.CHATS or not path.exists():
        return
    plan = read_sealed(path, Plan)
    write_file(out / MADE, encode(Made(source=store.manifest.source, options=plan.options)))


def options_of(run: Path) -> dict[str, Any]:
    """Return the options of the source of a run's store; none where nothing was kept."""
    path = run / MADE
    return read_json(path, Made).options if path.exists() else {}
