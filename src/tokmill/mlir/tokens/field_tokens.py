"""Operations as tokens, a token for each field, with ids by the type of the field.

`[CLS]`, then for the operation that is visited and for its last producer: type, and for each loop
its bound, iterator and current bound; for each access a token, and one for each factor of a loop
or constant in its indices; counts of arithmetic; and the actions taken. Beside the ids stand
segments (0 operation, 1 producer) and depths (the loop that a token is about, from 1; 0 for none).
Nothing is cut: a bound has a token for each half step of log2, larger ones share the last.
"""

from typing import Any, NamedTuple

import numpy as np

from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.loops.legal import TILES, State
from tokmill.mlir.modules.operations import KINDS, Access, Operation

CLS, SEP, PAD, MASK = 0, 1, 2, 3
STEPS = 48
"""Half steps of log2 that bounds have: up to 2 ** 23.5."""
FACTORS = ("<0", "1", "2", "3+")
COUNTS = 6
"""Counts of arithmetic from 0; larger ones share the last."""
WIDER = (3, 6, 7, 12, 14, 24, 28, 48, 56, 96, 112, 128, 192, 256, 384, 512)
"""Tiles of IREE's space that the own lowering has not."""
DEEPEST = 31
"""Depths that have an id of their own."""


def _table() -> dict[str, int]:
    names = ["[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    names += [f"type {kind}" for kind in KINDS]
    names += [f"bound {step / 2:g}" for step in range(STEPS)]
    names += [f"tile {step / 2:g}" for step in range(STEPS)]
    names += ["parallel", "reduction", "load", "store", "row", "not affine"]
    names += [f"factor {factor}" for factor in FACTORS]
    names += ["constant <0", "constant >0"]
    names += [f"{name} {count}" for name in ("add", "sub", "mul", "div", "exp") for count in
              range(1, COUNTS)]  # fmt: skip
    kinds = ("tile", "parallel", "fuse", "interchange", "pack", "im2col", "vectorize")
    names += [f"action {kind}" for kind in kinds]
    names += [f"cut {size}" for size in TILES]
    names += ["order"]
    # Those of IREE's space, behind, so that ids do not change.
    names += [f"action {kind}" for kind in ("distribute", "cache", "vector", "pipeline")]
    names += [f"cut {size}" for size in WIDER]
    return {name: number for number, name in enumerate(names)}


VOCABULARY = _table()
"""Name of a token → id."""


class Tokens(NamedTuple):
    """One observation: ids, segments and depths, each int64 (T,)."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    segments: np.ndarray[Any, np.dtype[np.int64]]
    depths: np.ndarray[Any, np.dtype[np.int64]]


def tokens(state: State, producer: Operation | None) -> Tokens:
    fields: list[tuple[str, int]] = [("[CLS]", 0)]
    fields += _operation(state.operation)
    fields += [
        (f"tile {_half_steps(bound) / 2:g}", loop) for loop, bound in enumerate(state.bounds, 1)
    ]
    for action in state.taken:
        fields += _action(action)
    fields.append(("[SEP]", 0))
    own = len(fields)
    if producer is not None:
        fields += [*_operation(producer), ("[SEP]", 0)]
    ids = np.array([VOCABULARY[name] for name, _ in fields], np.int64)
    depths = np.array([min(depth, DEEPEST) for _, depth in fields], np.int64)
    return Tokens(ids, (np.arange(len(fields)) >= own).astype(np.int64), depths)


def padded(batch: list[Tokens], length: int = 0) -> tuple[Tokens, np.ndarray[Any, Any]]:
    """Return a batch (B, T) with `[PAD]` behind, and its mask: 1 for tokens."""
    longest = max([length, *(len(each.ids) for each in batch)])
    ids = np.full((len(batch), longest), PAD, np.int64)
    columns = np.zeros((2, len(batch), longest), np.int64)
    mask = np.zeros((len(batch), longest), np.int64)
    for row, each in enumerate(batch):
        size = len(each.ids)
        ids[row, :size], mask[row, :size] = each.ids, 1
        columns[0, row, :size], columns[1, row, :size] = each.segments, each.depths
    return Tokens(ids, columns[0], columns[1]), mask


def _operation(operation: Operation) -> list[tuple[str, int]]:
    result = [(f"type {operation.kind}", 0)]
    for loop, bound in enumerate(operation.bounds, 1):
        result.append((f"bound {_half_steps(bound) / 2:g}", loop))
        result.append(("parallel" if operation.parallel[loop - 1] else "reduction", loop))
    for name, accesses in (("load", operation.loads), ("store", operation.stores)):
        for access in accesses:
            result += [(name, 0), *_access(access)]
    for name, count in zip(("add", "sub", "mul", "div", "exp"), operation.arithmetic, strict=True):
        if count:
            result.append((f"{name} {min(count, COUNTS - 1)}", 0))
    return result


def _access(access: Access) -> list[tuple[str, int]]:
    if not access.plain:
        return [("not affine", 0)]
    result: list[tuple[str, int]] = []
    for row in access.matrix.tolist():
        result.append(("row", 0))
        result += [(f"factor {_factor(factor)}", loop) for loop, factor in enumerate(row[:-1], 1) if
                  factor]  # fmt: skip
        if row[-1]:
            result.append((f"constant {'<' if row[-1] < 0 else '>'}0", 0))
    return result


def _action(action: Any) -> list[tuple[str, int]]:
    fields = [(f"action {action.__struct_config__.tag}", 0)]
    if isinstance(action, actions.Interchange):
        return fields + [("order", source + 1) for source in action.order]
    sizes: tuple[int, ...] = getattr(action, "sizes", ())
    return fields + [(f"cut {size}", loop) for loop, size in enumerate(sizes, 1)]


def _factor(factor: int) -> str:
    return "<0" if factor < 0 else "3+" if factor > 2 else str(factor)


def _half_steps(bound: int) -> int:
    return min(round(2 * float(np.log2(bound))), STEPS - 1)
