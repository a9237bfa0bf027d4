"""Modules of other projects as modules that are scheduled: one function that computes.

- A `main` beside one other function, which it calls once (tpp-mlir, MLIR-RL): the other function
  is what is scheduled.
- A module that is all that stands in another one (MLIR-RL): the inner one.
- `ml_program.global` (torch-mlir): a constant where it is read; one that nobody reads is left out.
- MLIR-RL's benchmarks time themselves: `@main` takes tensors and returns a tensor and an i64, the
  difference of two calls of `@nanoTime`. The clock is taken out.

What does more than that is left as it is, and refused by `problem`.
"""

import re
from typing import Any

from tokmill.base.errors import TokmillError
from tokmill.mlir.modules import operations, toolkit

CLOCK, MODULE = "nanoTime", "builtin.module"
LOADS = ("ml_program.global_load", "ml_program.global_load_const")


def plain(text: str, where: str) -> str:
    """Return a module without clocks, globals and a `main` that calls what is scheduled."""
    timed = re.search(rf"@\"?{CLOCK}\b", text) is not None
    other = re.search(r"\bml_program\.|\bmodule\b[^\n]*{\s*module\b", text)
    if not timed and other is None and text.count("func.func") < 2:
        return text
    inside = toolkit.context()
    module = toolkit.parse(text, inside, where)
    while len(inner := list(module.body.operations)) == 1 and inner[0].operation.name == MODULE:
        module = toolkit.parse(str(inner[0]), inside, where)
    with inside, toolkit.ir().Location.unknown():
        _drop_main(module)
        _fold_globals(module)
        if timed:
            _without_clock(module, where)
        return str(module)


def _inner(module: Any) -> list[Any]:
    result: list[Any] = []

    def look(operation: Any) -> Any:
        result.append(operation)
        return toolkit.ir().WalkResult.ADVANCE

    module.operation.walk(look)
    return result


def _called(function: Any) -> list[str]:
    calls = (one for one in _inner(function) if one.name == "func.call")
    return [one.attributes["callee"].value for one in calls]


def _drop_main(module: Any) -> None:
    """Erase a `main` beside one function, which it calls once, and what is declared for it."""
    functions = {
        one.name.value: one for one in module.body.operations if one.operation.name == "func.func"
    }
    bodies = {name for name, one in functions.items() if one.regions[0].blocks}
    remaining = bodies - {"main"}
    if len(bodies) != 2 or len(remaining) != 1:
        return
    (name,) = remaining
    if _called(functions["main"]).count(name) != 1 or _called(functions[name]).count("main"):
        return
    for each in functions.keys() - {name, *_called(functions[name])}:
        functions[each].operation.erase()


def _fold_globals(module: Any) -> None:
    """Make constants of globals that are only read, and erase those that nobody names."""
    bindings = toolkit.ir()
    uses: dict[str, list[Any]] = {}
    for one in _inner(module):
        if one.name.startswith("ml_program.global_"):
            uses.setdefault(str(one.attributes["global"]), []).append(one)
    for one in list(module.body.operations):
        view = one.operation
        if view.name != "ml_program.global":
            continue
        value = view.attributes.get("value", None)
        users = uses.get(f"@{view.attributes['sym_name'].value}", [])
        constant = isinstance(value, bindings.DenseElementsAttr)
        if any(each.name not in LOADS or not constant for each in users):
            continue
        for load in users:
            with bindings.InsertionPoint(load):
                folded = bindings.Operation.create(
                    "arith.constant", results=[load.results[0].type], attributes={"value": value}
                )
            load.results[0].replace_all_uses_with(folded.results[0])
            load.erase()
        view.erase()


def _without_clock(module: Any, where: str) -> None:
    """Make a module one whose function calls no clock and returns tensors alone."""
    bindings = toolkit.ir()
    function = operations.entry(module, where)
    block = operations.body(module, where)
    ends = block.operations[len(block.operations) - 1].operation
    kept = [value for value in ends.operands if str(value.type) != "i64"]
    inputs = [value.type for value in block.arguments]
    with bindings.InsertionPoint(ends):
        bindings.Operation.create("func.return", operands=kept)
    ends.erase()
    kind = bindings.FunctionType.get(inputs, [value.type for value in kept])
    function.attributes["function_type"] = bindings.TypeAttr.get(kind)
    if "res_attrs" in function.attributes:
        del function.attributes["res_attrs"]
    _erase(block, where)
    for operation in list(module.body.operations):
        view = operation.operation
        if "sym_name" in view.attributes and view.attributes["sym_name"].value == CLOCK:
            view.erase()


def _erase(block: Any, where: str) -> None:
    clocks = [
        one.operation
        for one in block.operations
        if one.operation.name == "func.call" and one.operation.attributes["callee"].value == CLOCK
    ]
    users = {use.owner.operation for clock in clocks for use in clock.results[0].uses}
    for user in users:
        if user.name != "arith.subi" or list(user.results[0].uses):
            raise TokmillError(
                f"the time that @{CLOCK} gives is used by {user.name}",
                where=where,
                hint="a benchmark returns the difference of two times, and nothing else",
            )
    for one in (*users, *clocks):
        one.erase()
