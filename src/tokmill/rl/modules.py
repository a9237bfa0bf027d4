"""The modules that a recipe names, to learn from and held out, and the space of schedules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tokmill.errors import UsageError
from tokmill.mlir.modules import problem
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.tokens.features import Sizes
from tokmill.rl.task import SchedulesConfig

SMALL = "`model.loops`, `model.accesses` and `model.dimensions` say how much room there is"


def to_learn(config: SchedulesConfig, sizes: Sizes) -> list[Problem]:
    """Return the modules that are learned from; raises `UsageError` if there are none."""
    found = named(config.modules, config.benchmarks_folder_path, sizes)
    if not found:
        raise UsageError(
            "the recipe names no module to learn from",
            where="task.modules",
            hint="--set task.benchmarks_folder_path=FOLDER, or task.modules in a recipe",
        )
    return found


def held_out(
    config: SchedulesConfig, sizes: Sizes, learned: Sequence[Problem] = ()
) -> list[Problem]:
    """Return the modules that are only measured; none of those that are `learned` from."""
    found = named(config.held_out, config.held_out_folder_path, sizes)
    known = {one.text for one in learned}
    for one in found:
        if one.text in known:
            raise UsageError(
                f"{one.name} is held out, and learned from too",
                where="task.held_out",
                hint="name it once",
            )
    return found


def named(lines: Sequence[str], folder: str, sizes: Sizes) -> list[Problem]:
    """Return modules by their sizes and those of a folder; all have to fit into `sizes`.

    What a folder has besides is said on stderr.
    """
    found = [problem.of_line(line) for line in lines]
    if folder:
        inside = problem.of_folder(Path(folder))
        for line in inside.said(folder):
            print(f"note: {line}", file=sys.stderr)
        found += inside.problems
    for one in found:
        check_fits(one, sizes)
    return found


def check_fits(one: Problem, sizes: Sizes) -> None:
    """Raise `UsageError` for a module with an operation that a policy has no room for."""
    for operation in one.operations:
        if missing := sizes.fits(operation):
            raise UsageError(
                f"{operation.tag} ({operation.name}) has {missing}", where=one.name, hint=SMALL
            )
