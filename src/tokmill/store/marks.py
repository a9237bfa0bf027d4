"""Recognise the folders of stores and runs by the content of their files.

Names of files are not enough: a folder with the `manifest.json` of a web page is not a store.
"""

import contextlib
import re
from collections.abc import Collection
from pathlib import Path

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.base.files import read_file
from tokmill.base.headers import loads_json
from tokmill.base.locks import is_lock

HEAD = 1 << 12
LARGEST = 64 << 20
"""Bytes above which a file is not taken for one of a run's two small files."""
STORE = re.compile(
    rb'"format":\s*\d+,.{,200}?"recipe_id":\s*"[0-9a-f]{64}",\s*"plan_id":\s*"[0-9a-f]{64}"',
    re.DOTALL,
)
"""Matches the beginning of the plan or the manifest of a store."""
STORE_FILES = ("manifest.json", "plan.json")
RUN_FILES = {
    "recipe.json": {"data", "model", "task", "optim"},
    "schema.json": {"columns", "schema"},
}
"""The two files of every run, and keys that they have."""
LOCK = ".lock"


def is_store(folder: Path) -> bool:
    """Say whether a folder holds a store, or one whose build has begun."""
    return any(_is_marked(folder / name) for name in STORE_FILES)


def has_store_files(folder: Path) -> bool:
    """Say, by names alone, whether a folder holds a store; its files may be damaged."""
    return any((folder / name).exists() for name in STORE_FILES)


def is_run(folder: Path) -> bool:
    return all(keys <= _keys(folder / name) for name, keys in RUN_FILES.items())


def kind_of(folder: Path, names: Collection[str]) -> str:
    """Return "store" or "run" if a folder holds one, else ""; `names` are its files."""
    if not {LOCK, *STORE_FILES, *RUN_FILES}.isdisjoint(names):
        if is_store(folder):
            return "store"
        if is_run(folder):
            return "run"
        if is_lock(folder / LOCK):
            return "run" if "recipe.json" in names else "store"
    return ""


def _is_marked(path: Path) -> bool:
    with contextlib.suppress(OSError, TokmillError):
        return path.is_file() and STORE.search(read_file(path, HEAD)) is not None
    return False


def _keys(path: Path) -> set[str]:
    with contextlib.suppress(OSError, TokmillError, ValueError):
        if path.is_file() and path.stat().st_size <= LARGEST:
            return set(loads_json(read_file(path), dict[str, msgspec.Raw]))
    return set()
