"""IREE's own code generator as a space: tiles of its levels, and its pipeline.

IREE cuts a model into dispatches. The operation that decides how one is tiled, its root, gets a
`lowering_config`. An action replaces one level of it; levels that no action names stay as IREE
chose them, so that a schedule without actions is IREE's default. The levels, from the outside:

- `distribute`: tiles of parallel loops, one at a time; 0 leaves a loop whole;
- `cache`: tiles inside of these, 0 for none;
- `vector`: the innermost tiles, which become vectors; 0 keeps IREE's size.

`pipeline` lowers a convolution as other operations are lowered, or as one if IREE does not.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir.iree import spec
from tokmill.mlir.iree.spec import Config, Root
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.loops.legal import State
from tokmill.mlir.loops.schedule import Action
from tokmill.mlir.modules.operations import Access, Operation
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.space import Ask, Space

TILES = (0, 1, 2, 3, 4, 6, 7, 8, 12, 14, 16, 24, 28, 32, 48, 56, 64, 96, 112, 128, 192, 256, 384,
         512)  # fmt: skip
WIDEST = 64
"""The largest vector tile of the loop along which results lie side by side in memory."""
NARROWEST = 16
"""The smallest tile of a task along that loop: a narrower task hardly does more than begin."""
TALLEST = 16
"""The largest vector tile of any other loop: there are 16 or 32 registers."""
STEP = 8
"""Tiles of a loop whose size has no multiple of it as divisor need not divide the loop."""


class Distribute(Action, frozen=True, tag="distribute"):
    """Tiles of parallel loops; 0 leaves a loop whole."""

    sizes: tuple[int, ...]


class Cache(Action, frozen=True, tag="cache"):
    """Tiles inside of those; 0 leaves a loop as it is."""

    sizes: tuple[int, ...]


class Vector(Action, frozen=True, tag="vector"):
    """Tiles that become vectors; 0 keeps IREE's."""

    sizes: tuple[int, ...]


class Pipeline(Action, frozen=True, tag="pipeline"):
    """Lower a convolution as other operations are lowered, or as one if IREE does not."""


LEVELS = ("distribute", "cache", "vector")
_OTHER, _OF_WINDOWS = "DoubleTilingExpert", "ConvTileAndDecomposeExpert"
_MADE: dict[str, type[Distribute] | type[Cache] | type[Vector]] = {
    "distribute": Distribute,
    "cache": Cache,
    "vector": Vector,
}


_USUAL: dict[str, tuple[tuple[int, ...], ...]] = {
    "distribute": ((0, 32, 64, 128), (0, 128, 256, 512), (0,)),
    "cache": ((0, 16, 32), (32, 64, 128), (64, 128, 192, 256)),
    "vector": ((4, 6, 8, 12), (32, 48, 64), (1, 4, 8)),
}
"""Level → usual tiles of rows, columns and the sum of a product of matrices."""
_OF_FEW = _USUAL | {"vector": ((3, 4, 6, 8), (16, 24, 32), (1, 4, 8))}
"""The same for vectors below 64 bytes: 16 registers of half the width and less."""


_OF_LAST = ((32, 32, 4), (64, 32, 1), (64, 64, 2), (64, 32, 8), (16, 16, 8), (128, 64, 1))
"""The same of a convolution with channels last: filters of a task and of a vector, channels. On
ResNet-18 one of the first three was the best or near it."""
_FIRST, _WIDE = 14, (8, 8, 7, 14)
"""Rows of an image whose task has them all, so that filters are read once; columns of a vector."""


class IreeSpace(Space):
    """Configurations of the roots of a problem's dispatches; see the module."""

    name = "iree"
    kinds: tuple[str, ...] = ("stop", "distribute", "cache", "vector", "pipeline")
    parts: Mapping[str, str] = {
        "distribute": "parallel_tiles",
        "cache": "tiles",
        "vector": "tiles",
    }
    sizes: tuple[int, ...] = TILES
    child = "tokmill.mlir.iree.executor:answer"
    package = "iree-base-compiler"

    @property
    def rules(self) -> str:
        """The runtime: code is compiled by one package and run by another."""
        return importlib.metadata.version("iree-base-runtime")

    def __init__(self, flags: tuple[str, ...] = ()) -> None:
        plugins.require("iree.compiler")
        self.flags = flags
        self._roots: dict[tuple[str, str], Root] = {}
        """(Text of a problem, tag) → what IREE's default is."""

    def problem(self, given: Problem, ask: Ask) -> Problem:
        """Return a problem whose operations are the roots of IREE's dispatches.

        Raises `UsageError` if it has none that can be configured.
        """
        answer = ask({"ask": "roots", "module": given.text, "flags": list(self.flags)})
        try:
            roots = msgspec.convert(answer, list[Root])
        except msgspec.ValidationError as error:
            raise TokmillError(
                f"the cache of measurements has something else than operations: {error}",
                where=given.name,
                hint="remove it, or give another one",
            ) from None
        operations: list[Operation] = []
        for root in roots:
            if not spec.matchable(root):
                continue
            tag = f"op_{len(operations)}"
            operations.append(_operation(root, tag))
            self._roots[given.text, tag] = root
        if not operations:
            raise UsageError(
                f"{given.name}: IREE has no operation here whose tiles can be chosen",
                hint="products of matrices, convolutions, poolings and reductions have",
            )
        longest = max(given.length, *(_summed(root) for root in roots))
        return replace(given, operations=tuple(operations), longest=longest)

    def identity(self, problem: Problem) -> str:
        """Return what a spec finds a problem's operations by; equal ones get the same tiles.

        The problem is one that `problem` gave.
        """
        tags = (each.tag for each in problem.operations)
        return "\n\n".join(spec.identity(self._roots[problem.text, tag]) for tag in tags)

    def begin(self, operation: Operation) -> State:
        """Return the state of an operation before any action."""
        return State(operation, operation.bounds, operation.parallel)

    def allowed(self, state: State) -> dict[str, bool]:
        """Return for each kind whether an action of it is possible now: levels go inwards."""
        taken = [str(action.__struct_config__.tag) for action in state.taken]
        deepest = max((LEVELS.index(kind) for kind in taken if kind in LEVELS), default=-1)
        may = {"stop": not state.done}
        for place, kind in enumerate(LEVELS):
            loops = range(len(state.bounds))
            cuts = any(any(self.tiles(state, kind, loop)[1:]) for loop in loops)
            may[kind] = not state.done and place > deepest and cuts
        windows = state.operation.kind in ("conv", "pooling")
        may["pipeline"] = not state.done and windows and not taken
        return may

    def tiles(self, state: State, kind: str, loop: int) -> list[bool]:
        """Return for each of `sizes` whether an action of a kind may cut a loop so."""
        bound = state.bounds[loop]
        if kind == "distribute" and not state.parallel[loop]:
            return [size == 0 for size in TILES]
        along = loop == _along(state.operation)
        least, most = 1, bound - 1
        if kind == "vector":
            most = min(bound, WIDEST if along else TALLEST)
        if along:
            # A vector is loaded and stored as a whole.
            least = min(bound, NARROWEST if kind == "distribute" else STEP)
        whole = any(bound % size == 0 for size in range(STEP, bound, STEP)) or bound < 2 * STEP
        return [
            size == 0
            or (least <= size <= most and (bound % size == 0 or (not whole and size % STEP == 0)))
            for size in TILES
        ]

    def action(
        self, state: State, kind: str, sizes: tuple[int, ...], order: tuple[int, ...]
    ) -> Any:
        tag = state.operation.tag
        if kind in _MADE:
            return _MADE[kind](tag, sizes)
        return Pipeline(tag) if kind == "pipeline" else actions.Stop(tag)

    def take(self, state: State, action: Any) -> State:
        """Return the state after an action; raises `UsageError` if it is not possible."""
        kind, operation = str(action.__struct_config__.tag), state.operation
        may = self.allowed(state)
        if not may.get(kind):
            raise UsageError(
                f"{kind} is not possible on {operation.tag} ({operation.name}) now",
                hint=f"possible: {', '.join(name for name, can in may.items() if can)}",
            )
        if kind == "stop":
            return replace(state, done=True)
        taken = (*state.taken, action)
        if kind == "pipeline":
            return replace(state, taken=taken)
        sizes = action.sizes
        fits = len(sizes) == len(state.bounds) and all(
            size in TILES and self.tiles(state, kind, loop)[TILES.index(size)]
            for loop, size in enumerate(sizes)
        )
        if not fits or not any(sizes):
            raise UsageError(
                f"{kind} {list(sizes)} does not fit {operation.tag} ({operation.name}) with "
                f"loops {list(state.bounds)}",
                hint=f"tiles are among {list(TILES)}, fit into the loop, and one is not 0",
            )
        bounds = tuple(size or bound for size, bound in zip(sizes, state.bounds, strict=True))
        return replace(state, taken=taken, bounds=bounds, cut=True, done=kind == "vector")

    def guess(self, problem: Problem, chance: random.Random) -> tuple[Any, ...]:
        """Return tiles of products and convolutions as libraries cut them; () for others.

        A panel of the right matrix that fits into a cache, and tiles of the result that fit into
        the registers (Goto and van de Geijn, 2008).
        """
        taken: list[Any] = []
        for operation in problem.operations:
            if operation.kind != "matmul" and (
                operation.kind != "conv" or sum(operation.parallel) < 3
            ):
                continue
            state = self.begin(operation)
            of_matmul = operation.kind == "matmul"
            if of_matmul:
                wide = self._roots[problem.text, operation.tag].vector >= 64
                levels = _of_matmul(operation, chance, _USUAL if wide else _OF_FEW)
            else:
                levels = _of_last(operation, chance)
            for kind, wanted in levels.items():
                sizes = tuple(
                    max(
                        size
                        for size, may in zip(TILES, self.tiles(state, kind, loop), strict=True)
                        if may and size <= wanted.get(loop, 0)
                    )
                    for loop in range(len(state.bounds))
                )
                if any(sizes) and self.allowed(state)[kind]:
                    taken.append(_MADE[kind](operation.tag, sizes))
                    state = self.take(state, taken[-1])
        return tuple(taken)

    def text(self, problem: Problem, schedule: Any) -> str:
        """Return a schedule as a tuning spec; "" for none.

        Tiles that are not offered are written too: whether IREE obeys them is measured. Raises
        `UsageError` for operations that the problem has not, and a tile too few or too many.
        """
        for action in schedule:
            root = self._roots.get((problem.text, action.op))
            if root is None or len(getattr(action, "sizes", root.bounds)) != len(root.bounds):
                raise UsageError(
                    f"{action!r} does not fit {problem.name}",
                    hint="`tokmill rl show --json` lists its operations and their loops",
                )
        found = self._changed(problem, schedule)
        return spec.text(found, msgspec.json.encode(schedule).decode()) if found else ""

    def _changed(self, problem: Problem, schedule: Sequence[Any]) -> list[tuple[Root, Config]]:
        changes: dict[str, list[Any]] = {}
        for action in schedule:
            changes.setdefault(action.op, []).append(action)
        roots = {tag: self._roots[problem.text, tag] for tag in changes}
        return [(root, config(root, changes[tag])) for tag, root in roots.items()]

    def matchers(self, problem: Problem, schedule: Sequence[Any]) -> set[str]:
        """Return what the spec of a schedule finds operations by, as `spec.hits` names it."""
        return {spec.identity(root) for root, _ in self._changed(problem, schedule)}

    def merged(self, chosen: Sequence[tuple[Problem, Sequence[Any]]]) -> str:
        """Return one spec for several problems; "" for none. Of equal operations the first counts.

        Problems are those that `problem` gave.
        """
        found: dict[str, tuple[Root, Config]] = {}
        for problem, schedule in chosen:
            for root, changed in self._changed(problem, schedule):
                found.setdefault(spec.identity(root), (root, changed))
        names = [problem.name for problem, _ in chosen]
        return spec.text(list(found.values()), json.dumps(names)) if found else ""


def _along(operation: Operation) -> int:
    """Return the loop along which results lie in memory side by side; -1 for none."""
    store = operation.stores[0]
    if not store.shape:
        return -1
    loops = np.flatnonzero(store.matrix[-1, :-1])
    return int(loops[-1]) if len(loops) else -1


def _of_matmul(
    operation: Operation, chance: random.Random, usual: Mapping[str, tuple[tuple[int, ...], ...]]
) -> dict[str, dict[int, int]]:
    """Return the tile that is wanted for each loop, level by level: rows, columns, the sum."""
    free = [loop for loop, parallel in enumerate(operation.parallel) if parallel][-2:]
    summed = [loop for loop, parallel in enumerate(operation.parallel) if not parallel]
    levels = {}
    for kind, choices in usual.items():
        drawn = [chance.choice(each) for each in choices]
        wanted = dict(zip(free[::-1], drawn[1::-1], strict=False))
        levels[kind] = wanted | dict.fromkeys(summed, drawn[2])
    return levels


def _of_last(operation: Operation, chance: random.Random) -> dict[str, dict[int, int]]:
    """Return the same of a convolution with channels last: rows, columns, filters; channels."""
    *_, rows, columns, filters = (n for n, free in enumerate(operation.parallel) if free)
    windows = [loop for loop, parallel in enumerate(operation.parallel) if not parallel]
    task, vector, channels = chance.choice(_OF_LAST)
    cut = 0 if operation.bounds[rows] <= _FIRST else chance.choice((2, 4, 8))
    wide = chance.choice(_WIDE)
    inside = {rows: 1, columns: wide, filters: vector}
    inside |= dict.fromkeys(windows[:-1], 1) | dict.fromkeys(windows[-1:], channels)
    return {"distribute": {rows: cut, filters: task}, "vector": inside}


def config(root: Root, changes: list[Any]) -> Config:
    """Return the configuration of a root after changes."""
    levels, pipeline = dict(root.config.levels), root.config.pipeline
    loops = len(root.bounds)
    whole = (0,) * loops
    for change in changes:
        if isinstance(change, Pipeline):
            pipeline = _OF_WINDOWS if pipeline == _OTHER else _OTHER
        elif isinstance(change, Distribute):
            levels["distribution"] = change.sizes
        elif isinstance(change, Cache):
            inside = _apart(change.sizes, root.parallel)
            levels["cache_parallel"], levels["cache_reduction"] = inside
        elif isinstance(change, Vector):
            for part, name in enumerate(("vector_common_parallel", "vector_reduction")):
                mine = _apart(change.sizes, root.parallel)[part]
                kept = levels.get(name, whole)
                levels[name] = tuple(new or old for new, old in zip(mine, kept, strict=True))
    return Config({name: sizes for name, sizes in levels.items() if any(sizes)}, pipeline)


def _apart(
    sizes: tuple[int, ...], parallel: tuple[bool, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of parallel loops and those of reductions, 0 elsewhere."""
    pairs = list(zip(sizes, parallel, strict=True))
    return tuple(s * p for s, p in pairs), tuple(s * (not p) for s, p in pairs)


def _summed(root: Root) -> int:
    """Return how many numbers an operation adds to one."""
    summed = (n for n, free in zip(root.bounds, root.parallel, strict=True) if not free)
    return math.prod(max(n, 1) for n in summed)


def _operation(root: Root, tag: str) -> Operation:
    accesses = [
        Access(np.array(one.matrix, np.int64).reshape(len(one.shape), -1), one.shape, one.element)
        for one in root.accesses
    ]
    return Operation(
        tag,
        root.name,
        root.kind,
        root.bounds,
        root.parallel,
        tuple(accesses[:-1]),
        tuple(accesses[-1:]),
        root.arithmetic,
    )
