"""What can be changed about a module, and how a list of changes is measured: a space of schedules.

It is the own lowering, whose actions change loops (`legal`, `schedule`, `execute`). An operation is
changed by actions one after the other; a schedule is the list of all of them, and is written as a
file.
"""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.mlir.loops import legal, lower
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.loops.legal import State
from tokmill.mlir.modules.problem import Problem


class Space:
    """The own lowering, by MLIR's passes."""

    kinds: tuple[str, ...] = (
        "stop",
        "tile",
        "parallel",
        "fuse",
        "interchange",
        "pack",
        "im2col",
        "vectorize",
    )
    """Kinds of actions; the first one is `stop`."""
    parts: Mapping[str, str] = {
        "tile": "tiles",
        "parallel": "parallel_tiles",
        "fuse": "parallel_tiles",
        "interchange": "order",
        "pack": "tiles",
    }
    """Kind → what else an action of it says: `tiles`, `parallel_tiles` (reductions stay whole) or
    `order`. A kind that is not there says nothing else."""
    sizes: tuple[int, ...] = legal.TILES
    """Tiles that loops can have; the first one is 0, for a loop that stays as it is."""
    child = "tokmill.mlir.loops.execute:measure"
    """`module:function` that measures in a child."""
    package = "torch-mlir"
    """Whose version belongs to a measurement."""

    @property
    def rules(self) -> str:
        """What else a measurement depends on: how this package compiles and runs."""
        return lower.rules()

    def tiles(self, state: State, kind: str, loop: int) -> list[bool]:
        """Return for each of `sizes` whether an action of a kind may cut a loop so."""
        if self.parts.get(kind) == "parallel_tiles" and not state.parallel[loop]:
            return [size == 0 for size in self.sizes]
        return legal.tiles(state, loop)

    def action(
        self, state: State, kind: str, sizes: tuple[int, ...], order: tuple[int, ...]
    ) -> Any:
        operation = state.operation
        tag = operation.tag
        if kind == "fuse":
            last = operation.producers[-1][1] if operation.producers else -1
            return actions.Fuse(tag, sizes, f"op_{last}")
        if kind == "interchange":
            return actions.Interchange(tag, order)
        plain: dict[str, actions.AnyAction] = {
            "stop": actions.Stop(tag),
            "tile": actions.Tile(tag, sizes),
            "parallel": actions.Parallel(tag, sizes),
            "pack": actions.Pack(tag, sizes),
            "im2col": actions.Im2col(tag),
            "vectorize": actions.Vectorize(tag),
        }
        return plain[kind]

    def text(self, problem: Problem, schedule: Any) -> str:
        states = legal.replay(problem.operations, schedule)
        return actions.text(schedule, legal.decomposed(states))


class IreeDefault(Space):
    """IREE's code of a module as its default makes it: no schedule changes it."""

    child = "tokmill.mlir.iree.executor:answer"
    package = "iree-base-compiler"

    def __init__(self) -> None:
        plugins.require("iree.compiler")

    @property
    def rules(self) -> str:
        """The runtime: code is compiled by one package and run by another."""
        return importlib.metadata.version("iree-base-runtime")

    def text(self, problem: Problem, schedule: Any) -> str:
        return ""


LOOPS = Space()


def cuts(state: State, loops: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Return which tiles each kind allows, int8 (kinds, loops, tiles).

    Kinds without tiles, and loops that the operation has not, allow 0 alone.
    """
    result = np.zeros((len(LOOPS.kinds), loops, len(LOOPS.sizes)), np.int8)
    result[:, :, 0] = 1
    for number, kind in enumerate(LOOPS.kinds):
        if LOOPS.parts.get(kind, "order") == "order":
            continue
        for loop in range(min(len(state.bounds), loops)):
            result[number, loop] = LOOPS.tiles(state, kind, loop)
    return result
