"""Inputs that are no files, such as 'matmul 64 64 64': files in the store's cache, to read again.

The file lies in the store's `cache`, and its name says what it was made of, so an equal input gives
an equal plan. It is removed when the store's plan does not name it any more.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import make_folder, read_file, remove, write_file
from tokmill.builds.folder import check_folder, claimed
from tokmill.builds.plan import BuildRecipe
from tokmill.store import manifest as layout
from tokmill.store.marks import LOCK
from tokmill.store.receipts import read_planned

SPELLED = "spelled-"
LONGEST = 100
"""Characters of a name that says what a file was made of; a longer one is cut, with a digest."""


@contextlib.contextmanager
def spelled_kept(chosen: BuildRecipe) -> Iterator[BuildRecipe]:
    """Yield the recipe with files in place of the inputs that its source spells out.

    At the end files are removed that no plan names.
    """
    kind = plugins.load(plugins.SOURCES, chosen.source)
    spelled = {name: spelling for name in chosen.inputs if (spelling := kind.spelled(name))}
    if not spelled:
        yield chosen
        return
    if not chosen.out:
        raise UsageError("no folder for the store was named", hint="-o STORE")
    out = Path(chosen.out)
    check_folder(out)
    try:
        with claimed(out):
            cache = make_folder(out / "cache")
            places = {name: str(_spelled(cache, *spelling)) for name, spelling in spelled.items()}
        inputs = tuple(places.get(name, name) for name in chosen.inputs)
        yield msgspec.structs.replace(chosen, inputs=inputs)
    finally:
        _remove_unplanned(out)


def _spelled(cache: Path, name: str, data: bytes) -> Path:
    """Return the file of what a source made of a name; it is not written again if it is there."""
    stem, suffix = Path(name).stem, Path(name).suffix
    if len(stem) > LONGEST:
        stem = f"{stem[:LONGEST]}-{hashlib.sha256(data).hexdigest()[:8]}"
    path = cache / f"{SPELLED}{stem}{suffix}"
    return path if path.is_file() and read_file(path) == data else write_file(path, data)


def _remove_unplanned(out: Path) -> None:
    """Remove kept files that no plan names, and then the folder if it is empty."""
    named = set()
    planned = (out / layout.PLAN).exists()
    if planned:
        with contextlib.suppress(TokmillError):
            named = {Path(item.path).name for item in read_planned(out)}
    cache = out / "cache"
    for path in cache.glob(f"{SPELLED}*"):
        if path.name not in named:
            remove(path)
    left = {path.name for path in (*out.glob("*"), *cache.glob("*"))}
    if not planned and left <= {"cache", LOCK}:
        remove(out / LOCK)
        with contextlib.suppress(OSError):
            cache.rmdir()
            out.rmdir()
