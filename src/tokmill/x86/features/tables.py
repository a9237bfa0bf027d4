"""Tables of pointers to functions: where a function stands in them, beside what, and who uses them.

A table begins at an address that instructions or other pointers name. Tables of callbacks and of
commands, virtual tables and records with a name are all such tables.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.features.bags import Bag, bag, hash_texts, ones_at
from tokmill.x86.graph import PLACES, Graph
from tokmill.x86.image.image import distinct, find

NEAR = 3
"""Words before and after a pointer in which strings describe it."""
FURTHEST = 1 << 16
"""Words from the beginning of a table to its last pointer."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEPS = np.arange(2 * NEAR + 1, dtype=np.uint64) * _GOLDEN
"""Added to the hash of a string, by its distance in words plus `NEAR`."""


@dataclass(slots=True)
class Tables:
    """Pointers to the F functions of a program, S of them, ascending by address; T tables."""

    function: Array
    """(S,) i8, the function that a pointer leads to."""
    place: Array
    """(S,) i8, the address of the pointer, in words."""
    table: Array
    """(S,) i8, the table that holds it."""
    offset: Array
    """(S,) i8, its place in the table, in words."""
    size: Array
    """(S,) i8, pointers to functions in that table."""
    users: Any
    """(F, T) CSR, f4: 1 where a function names the beginning of a table."""
    labels: Bag
    """Strings beside the pointers to each function, and how far; names of types of virtual
    tables, and the place in the table."""


def tables_of(graph: Graph) -> Tables:
    """Return the tables of a graph; none if it knows no pointers."""
    size = len(graph.function_address)
    word = np.uint64(graph.bits // 8)
    function, is_function = find(graph.function_address, graph.pointer_target)
    slot = graph.pointer_address[is_function]
    ends = graph.block_instructions[graph.function_blocks[1:]]
    owner = np.searchsorted(ends, graph.reference_place // PLACES, side="right")
    _, takes = find(graph.function_address, graph.reference)
    named = np.concatenate([graph.reference[~takes], graph.pointer_target[~is_function]])
    starts = distinct(named)
    # A table that is reached in no known way begins at its first pointer.
    at = np.searchsorted(starts, slot, side="right") - 1
    begin = starts[np.maximum(at, 0)] if len(starts) else slot
    lost = (at < 0) | (slot - begin > np.uint64(FURTHEST) * word)
    begin = np.where(lost, _runs(slot, word), begin)
    tables, table = np.unique(begin, return_inverse=True)
    table = table.reshape(-1)
    used, hit = find(tables, graph.reference)
    return Tables(
        function=function[is_function],
        place=(slot // word).astype(np.int64),
        table=table,
        offset=((slot - begin) // word).astype(np.int64),
        size=np.bincount(table)[table] if len(table) else table,
        users=ones_at(owner[hit], used[hit], (size, len(tables))),
        labels=_labels(graph, function[is_function], slot, begin, word),
    )


def _runs(slot: Array, word: np.uint64) -> Array:
    """Return the first address of the run of words without a gap in which each pointer lies."""
    first = np.ones(len(slot), bool)
    first[1:] = slot[1:] != slot[:-1] + word
    return slot[first][np.cumsum(first) - 1]


def _labels(graph: Graph, function: Array, slot: Array, begin: Array, word: np.uint64) -> Bag:
    """Return what describes the pointers to each function as a bag.

    Args:
        function: (S,) i8, ascending by address.
        slot: (S,) u8, the addresses of the pointers.
        begin: (S,) u8, where their tables begin.
    """
    text = np.asarray([text != "" for text in graph.pointer_text], bool)
    hashes = np.zeros(len(text), np.uint64)
    hashes[text] = hash_texts([text for text in graph.pointer_text if text])
    rows, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    for step in (*range(-NEAR, 0), *range(1, NEAR + 1)):
        place = slot + np.uint64(step * int(word) % (1 << 64))
        row, there = find(graph.pointer_address, place)
        # Before the beginning there is another table.
        kept = np.flatnonzero(there & (place >= begin))
        kept = kept[text[row[kept]]]
        rows.append(function[kept])
        keys.append(mix(hashes[row[kept]] + _STEPS[step + NEAR]))
    # A virtual table begins with a pointer to an object whose second word points to the name of
    # the type (Itanium C++ ABI, 2.5.2 and 2.9.5).
    name, named = find(graph.pointer_address, graph.pointer_target + word)
    named[named] = text[name[named]]
    head, name = graph.pointer_address[named], name[named]
    if len(head) and len(slot):
        run = _runs(graph.pointer_address, word)[np.searchsorted(graph.pointer_address, slot)]
        at = np.searchsorted(head, slot) - 1
        kept = np.flatnonzero((at >= 0) & (head[np.maximum(at, 0)] >= run))
        far = (slot[kept] - head[at[kept]]) // word
        rows.append(function[kept])
        keys.append(mix(mix(hashes[name[at[kept]]]) + far * _GOLDEN))
    return bag(len(graph.function_address), np.concatenate(rows), np.concatenate(keys))
