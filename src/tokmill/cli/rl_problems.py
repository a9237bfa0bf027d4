"""The modules that are named on the command line of `tokmill rl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokmill import plugins
from tokmill.cli.output import say

REFUSED = 5
"""Modules of a folder that were refused, of which each is named."""


def problems_of(modules: list[str]) -> list[Any]:
    """Return the problems that files, folders and lines of sizes name."""
    problem = plugins.require("tokmill.mlir.problem")
    found: list[Any] = []
    for name in modules:
        path = Path(name)
        if path.is_dir():
            folder = problem.of_folder(path)
            for note in folder.notes:
                say(f"note: {name}: {note}")
            for file, why in folder.refused[:REFUSED]:
                say(f"note: {file}: refused, {why}")
            if len(folder.refused) > REFUSED:
                say(f"note: {name}: {len(folder.refused):,} modules refused in all")
            found += folder.problems
        elif path.suffix == ".mlir" or path.exists():
            found.append(problem.of_file(path))
        else:
            found.append(problem.of_line(name))
    return found
