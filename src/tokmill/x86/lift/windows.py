"""Very large programs are lifted one window of code at a time, which limits memory.

Windows share little: the callees of a window are functions of later windows. A function with a part
in another window (`.cold`) becomes two functions with jumps between them. That a function never
returns is only known within its own window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import Program, Section
from tokmill.x86.image.ranges import distinct, offsets

LARGE = 52 << 20
"""Programs with at most so many bytes of code are lifted as a whole, which takes about 900 MB."""
WINDOW = 32 << 20
"""Bytes of code in a window of larger programs."""
SEARCH = 1 << 16
"""Bytes that are searched for a good place to cut."""
WINDOWED = (
    f"more than {LARGE >> 20} MiB of code, searched for functions {WINDOW >> 20} MiB at a time"
)
PADDING = (0x00, 0x90, 0xCC)
OFFSETS = (
    "function_blocks", "block_bytes", "block_instructions", "block_edges", "table_entries"
)  # fmt: skip
COLUMNS = (
    "function_address", "block_address", "code", "lengths", "edge_target", "edge_kind",
    "table_address", "table_size", "table_target",
)  # fmt: skip


def windows(program: Program) -> Iterator[Program]:
    """Yield the program one window at a time, without the code of other windows.

    A program that is not large has one window.
    """
    if not is_cut(program):
        yield dataclasses.replace(program)
        return
    parts = [cut for section in program.sections for cut in _cut(program, section)]
    sizes = np.asarray([_code(part) for part in parts])
    window = (np.cumsum(sizes) - sizes) // WINDOW
    for one in np.unique(window[sizes > 0]).tolist():
        sections = [
            # Code of other windows is marked like import stubs: it exists, but is not followed.
            dataclasses.replace(part, stubs=part.execute and (part.stubs or at != one))
            for part, at in zip(parts, window.tolist(), strict=True)
        ]
        yield dataclasses.replace(program, sections=sections)


def is_cut(program: Program) -> bool:
    return sum(map(_code, program.sections)) > LARGE


def _code(section: Section) -> int:
    return len(section.data) if section.execute and not section.stubs else 0


def called(graph: Graph) -> Array:
    return distinct(graph.edge_target[graph.edge_kind == Edge.CALL])


def joined(graphs: list[Graph]) -> Graph:
    found = graphs[0]
    if len(graphs) == 1:
        return found
    for name in OFFSETS:
        sizes = [np.diff(getattr(one, name)) for one in graphs]
        setattr(found, name, offsets(np.concatenate(sizes)))
    for name in COLUMNS:
        setattr(found, name, np.concatenate([getattr(one, name) for one in graphs]))
        for one in graphs[1:]:
            setattr(one, name, None)
    # What blocks refer to is looked for in the whole graph.
    found.block_strings = np.zeros(len(found.block_address) + 1, np.int64)
    found.block_constants = np.zeros(len(found.block_address) + 1, np.int64)
    found.function_name = [name for one in graphs for name in one.function_name]
    found.unresolved = [place for one in graphs for place in one.unresolved]
    found.cut_short = tuple(dict.fromkeys(why for one in graphs for why in one.cut_short))
    return found


def _cut(program: Program, section: Section) -> Iterator[Section]:
    """Yield a section of code in parts of window size; other sections as they are."""
    begin = 0
    while _code(section) - begin > WINDOW:
        end = _place(program, section, begin + WINDOW)
        yield section.cut(begin, end)
        begin = end
    yield section.cut(begin, len(section.data))


def _place(program: Program, section: Section, at: int) -> int:
    """Return where to cut a section, at `at` or after it: at the beginning of a function."""
    for known in (program.unwind.start, program.function_address):
        inside = known[np.searchsorted(known, np.uint64(section.address + at)) :][:1]
        if len(inside) and int(inside[0]) < min(section.address + at + SEARCH, section.stop):
            return int(inside[0]) - section.address
    first = at + -(section.address + at) % 16
    places = np.arange(first, min(first + SEARCH, len(section.data)), 16)
    padded: Array = np.isin(section.linked[places - 1], PADDING)
    return int(places[np.argmax(padded)]) if len(places) else len(section.data)
