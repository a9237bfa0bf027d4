"""A module that is to be scheduled: its text, its operations, and what is left out of it."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokmill.base.errors import TokmillError
from tokmill.base.files import path_to_text
from tokmill.base.progress import human_count
from tokmill.mlir.modules import dtypes, forms, generators, guard, operations, toolkit
from tokmill.mlir.modules.operations import Operation

LARGEST = 1 << 30
"""Bytes that inputs and outputs of a module may have in all."""
DIALECTS = {
    "builtin", "linalg", "tensor", "arith", "math", "index", "complex", "vector", "affine", "scf",
    "cf", "ub", "bufferization", "memref",
}  # fmt: skip
"""Dialects whose operations compute; others, such as `llvm`, may call any function."""
FUNCTIONS = {"func.func", "func.return"}
SHOWN = 5
"""Modules of a folder that are named in one note or for one reason; of more there is a number."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A module with one function on tensors."""

    name: str
    text: str
    operations: tuple[Operation, ...]
    """In the order of the module; schedules go from the last to the first."""

    @property
    def length(self) -> int:
        """Return the longest sum of the module: the product of an operation's reductions."""
        reduced = (
            [n for n, parallel in zip(one.bounds, one.parallel, strict=True) if not parallel]
            for one in self.operations
        )
        return max(map(math.prod, reduced), default=1)


def of_text(text: str, name: str) -> Problem:
    """Return the problem that a module's text is, without what `forms.plain` takes out.

    Raises `TokmillError` for what is not a valid module, for several functions or branches, shapes
    that are not known, elements that this cannot make, tensors beyond `LARGEST`, and for
    operations that may do something else than compute.
    """
    text = forms.plain(text, name)
    inside = toolkit.context()
    module = toolkit.parse(text, inside, name)
    with inside:
        if operations.give_own_buffers(module, name):
            text = str(module)
        described = operations.find(module, name)
        _check_computes(module, name)
        kind = operations.entry(module, name).function_type.value
        total = 0
        for one in (*kind.inputs, *kind.results):
            shape, element = operations.type_of(one, name)
            if not re.fullmatch(r"tensor<.*>", str(one)) or element not in dtypes.TYPES:
                raise TokmillError(
                    f"the function takes or gives a {one}",
                    where=name,
                    hint=f"arguments and results are tensors of {', '.join(dtypes.TYPES)}",
                )
            total += math.prod(shape) * dtypes.of(element).itemsize
        if total > LARGEST:
            raise TokmillError(
                f"inputs and outputs take {total >> 20:,} MiB",
                where=name,
                hint=f"at most {LARGEST >> 20:,} MiB: take smaller sizes",
            )
    return Problem(name, text, tuple(described))


def _check_computes(module: Any, where: str) -> None:
    """Raise `TokmillError` for calls of functions, and for operations that do not compute.

    A module becomes machine code in a process of the user: what it calls there would be run.
    """
    foreign: list[str] = []

    def look(operation: Any) -> Any:
        name = operation.name
        allowed = name in FUNCTIONS or name.partition(".")[0] in DIALECTS and name != "vector.print"
        if not allowed and not foreign:
            foreign.append(name)
        return toolkit.ir().WalkResult.ADVANCE

    module.operation.walk(look)
    if foreign:
        raise TokmillError(
            f"{foreign[0]} is not allowed in a module that is run",
            where=where,
            hint="a module computes by linalg on tensors; it calls no functions",
        )


def of_line(line: str) -> Problem:
    """Return a problem by its sizes, such as `matmul 256 512 1024`."""
    return of_text(generators.chain(line), " ".join(line.split()))


def of_file(path: Path) -> Problem:
    text, name = toolkit.text_of(path), path_to_text(str(path))
    guard.check(text, name)
    return of_text(text, name)


class Folder(NamedTuple):
    """The modules of a folder."""

    problems: list[Problem]
    refused: list[tuple[str, str]]
    """File and why it cannot be scheduled."""
    left_out: int
    """What else lies in the folder."""

    def notes(self, where: str) -> list[str]:
        """Return what was left out and refused, the first of it by name; a line each."""
        lines = []
        if self.left_out:
            entries = human_count(self.left_out, "entry", "entries")
            lines.append(f"{where}: {entries} left out: not named .mlir, or no file")
        lines += [f"{file}: refused, {why}" for file, why in self.refused[:SHOWN]]
        if len(self.refused) > SHOWN:
            lines.append(f"{where}: {len(self.refused):,} modules refused in all")
        return lines


def of_folder(path: Path) -> Folder:
    """Return the modules of a folder.

    Raises `TokmillError` if no module lies there, or none that can be scheduled.
    """
    # A pipe would make this wait for ever.
    inside = sorted(file for file in path.glob("*.mlir") if file.is_file())
    if not inside:
        raise TokmillError(
            "there is no .mlir file", where=str(path), hint="name files, or another folder"
        )
    problems, refused = [], []
    for file in inside:
        try:
            problems.append(of_file(file))
        except TokmillError as error:
            refused.append((str(file), error.what))
    if not problems:
        where, why = refused[0]
        more = f", and so {len(refused) - 1:,} others" if len(refused) > 1 else ""
        raise TokmillError(f"{why}{more}", where=where, hint="no module there can be scheduled")
    return Folder(problems, refused, sum(1 for _ in path.iterdir()) - len(inside))
