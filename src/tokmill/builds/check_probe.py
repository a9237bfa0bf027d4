"""The probe of a store: the first build of its shards writes it, all later ones compare with it."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable
from pathlib import Path

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.base.files import make_folder, remove, write_file
from tokmill.base.locks import locked
from tokmill.builds.source import Source
from tokmill.store import manifest as layout
from tokmill.store.checks.probe import compare, probe_digest, probe_path, read_probe
from tokmill.store.manifest import Manifest, Plan, sealed

PROBE_LOCK = "vocab/.probe.lock"
HINT = (
    "use the packages or the --engine with which the store was begun; or build a new store, or "
    "this one anew with --fresh"
)


def settle_probe(source: Source, store: Path) -> None:
    """Compare the ids of known texts with those of the store's probe; write a missing probe.

    Raises `TokmillError` if the engine gives other ids.
    """
    now = source.probe(())
    if now is None:
        return
    path = probe_path(store)
    if not path.exists():
        make_folder(path.parent)
        lock = store / PROBE_LOCK
        with locked(lock, "", "", wait=math.inf):
            if not path.exists():
                write_file(path, sealed(now))
            remove(lock)
    stored = read_probe(store)
    if stored.texts() != now.texts():
        now = source.probe(stored.texts()) or now
    compare(
        stored.answers,
        now.answers,
        where=str(path),
        who="the engine gives other ids than when the store was begun",
        hint=HINT,
    )


def restore_probe(store: Path, plan: Plan, make: Callable[[], Source]) -> bool:
    """Write the probe of a store again if it is damaged or lost; say whether it was written.

    `make` makes the source, if it is needed.

    Raises `TokmillError` if the new probe has another digest than the manifest states.
    """
    kind = plugins.load(plugins.SOURCES, plan.recipe["source"])
    if kind.probe is Source.probe:
        return False
    wanted = None
    with contextlib.suppress(TokmillError):
        wanted = layout.read_sealed(store / "manifest.json", Manifest).probe
    if probe_path(store).exists() and (not wanted or wanted == probe_digest(store)):
        with contextlib.suppress(TokmillError):
            read_probe(store)
            return False
    probe = make().probe(())
    if probe is None:
        return False
    data = sealed(probe)
    if wanted and wanted != hashlib.sha256(data).hexdigest():
        raise TokmillError(
            "the probe was damaged, and the engine gives other ids than when the store was built",
            where=str(probe_path(store)),
            hint=HINT,
        )
    make_folder(store / "vocab")
    write_file(probe_path(store), data)
    return True
