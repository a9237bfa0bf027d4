"""Operations and histories as flat vectors, in the order of MLIR-RL's environment.

With 12 loops, 7 loads and 12 dimensions an operation is 2,051 numbers and a history 2,160, as
published. Sizes are counted from the problems (`Sizes.of`), so that nothing is cut.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from tokmill.base.errors import UsageError
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.loops.legal import LONGEST, TILES
from tokmill.mlir.modules.operations import ARITHMETIC, KINDS, Access, Operation

Vector = np.ndarray[Any, np.dtype[np.float32]]
CUTS = {"tile": 0, "parallel": 1, "fuse": 2}
"""Kind of an action → its place in a history."""
BOUND = 4096.0
"""What `normalize = "max"` divides loop bounds by."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many loops, operands and dimensions a vector has room for."""

    loops: int = 7
    accesses: int = 4
    """Loads, and stores too."""
    dimensions: int = 5
    """Dimensions of a tensor."""
    normalize: str = "none"
    """Scale of loop bounds: `none`, `max` (divided by 4,096) or `log2`."""
    tiles: tuple[int, ...] = TILES
    """Tiles that a history can hold: `sizes` of its space."""

    def __post_init__(self) -> None:
        if self.normalize not in ("none", "max", "log2"):
            raise UsageError(
                f"normalize = {self.normalize!r} is unknown", hint="one of none, max, log2"
            )
        if min(self.loops, self.accesses, self.dimensions) < 1:
            raise UsageError(
                "a vector needs room for a loop, an access and a dimension at least",
                hint="leave the sizes out: they are counted from the modules",
            )

    @classmethod
    def of(cls, operations: Iterable[Operation], **other: Any) -> "Sizes":
        listed = list(operations)
        accesses = [one for each in listed for one in (*each.loads, *each.stores)]
        return cls(
            # Packing doubles the loops of a product of matrices.
            loops=max(
                (len(each.bounds) * (1 + (each.kind == "matmul")) for each in listed), default=1
            ),
            accesses=max((max(len(each.loads), len(each.stores)) for each in listed), default=1),
            dimensions=max((len(one.shape) for one in accesses), default=1) or 1,
            **other,
        )

    @property
    def operation(self) -> int:
        indices = 2 * self.accesses * self.dimensions * self.loops
        return len(KINDS) + 2 * self.loops + indices + len(ARITHMETIC)

    @property
    def history(self) -> int:
        return LONGEST * self.loops * (3 * len(self.tiles) + self.loops)

    def fits(self, operation: Operation) -> str:
        """Return what of an operation has no room, in words; "" if all has."""
        parts = [
            (len(operation.bounds), self.loops, "loops"),
            (max(len(operation.loads), len(operation.stores)), self.accesses, "accesses"),
            (
                max((len(one.shape) for one in (*operation.loads, *operation.stores)), default=0),
                self.dimensions,
                "dimensions",
            ),
        ]
        return ", ".join(f"{has} {name} of {most}" for has, most, name in parts if has > most)


def vector(operation: Operation, sizes: Sizes) -> Vector:
    """Return an operation as float32 (sizes.operation,).

    Type (one-hot), bounds, iterators (1 for parallel), loads, stores, counts of arithmetic.

    Raises `UsageError` if the operation has more loops, operands or dimensions than there is room.
    """
    if missing := sizes.fits(operation):
        raise UsageError(
            f"{operation.tag} ({operation.name}) has {missing}",
            hint="count the sizes from all modules",
        )
    kind = np.zeros(len(KINDS))
    kind[KINDS.index(operation.kind)] = 1
    bounds = np.zeros(sizes.loops)
    bounds[: len(operation.bounds)] = operation.bounds
    parallel = np.zeros(sizes.loops)
    parallel[: len(operation.parallel)] = operation.parallel
    return np.concatenate(
        (
            kind,
            _normalized(bounds, sizes.normalize),
            parallel,
            _accesses(operation.loads, sizes),
            _accesses(operation.stores, sizes),
            operation.arithmetic,
        )
    ).astype(np.float32)


def history(taken: Sequence[Any], sizes: Sizes) -> Vector:
    """Return the actions on an operation as float32 (sizes.history,).

    For each of `LONGEST` places one-hot tiles of a tiling, of a parallel tiling and of a fusion
    (loops, tiles), then of an interchange (loops, loops).
    """
    cuts = np.zeros((3, LONGEST, sizes.loops, len(sizes.tiles)))
    orders = np.zeros((LONGEST, sizes.loops, sizes.loops))
    for place, action in enumerate(taken[:LONGEST]):
        if isinstance(action, actions.Interchange):
            for loop, source in enumerate(action.order[: sizes.loops]):
                orders[place, loop, source] = 1
        elif (kind := CUTS.get(str(action.__struct_config__.tag))) is not None:
            for loop, size in enumerate(action.sizes[: sizes.loops]):
                cuts[kind, place, loop, sizes.tiles.index(size)] = 1
    return np.concatenate((cuts.ravel(), orders.ravel())).astype(np.float32)


def _normalized(bounds: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
    if how == "max":
        return bounds / BOUND
    return np.log2(np.maximum(bounds, 1)) if how == "log2" else bounds


def _accesses(accesses: Sequence[Access], sizes: Sizes) -> np.ndarray[Any, Any]:
    cells = np.zeros((sizes.accesses, sizes.dimensions, sizes.loops))
    for place, access in enumerate(accesses):
        rows, loops = len(access.matrix), access.matrix.shape[1] - 1
        cells[place, :rows, :loops] = access.matrix[:, :loops]
    return cells.ravel()
