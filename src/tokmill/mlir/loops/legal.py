"""Which actions an operation allows: the state of a schedule as it grows, without MLIR.

The rules are those of MLIR-RL's environment: tiles are powers of two that divide the loop,
only parallel loops become parallel, a vector has at most 512 iterations, and nothing comes after
vectorization. What the rules allow can still be refused by MLIR; what they forbid is never tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokmill.base.errors import UsageError
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.modules.operations import Operation

TILES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Sizes of tiles; 0 leaves a loop whole."""
WIDEST = 512
"""Iterations of a tile that is made a vector."""
LONGEST = 5
"""Actions on one operation, as in MLIR-RL."""
_DECOMPOSED = {
    # A two-dimensional window becomes one-dimensional if two loops are cut to 1: the outer
    # dimension of the output and that of the window. These are their numbers.
    "linalg.conv_2d_nchw_fchw": (2, 5),
    "linalg.conv_2d_nhwc_hwcf": (1, 4),
    "linalg.pooling_nchw_max": (2, 4),
    "linalg.pooling_nchw_sum": (2, 4),
    "linalg.pooling_nhwc_max": (1, 4),
    "linalg.pooling_nhwc_sum": (1, 4),
}
_IM2COL = {"linalg.conv_2d_nchw_fchw", "linalg.conv_2d_nhwc_hwcf"}


@dataclass(frozen=True, slots=True)
class State:
    """One operation in the middle of a schedule."""

    operation: Operation
    bounds: tuple[int, ...]
    """Iterations of the loops of its innermost tile."""
    parallel: tuple[bool, ...]
    taken: tuple[Any, ...] = ()
    """Actions."""
    named: bool = True
    """Whether it is still the operation of its name, with loops in their order."""
    cut: bool = False
    parallelised: bool = False
    fused: bool = False
    """Whether a consumer computes it in its own tiles: MLIR finds no producer from there."""
    done: bool = False

    @property
    def volume(self) -> int:
        return math.prod(self.bounds)

    @property
    def decomposes(self) -> bool:
        """Return whether it becomes a one-dimensional window before it is vectorized."""
        loops = _DECOMPOSED.get(self.operation.name) if self.named else None
        return loops is not None and all(self.bounds[loop] == 1 for loop in loops)

    @property
    def product(self) -> bool:
        return any(isinstance(action, actions.Im2col) for action in self.taken)

    @property
    def vectorizable(self) -> bool:
        """Return whether what the actions made of it can become vectors, if it is small enough."""
        if self.product or self.decomposes:
            return not self.operation.of_bits
        return self.operation.vectorizable


def begin(operation: Operation) -> State:
    return State(operation, operation.bounds, operation.parallel)


def reached(state: State, schedule: Sequence[Any]) -> State:
    """Return the state of an operation as a schedule of its consumers leaves it."""
    tag = state.operation.tag
    fused = any(isinstance(one, actions.Fuse) and one.producer == tag for one in schedule)
    return replace(state, fused=True) if fused else state


def tiles(state: State, loop: int) -> list[bool]:
    bound, first = state.bounds[loop], loop
    for action in reversed(state.taken):
        if isinstance(action, actions.Interchange):
            first = action.order[first]
    if first in state.operation.whole:
        return [size == 0 for size in TILES]
    return [size == 0 or (size < bound and bound % size == 0) for size in TILES]


def allowed(state: State) -> dict[str, bool]:
    """Return for each kind of action whether the operation allows one of it now."""
    going = not state.done
    more = going and len(state.taken) < LONGEST
    cuts = more and any(any(tiles(state, loop)[1:]) for loop in range(len(state.bounds)))
    free = any(
        parallel and any(tiles(state, loop)[1:]) for loop, parallel in enumerate(state.parallel)
    )
    copies = any(isinstance(one, actions.Im2col | actions.Pack) for one in state.taken)
    first = not state.taken
    windows = state.operation.kind in ("conv", "pooling") and state.named
    return {
        "tile": cuts,
        "parallel": cuts and free and not state.parallelised,
        # A producer is found through the slices that one cut makes of what it gives: not behind
        # another cut, and not where the operation reads a copy, packed or of an image.
        "fuse": cuts
        and free
        and not (state.cut or state.fused or copies)
        and bool(state.operation.producers)
        and state.operation.fuses,
        "interchange": more and len(state.bounds) > 1 and not windows,
        "pack": cuts and first and state.operation.kind == "matmul",
        "im2col": more and first and state.operation.name in _IM2COL,
        "vectorize": going and state.volume <= WIDEST and state.vectorizable,
        "stop": going,
    }


def take(state: State, action: actions.AnyAction) -> State:
    """Return the state after an action; raises `UsageError` if it is not allowed."""
    kind = str(action.__struct_config__.tag)
    may = allowed(state)
    if not may[kind]:
        possible = ", ".join(name for name, fine in may.items() if fine)
        raise UsageError(
            f"{kind} is not possible on {state.operation.tag} ({state.operation.name}) now",
            hint=f"possible: {possible or 'nothing, it is complete'}",
        )
    taken = (*state.taken, action)
    if isinstance(action, actions.Stop):
        return replace(state, done=True)
    if isinstance(action, actions.Vectorize):
        return replace(state, taken=taken, done=True)
    if isinstance(action, actions.Interchange):
        if sorted(action.order) != list(range(len(state.bounds))):
            raise UsageError(
                f"the order {list(action.order)} does not fit {state.operation.tag} "
                f"({state.operation.name}) with {len(state.bounds)} loops",
                hint=f"it names each of the loops 0 to {len(state.bounds) - 1} once",
            )
        return replace(
            state,
            taken=taken,
            named=False,
            bounds=tuple(state.bounds[loop] for loop in action.order),
            parallel=tuple(state.parallel[loop] for loop in action.order),
        )
    if isinstance(action, actions.Im2col):
        return _im2col(state, taken)
    sizes = action.sizes
    _check(len(sizes) == len(state.bounds), state, "sizes", sizes)
    for loop, size in enumerate(sizes):
        fits = size in TILES and tiles(state, loop)[TILES.index(size)]
        _check(fits, state, "sizes", sizes)
    if isinstance(action, actions.Pack):
        return _pack(state, action, taken)
    _check(any(sizes), state, "sizes", sizes)
    producers = [f"op_{number}" for _, number in state.operation.producers]
    if isinstance(action, actions.Fuse) and action.producer not in producers:
        # What is written into a schedule is never taken from a file unchecked.
        raise UsageError(
            f"{action.producer!r} is not a producer of {state.operation.tag}",
            hint=f"it has {', '.join(producers)}",
        )
    if not isinstance(action, actions.Tile):
        outer = [size for size, free in zip(sizes, state.parallel, strict=True) if not free]
        _check(not any(outer), state, "sizes of parallel loops", sizes)
    return replace(
        state,
        taken=taken,
        bounds=tuple(size or bound for size, bound in zip(sizes, state.bounds, strict=True)),
        cut=True,
        parallelised=state.parallelised or not isinstance(action, actions.Tile),
    )


def replay(operations: Sequence[Operation], schedule: Sequence[Any]) -> list[State]:
    """Return the states of all operations after a schedule; raises `UsageError` where it breaks."""
    states = {operation.tag: begin(operation) for operation in operations}
    for place, action in enumerate(schedule):
        if action.op not in states:
            raise UsageError(
                f"the schedule names {action.op!r}, which the module has not",
                hint=f"operations: {', '.join(states)}",
            )
        states[action.op] = take(reached(states[action.op], schedule[:place]), action)
    return [reached(state, schedule) for state in states.values()]


def decomposed(states: Sequence[State]) -> list[str]:
    """Return the tags of operations that become one-dimensional before they are vectorized."""
    return [state.operation.tag for state in states if state.decomposes]


def _im2col(state: State, taken: tuple[actions.AnyAction, ...]) -> State:
    bounds = state.operation.bounds
    if state.operation.name == "linalg.conv_2d_nchw_fchw":
        batch, filters, high, wide, channels, tall, broad = bounds
        loops = (batch, filters, high * wide, channels * tall * broad)
    else:
        batch, high, wide, filters, tall, broad, channels = bounds
        loops = (batch, high * wide, filters, tall * broad * channels)
    return replace(
        state, taken=taken, named=False, bounds=loops, parallel=(True, True, True, False)
    )


def _pack(state: State, action: actions.Pack, taken: tuple[actions.AnyAction, ...]) -> State:
    _check(any(action.sizes), state, "sizes", action.sizes)
    pairs = list(zip(action.sizes, state.bounds, state.parallel, strict=True))
    outer = tuple(bound // size if size else bound for size, bound, _ in pairs)
    inner = [(size, free) for size, _, free in pairs if size]
    return replace(
        state,
        taken=taken,
        named=False,
        bounds=outer + tuple(size for size, _ in inner),
        parallel=state.parallel + tuple(free for _, free in inner),
    )


def _check(fine: bool, state: State, what: str, given: Sequence[int]) -> None:
    if not fine:
        raise UsageError(
            f"{what} {list(given)} do not fit {state.operation.tag} "
            f"({state.operation.name}) with loops {list(state.bounds)}",
            hint=f"tiles are among {list(TILES)}, smaller than the loop, and divide it",
        )
