"""Very large programs a window of code at a time, so that memory grows with the window.

What windows share is little: what one calls is a function of those behind it. A function whose
part lies in another window (`.cold`) is two functions with jumps between them, and one that never
returns is known within its own window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import Program, Section
from tokmill.x86.image.ranges import distinct

LARGE = 52 << 20
"""Bytes of code that a program may have to be lifted as a whole: that takes some 900 MB."""
WINDOW = 32 << 20
"""Bytes of code at a time in larger ones."""
SEARCH = 1 << 16
"""Bytes in which a good place to cut is looked for."""
WINDOWED = (
    f"more than {LARGE >> 20} MiB of code, searched for functions {WINDOW >> 20} MiB at a time"
)
PADDING = (0x00, 0x90, 0xCC)
OFFSETS = ("function_blocks", "block_bytes", "block_instructions", "block_edges")
COLUMNS = (
    "function_address", "block_address", "code", "lengths", "edge_target", "edge_kind"
)  # fmt: skip


def windows(program: Program) -> Iterator[Program]:
    """Yield the program a window at a time: the code of the others is left aside.

    One that is not large is one window.
    """
    if not is_cut(program):
        yield dataclasses.replace(program)
        return
    parts = [cut for section in program.sections for cut in _cut(program, section)]
    sizes = np.asarray([_code(part) for part in parts])
    window = (np.cumsum(sizes) - sizes) // WINDOW
    for one in np.unique(window[sizes > 0]).tolist():
        sections = [
            # Code elsewhere is left out like import stubs: it is there, and nothing to follow.
            dataclasses.replace(part, stubs=part.execute and (part.stubs or at != one))
            for part, at in zip(parts, window.tolist(), strict=True)
        ]
        yield dataclasses.replace(program, sections=sections)


def is_cut(program: Program) -> bool:
    """Return whether there is more than one window."""
    return sum(map(_code, program.sections)) > LARGE


def _code(section: Section) -> int:
    return len(section.data) if section.execute and not section.stubs else 0


def called(graph: Graph) -> Array:
    """Return the addresses that calls of a window lead to."""
    return distinct(graph.edge_target[graph.edge_kind == Edge.CALL])


def joined(graphs: list[Graph]) -> Graph:
    """Return one graph of those of all windows, which are used up."""
    found = graphs[0]
    if len(graphs) == 1:
        return found
    for name in OFFSETS:
        bounds = [np.zeros(1, np.int64)]
        for one in graphs:
            bounds.append(getattr(one, name)[1:] + bounds[-1][-1])
        setattr(found, name, np.concatenate(bounds))
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
    """Yield a section of code in parts of a window; others as they are."""
    begin = 0
    while _code(section) - begin > WINDOW:
        end = _place(program, section, begin + WINDOW)
        yield section.cut(begin, end)
        begin = end
    yield section.cut(begin, len(section.data))


def _place(program: Program, section: Section, at: int) -> int:
    """Return where to cut, at a place of a section or behind it: where a function begins."""
    for known in (program.unwind.start, program.function_address):
        inside = known[np.searchsorted(known, np.uint64(section.address + at)) :][:1]
        if len(inside) and int(inside[0]) < min(section.address + at + SEARCH, section.stop):
            return int(inside[0]) - section.address
    first = at + -(section.address + at) % 16
    places = np.arange(first, min(first + SEARCH, len(section.data)), 16)
    padded: Array = np.isin(section.linked[places - 1], PADDING)
    return int(places[np.argmax(padded)]) if len(places) else len(section.data)
