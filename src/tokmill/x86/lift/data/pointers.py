"""Pointers in the data of a program: tables of callbacks, virtual tables, records with names."""

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import (
    Program,
    distinct,
    has_counted_strings,
    member,
    strings_at,
)

LINKED = (".got", ".plt")
"""Beginnings of the names of sections that a linker fills in an order of its own."""


def add_pointers(graph: Graph, program: Program) -> None:
    address, target = _words(program)
    kept = in_data(program, address)
    kept &= member(target, graph.function_address) | in_data(program, target)
    # The table of a damaged file may name a place twice.
    address, first = np.unique(address[kept], return_index=True)
    target = target[kept][first]
    if not len(graph.function_address):
        return
    texts: dict[int, str] = {}
    if not has_counted_strings(program):
        texts = strings_at(program, distinct(target))
    graph.pointer_address, graph.pointer_target = address, target
    graph.pointer_text = [texts.get(at, "") for at in target.tolist()]


def in_data(program: Program, addresses: Array) -> Array:
    """Return which addresses (u8) are data of the program, also data that is not in the file.

    What a linker fills in an order of its own does not count.
    """
    result = np.zeros(len(addresses), bool)
    last = max((section.stop for section in program.sections), default=0)
    if program.top > last:
        result = (addresses >= np.uint64(last)) & (addresses < np.uint64(program.top))
    for section in program.sections:
        if not (section.execute or section.name.startswith(LINKED)):
            result |= addresses - np.uint64(section.address) < np.uint64(len(section.data))
    return result


def _words(program: Program) -> tuple[Array, Array]:
    """Return addresses and values (u8) of the words that may be pointers.

    A program that may lie anywhere has relocations for its pointers. In one with a fixed address
    every aligned word may be one.
    """
    if not (program.fixed or program.kind == "relocatable"):
        return program.pointer_address, program.load(program.pointer_address)
    word = program.word
    places, values = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    for section in program.sections:
        if section.execute:
            continue
        skip = -section.address % word
        count = max(0, (len(section.data) - skip) // word)
        words = section.linked[skip : skip + count * word].view(f"<u{word}")
        first = np.uint64(section.address + skip)
        places.append(first + np.arange(count, dtype=np.uint64) * np.uint64(word))
        values.append(words.astype(np.uint64))
    return np.concatenate(places), np.concatenate(values)
