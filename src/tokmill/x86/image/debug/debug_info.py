"""The functions of an unstripped program, by its debug information."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import Child, ChildDied, ChildError
from tokmill.base.errors import TokmillError
from tokmill.store.schema import Array
from tokmill.x86.image.program import mapped

SECONDS = 1800.0
MEMORY = 1 << 30, 12
"""Bytes that reading may take: so many, and for each byte of the file so many more."""
OUTPUT = 2 << 30


@dataclass(slots=True)
class DebugInfo:
    """Functions of one program, by its debug information.

    F functions, P ranges of code, S source files. Addresses are those of the file, as `lift` counts
    them.
    """

    files: list[str]
    """(S), of compilations, as the compiler was told, joined with the folder in which it ran."""
    name: list[str]
    """(F): the linkage name where there is one, without what compilers put after the names of
    clones, else the name."""
    unit: Array
    """(F,) i4: the source file whose compilation made it; -1 where the name is known everywhere."""
    entry: Array
    """(F,) u8: where it begins."""
    clone: Array
    """(F,) bool: made by the compiler of a function of this name (`.constprop`, `.part`, …)."""
    range_start: Array
    """(P,) u8, ascending: the code of functions, with what was moved out of them (`.cold`)."""
    range_stop: Array
    """(P,) u8, after the last byte."""
    range_function: Array
    """(P,) i8."""
    described: set[tuple[str, int]]
    """Name and unit of functions that have no code of their own: inlined, or not made."""
    left_out: dict[str, int]
    """What could not be read → how often."""

    def function_at(self, addresses: Array) -> Array:
        """Return the function whose code lies at each address (u8): i8, -1 for none."""
        at = np.searchsorted(self.range_start, addresses, side="right") - 1
        if not len(self.range_start):
            return np.full(len(addresses), -1, np.int64)
        inside = (at >= 0) & (addresses < self.range_stop[at])
        found: Array = np.where(inside, self.range_function[at], -1)
        return found


def debug_reader(*paths: Path | str) -> Child:
    """Return the child that reads the debug information of files; to be used in a `with`.

    Raises `TokmillError` where one of them is not there or empty, `MissingExtraError` where
    pyelftools is not installed.
    """
    plugins.require("elftools")
    largest = max(len(mapped(Path(path))) for path in paths)
    limits = Limits(SECONDS, memory=MEMORY[0] + MEMORY[1] * largest, output=OUTPUT)
    return Child("tokmill.x86.image.debug.dwarf:read", limits)


def read_debug_info(path: Path | str, reader: Child | None = None) -> DebugInfo:
    """Read the DWARF of a linked ELF file, or of what `objcopy --only-keep-debug` left of one.

    `reader` is a `debug_reader` that reads several files; without one a child is started.

    Raises:
        TokmillError: the file is no ELF file, is an object file, or its debug information is
            missing, damaged, or in `.dwo` files.
    """
    if reader is None:
        with debug_reader(path) as reader:
            return read_debug_info(path, reader)
    try:
        found = reader(str(path))
    except (ChildDied, ChildError) as error:
        why = error.ended.why() if isinstance(error, ChildDied) and error.ended else error.what
        raise TokmillError(
            f"its debug information cannot be read: {why}",
            where=str(path),
            hint="is the file complete? `readelf --debug-dump=info` says where it is damaged",
        ) from None
    return _debug_info(found)


def _debug_info(found: dict[str, Any]) -> DebugInfo:
    ranges = np.frombuffer(found["ranges"], np.uint64).reshape(-1, 3)
    units = np.frombuffer(found["described_unit"], np.int32).tolist()
    return DebugInfo(
        found["files"],
        found["name"],
        np.frombuffer(found["unit"], np.int32),
        np.frombuffer(found["entry"], np.uint64),
        np.frombuffer(found["clone"], np.uint8) > 0,
        ranges[:, 0],
        ranges[:, 1],
        ranges[:, 2].astype(np.int64),
        set(zip(found["described"], units, strict=True)),
        found["left_out"],
    )
