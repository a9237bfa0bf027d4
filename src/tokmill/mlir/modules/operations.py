"""What the linalg operations of a module are: loops, accesses, arithmetic, and who feeds whom."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.mlir.modules import toolkit

KINDS = ("generic", "matmul", "conv", "pooling", "add", "unknown")
"""Types of operations, in the order of MLIR-RL's one-hot vector."""
ARITHMETIC = ("add", "sub", "mul", "div", "exp")
"""What is counted in an operation's body, in MLIR-RL's order."""
_COUNTED = {
    "arith.addf": 0,
    "arith.addi": 0,
    "arith.subf": 1,
    "arith.subi": 1,
    "arith.mulf": 2,
    "arith.muli": 2,
    "arith.divf": 3,
    "arith.divsi": 3,
    "arith.divui": 3,
    "math.exp": 4,
}
_NARROW = {
    f"linalg.{name}"
    for name in (
        *("conv_1d_nwc_wcf", "conv_1d_ncw_fcw"),
        *("pooling_nwc_max", "pooling_nwc_sum", "pooling_ncw_max", "pooling_ncw_sum"),
    )
}
"""Windows of one dimension, which MLIR knows how to vectorize by their names."""
_TERM = re.compile(r"\s*([+-]?)\s*(?:d(\d+)(?: \* (-?\d+))?|(\d+))")
"""A term of a sum of loops: its sign, and a loop with its factor or a constant."""
_PARTS = {"linalg.fill", "linalg.yield", "linalg.index"}
"""Operations of the dialect that prepare data or stand inside of others: nothing to schedule."""


@dataclass(frozen=True, slots=True)
class Access:
    """How an operation indexes one operand: a row a dimension of the tensor.

    `matrix` (dimensions, loops + 1) int64: the factor of each loop, and a constant last. A row
    that is no sum of loops times constants (a division, a remainder) is not affine in this sense,
    and `plain` is False then.
    """

    matrix: np.ndarray[Any, np.dtype[np.int64]]
    shape: tuple[int, ...]
    element: str
    plain: bool = True
    whole: tuple[int, ...] = ()
    """Loops of such rows, and loops with a negative factor: what a tile of them reads MLIR
    computes wrong, so they stay whole."""

    @property
    def projected(self) -> bool:
        """Return whether each dimension is indexed by one loop or by none, and no loop twice."""
        used = [[factor for factor in row if factor] for row in self.matrix.tolist()]
        loops = self.matrix[:, :-1].sum(axis=0)
        single = all(factors in ([], [1]) for factors in used) and not self.matrix[:, -1].any()
        return self.plain and single and bool((loops <= 1).all())


@dataclass(frozen=True, slots=True)
class Operation:
    """One linalg operation of a module."""

    tag: str
    """`op_0`, `op_1`, … in the order of the module: what schedules call it."""
    name: str
    """`linalg.matmul`, …"""
    kind: str
    """One of `KINDS`."""
    bounds: tuple[int, ...]
    """Iterations of each loop."""
    parallel: tuple[bool, ...]
    """Whether a loop is parallel; else it is a reduction."""
    loads: tuple[Access, ...]
    stores: tuple[Access, ...]
    arithmetic: tuple[int, ...]
    """Counts of `ARITHMETIC` in the body."""
    producers: tuple[tuple[int, int], ...] = field(default=())
    """(operand, number of the operation that makes it)."""
    fuses: bool = True
    """Whether its last producer can be computed tile by tile: it has no loops that stay whole."""

    @property
    def of_bits(self) -> bool:
        """Return whether an operand is of i1: a byte each in memory, but a bit each in a vector."""
        return any(one.element == "i1" for one in (*self.loads, *self.stores))

    @property
    def vectorizable(self) -> bool:
        """Return whether it can become vectors as it is, whatever the sizes of its loops.

        MLIR makes vectors of what indexes its operands by single loops. A window of two dimensions
        is cut to one of them first, or made a product. What the body computes is not looked at.
        """
        projected = all(one.projected for one in (*self.loads, *self.stores))
        return not self.of_bits and (projected or self.name in _NARROW)

    @property
    def whole(self) -> set[int]:
        return {loop for one in (*self.loads, *self.stores) for loop in one.whole}


def find(module: Any, where: str) -> list[Operation]:
    """Return the operations of a module's function in their order, and tag them in the module."""
    bindings = toolkit.ir()
    operations: list[Operation] = []
    number: dict[Any, int] = {}
    for operation in body(module, where).operations:
        view = operation.operation
        if not view.name.startswith("linalg.") or view.name in _PARTS:
            continue
        tag = f"op_{len(operations)}"
        view.attributes["tag"] = bindings.StringAttr.get(tag)
        described = _describe(operation, tag, number, where)
        for _, last in described.producers[-1:]:
            described = replace(described, fuses=not operations[last].whole)
        operations.append(described)
        for result in view.results:
            number[result] = len(operations) - 1
    if not operations:
        raise TokmillError(
            "the module has no linalg operation",
            where=where,
            hint="lower it to linalg on tensors first",
        )
    return operations


def give_own_buffers(module: Any, where: str) -> bool:
    """Give each use of a `tensor.empty` or `linalg.fill` one of its own; return if one was shared.

    If two operations share one and one is fused into the other, MLIR lets both write one buffer.
    """
    shared = False
    for name in ("linalg.fill", "tensor.empty"):
        for operation in list(body(module, where).operations):
            if operation.operation.name != name:
                continue
            for use in list(operation.operation.results[0].uses)[1:]:
                copy = operation.operation.clone(toolkit.ir().InsertionPoint(operation))
                use.owner.operands[use.operand_number] = copy.results[0]
                shared = True
    return shared


def entry(module: Any, where: str) -> Any:
    """Return the one function with a body; raises `TokmillError` for none or several."""
    functions = [
        operation
        for operation in module.body.operations
        if operation.operation.name == "func.func" and operation.regions[0].blocks
    ]
    if len(functions) != 1:
        names = ", ".join(f"@{function.name.value}" for function in functions)
        raise TokmillError(
            f"the module has {len(functions)} functions with a body"
            + (f": {names}" if names else ""),
            where=where,
            hint="a module that is scheduled has one",
        )
    return functions[0]


def body(module: Any, where: str) -> Any:
    """Return the block of a module's function; raises `TokmillError` if it has several."""
    function = entry(module, where)
    blocks = list(function.regions[0].blocks)
    if len(blocks) != 1:
        raise TokmillError(
            f"the function @{function.name.value} has {len(blocks)} blocks",
            where=where,
            hint="a function that is scheduled has no branches",
        )
    return blocks[0]


def shape_of(value: Any, where: str) -> tuple[tuple[int, ...], str]:
    """Return shape and element type of a value; () for a scalar."""
    return type_of(value.type, where)


def type_of(kind: Any, where: str) -> tuple[tuple[int, ...], str]:
    """Return shape and element type of a type, as `shape_of` does of a value."""
    bindings = toolkit.ir()
    if not isinstance(kind, bindings.ShapedType):
        return (), str(kind)
    shaped = kind
    if not shaped.has_rank or not shaped.has_static_shape:
        raise TokmillError(
            f"the shape {kind} is not known before the module runs",
            where=where,
            hint="export the model with fixed sizes",
        )
    return tuple(shaped.shape), str(shaped.element_type)


def _describe(operation: Any, tag: str, number: dict[Any, int], where: str) -> Operation:
    linalg = plugins.require("torch_mlir.dialects.linalg")
    view = operation.operation
    maps = maps_of(linalg, operation, where)
    loops = maps[0].n_dims
    accesses = [
        _access(one, value, loops, f"{where}: {tag} ({view.name})")
        for one, value in zip(maps, view.operands, strict=False)
    ]
    # linalg is in destination style: the last operands are what is written.
    outputs = len(view.results)
    loads, stores = accesses[:-outputs], accesses[-outputs:]
    inner = [each.operation.name for each in view.regions[0].blocks[0].operations]
    bounds = _bounds(accesses, loops, f"{where}: {tag} ({view.name})")
    parallel = np.zeros(loops, bool)
    for store in stores:
        parallel |= store.matrix[:, :loops].any(axis=0)
    if "iterator_types" in view.attributes:
        # Several iterations of a reduction may write one element: d0 + d1.
        parallel &= ["parallel" in str(one) for one in view.attributes["iterator_types"]]
    return Operation(
        tag,
        view.name,
        _kind(view.name, operation),
        bounds,
        tuple(map(bool, parallel)),
        tuple(loads),
        tuple(stores),
        arithmetic_of(inner),
        tuple(
            (place, number[value]) for place, value in enumerate(view.operands) if value in number
        ),
    )


def arithmetic_of(names: Iterable[str]) -> tuple[int, ...]:
    """Return how often each of `ARITHMETIC` is among the names of a body's operations."""
    counts = [0] * len(ARITHMETIC)
    for name in names:
        if (place := _COUNTED.get(name)) is not None:
            counts[place] += 1
    return tuple(counts)


def maps_of(linalg: Any, operation: Any, where: str) -> list[Any]:
    """Return the indexing maps of an operation, by the bindings of its dialect."""
    maps = linalg.get_indexing_maps(operation)
    if maps is None:
        raise TokmillError(
            f"{operation.operation.name} has no loops of its own",
            where=where,
            hint="lower it to linalg.generic first",
        )
    return [one.value if hasattr(one, "value") else one for one in maps]


def _kind(name: str, operation: Any) -> str:
    if name == "linalg.generic":
        return "generic"
    if "matmul" in name or "matvec" in name or "vecmat" in name or name == "linalg.contract":
        return "matmul"
    if "pooling" in name:
        return "pooling"
    if "conv" in name:
        return "conv"
    return "add" if name == "linalg.add" else "unknown"


def _access(one: Any, value: Any, loops: int, where: str) -> Access:
    shape, element = shape_of(value, where)
    rows = [row_of(str(result), loops) for result in one.results]
    matrix = np.zeros((len(rows), loops + 1), np.int64)
    for place, row in enumerate(rows):
        if row is not None:
            matrix[place] = row
    odd = [
        str(result)
        for result, row in zip(one.results, rows, strict=True)
        if row is None or min(row[:loops], default=0) < 0
    ]
    whole = sorted({int(loop) for loop in re.findall(r"d(\d+)", " ".join(odd))})
    return Access(matrix, shape, element, all(row is not None for row in rows), tuple(whole))


def row_of(text: str, loops: int) -> list[int] | None:
    """Return the factors of a sum of loops, `d0 * 2 + d3 - 1`, and its constant last."""
    row, place = [0] * (loops + 1), 0
    while place < len(text):
        match = _TERM.match(text, place)
        if match is None:
            return None
        sign, loop, factor, constant = match.groups()
        place = match.end()
        row[loops if loop is None else int(loop)] += int(f"{sign}1") * int(constant or factor or 1)
    return row


def _bounds(accesses: list[Access], loops: int, where: str) -> tuple[int, ...]:
    """Return the iterations of each loop: the size of a dimension that it alone indexes."""
    bounds = [0] * loops
    for access in accesses:
        for row, size in zip(access.matrix, access.shape, strict=True):
            used = np.flatnonzero(row[:loops])
            if len(used) == 1 and row[used[0]] == 1 and row[loops] == 0:
                bounds[used[0]] = size
    if not all(bounds):
        raise TokmillError(
            f"no operand says how often loop {bounds.index(0)} runs",
            where=where,
            hint="an operation without iterations, or with indices of several loops alone, "
            "cannot be scheduled",
        )
    return tuple(bounds)
