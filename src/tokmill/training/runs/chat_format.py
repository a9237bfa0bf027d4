"""How the chats of a run's store were written, kept in the run to write prompts in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokmill import plugins
from tokmill.base.files import write_file
from tokmill.store.manifest import PLAN, Made, Plan, encode, read_json, read_sealed
from tokmill.store.store import Store

MADE = "made.json"


def keep_made(store: Store, out: Path) -> None:
    """Write source and options of a store of chats, or those of the chats that it was selected
    from.
    """
    path = store.path / PLAN
    if store.manifest.source not in ("select", *plugins.CHATS) or not path.exists():
        return
    plan = read_sealed(path, Plan)
    chats = plan.chats
    if store.manifest.source in plugins.CHATS:
        chats = Made(source=store.manifest.source, options=plan.options)
    if isinstance(chats, Made):
        write_file(out / MADE, encode(chats))


def options_of(run: Path) -> dict[str, Any]:
    """Return the options that `keep_made` wrote; none if the store holds no chats."""
    path = run / MADE
    return read_json(path, Made).options if path.exists() else {}
