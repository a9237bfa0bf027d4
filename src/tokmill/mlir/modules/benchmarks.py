"""Folders of benchmarks as MLIR-RL has them: modules that time themselves, and published times.

`@main` takes tensors and returns a tensor and an i64: the difference of two calls of `@nanoTime`
around the operation. A JSON file says how many nanoseconds each benchmark takes without a
schedule, by its name: that of its file without `.mlir`. The times were taken on another machine;
they are shown and never compared with.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from tokmill import files
from tokmill.errors import TokmillError
from tokmill.headers import loads_json
from tokmill.mlir.modules import operations, toolkit

CLOCK = "nanoTime"
LARGEST = 64 << 20
"""Bytes that a file of times may have."""


class Times(NamedTuple):
    """The published times of a folder."""

    nanoseconds: dict[str, float]
    """Name of a benchmark → its time without a schedule."""
    unread: dict[str, str]
    """Name of a JSON file → why it holds no times."""
    twice: list[str]
    """Benchmarks of which two files have different times; the first file counts."""


def is_timed(text: str) -> bool:
    """Say whether a module calls the clock."""
    return re.search(rf"@\"?{CLOCK}\b", text) is not None


def without_timing(text: str, where: str) -> str:
    """Return a module whose one function calls no clock and returns tensors alone.

    Raises `TokmillError` if the time is used for something else than to be returned.
    """
    bindings = toolkit.ir()
    inside = toolkit.context()
    module = toolkit.parse(text, inside, where)
    with inside, bindings.Location.unknown():
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
            named = view.attributes.get("sym_name", None)
            if named is not None and named.value == CLOCK:
                view.erase()
        return str(module)


def _erase(block: Any, where: str) -> None:
    """Erase the calls of the clock, and what is computed of their results."""
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


def times_of(folder: Path) -> Times:
    """Return the published times of a folder: of all its JSON files that hold name → number.

    Of two files with a time for a benchmark the first one by name counts.
    """
    found: dict[str, float] = {}
    unread: dict[str, str] = {}
    twice: dict[str, None] = {}
    for path in sorted(folder.glob("*.json")):
        if not path.is_file():
            # A pipe would make this wait for ever.
            unread[path.name] = "it is no file"
            continue
        times = _read(path)
        if isinstance(times, str):
            unread[path.name] = times
            continue
        twice |= dict.fromkeys(
            name for name in times if found.get(name, times[name]) != times[name]
        )
        found = times | found
    return Times(found, unread, list(twice))


def _read(path: Path) -> dict[str, float] | str:
    """Return the times of a file, or why it holds none."""
    data = files.read_file(path, LARGEST + 1)
    if len(data) > LARGEST:
        return f"it has more than {LARGEST >> 20} MiB"
    try:
        held = loads_json(data)
    except ValueError as error:
        return f"it is no JSON: {str(error)[:80]}"
    if not isinstance(held, dict):
        return f"it holds a {type(held).__name__}, not names with times"
    times = {
        name: float(value)
        for name, value in held.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value < 1 << 63
        and math.isfinite(value)
    }
    if len(times) < len(held):
        return f"{len(held) - len(times):,} of its {len(held):,} values are no times"
    return times
