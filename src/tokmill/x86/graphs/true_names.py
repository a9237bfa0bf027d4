"""Names of the functions of a stripped program, by the debug information kept of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath

from tokmill.base.errors import TokmillError
from tokmill.base.files import inside, sha256_file
from tokmill.x86.graph import Graph
from tokmill.x86.image.debug.debug_info import DebugInfo, read_debug_info

VERSION = 1
"""Raised when a name changes."""


def debug_file(names: Path, program: str) -> Path:
    """Return the file with the debug information of a program.

    `names` is a folder in which it is called as the program, or the file itself. Raises
    `TokmillError` where it is not there.
    """
    path = inside(names, program, deep=True) if names.is_dir() else names
    if not path.is_file():
        raise TokmillError(
            "there is no debug information of the program",
            where=str(path),
            hint="--names takes a folder in which each program has the name that it has here",
        )
    return path


def name_functions(graph: Graph, path: Path) -> None:
    """Give the functions of a graph the names that debug information has for their addresses.

    All other names go, also those of symbols. Raises `TokmillError` where the file has no debug
    information, or that of another program.
    """
    info = read_debug_info(path)
    names = names_of(info)
    if not names:
        why = ", ".join(f"{count:,} {what}" for what, count in info.left_out.items())
        raise TokmillError(
            f"its debug information names no function{': ' * bool(why)}{why}",
            where=str(path),
            hint="name the file with all debug information, as the compiler made it",
        )
    found = [names.get(address, "") for address in graph.function_address.tolist()]
    named = sum(map(bool, found))
    if len(names) > 1 and named * 2 < len(names):
        raise TokmillError(
            f"only {named:,} of its {len(names):,} functions begin where the program has one",
            where=str(path),
            hint="it is the debug information of another program, or of another build of it",
        )
    graph.function_name = found


def names_of(info: DebugInfo) -> dict[int, str]:
    """Return the name of the function that begins at each address.

    A name that several compilations have (static functions) is followed by `@` and the name of its
    source file. What the compiler cloned has the name of the whole function where that is not there
    itself, else `.clone` behind it. Of several functions at one address the first by name is taken.
    """
    units: dict[str, set[int]] = {}
    for name, unit in (*zip(info.name, info.unit.tolist(), strict=True), *info.described):
        units.setdefault(name, set()).add(unit)
    keys = list(zip(info.name, info.unit.tolist(), strict=True))
    clone = info.clone.tolist()
    whole = {key for key, cloned in zip(keys, clone, strict=True) if not cloned}
    clones = Counter(key for key, cloned in zip(keys, clone, strict=True) if cloned)
    found: dict[int, str] = {}
    for place, address in enumerate(info.entry.tolist()):
        name, unit = keys[place]
        shown = name
        if len(units[name]) > 1 and unit >= 0:
            shown = f"{name}@{PurePosixPath(info.files[unit]).name}"
        if clone[place] and (keys[place] in whole or clones[keys[place]] > 1):
            shown += ".clone"
        found[address] = min(shown, found.get(address, shown))
    return found


def digest_of_names(path: Path) -> str:
    """Return what decides the names beside the program: the file, and the version of the rules."""
    return f"names {VERSION} of {sha256_file(path)}"
