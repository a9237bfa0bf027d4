"""Functions of both programs with one symbol name, and equal ones by hashes without addresses."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.features.function_features import Functions
from tokmill.x86.graph import DIRECT, PLACES, TEXT, BlockPlaces, Edge, Graph
from tokmill.x86.image.image import find, owners

_STEP = np.uint64(0x9E3779B97F4A7C15)
_IMPORT, _FUNCTION, _ELSEWHERE, _OPERAND = (
    mix(np.asarray([n], np.uint64))[0] for n in (11, 12, 13, 14)
)


@dataclass(slots=True)
class Content:
    """Hashes of one program; two programs are compared by them."""

    shape: Array
    """(B,) u8: instructions with their numbers by class, constants, kinds of edges, and at which
    places there are operands that refer to something or lie on the stack."""
    block: Array
    """(B,) u8: shape, strings, and calls of imports."""
    within: Array
    """(B,) u8: targets of the edges within the function, as numbers of its blocks."""
    edge_block: Array
    """(X,) i8: blocks with an edge to another function, ascending."""
    edge_function: Array
    """(X,) i8: that function."""
    edge_place: Array
    """(X,) u8, hash of the place of the edge in its block, and of its kind."""
    leaving: Array
    """i8, ascending: edges that lead to something outside of their function."""


def content_of(graph: Graph, functions: Functions) -> Content:
    shape = _sequences(functions.instructions.code, graph.block_instructions)
    shape += mix(_sequences(graph.constant.astype(np.uint64), graph.block_constants) + _STEP)
    for rows, places in (
        (graph.reference_place // PLACES, graph.reference_place & ~(TEXT | DIRECT)),
        (graph.slot_place, PLACES * graph.slot_place + TEXT),
    ):
        ends = np.searchsorted(rows, graph.block_instructions)
        within_block = places - PLACES * np.repeat(graph.block_instructions[:-1], np.diff(ends))
        shape += mix(_sequences(within_block.astype(np.uint64), ends) ^ _OPERAND)
    edge_owner = owners(graph.block_edges)
    place = np.arange(len(edge_owner)) - graph.block_edges[edge_owner]
    at = mix(place.astype(np.uint64) * _STEP + graph.edge_kind)
    kind, other, number = _targets(graph, edge_owner, functions.imports)
    inside = kind == Target.WITHIN
    leaving = ~inside & (graph.edge_target > 0)
    shape += _sums(mix(at + np.where(leaving, _ELSEWHERE, 0).astype(np.uint64)), graph.block_edges)
    texts = functions.texts[graph.string]
    block = shape + mix(_sequences(texts, graph.block_strings) ^ _STEP)
    imported = np.where(kind == Target.IMPORT, mix(at + mix(other + _IMPORT)), 0).astype(np.uint64)
    block += _sums(imported, graph.block_edges)
    local = np.where(inside, mix(at ^ mix(number.astype(np.uint64))), 0).astype(np.uint64)
    leads = kind == Target.FUNCTION
    return Content(
        shape, block, _sums(local, graph.block_edges), edge_owner[leads], number[leads], at[leads],
        np.flatnonzero(leaving),
    )  # fmt: skip


class Target:
    """Where an edge leads."""

    WITHIN, FUNCTION, IMPORT, ELSEWHERE = range(4)


def _targets(graph: Graph, edge_owner: Array, imports: Array) -> tuple[Array, Array, Array]:
    """Return for each edge a `Target`, the hash of an import, and the number of the block in its
    function or of the function.
    """
    places = BlockPlaces(graph)
    owner = places.function[edge_owner]
    kind = np.full(len(edge_owner), Target.ELSEWHERE)
    number, other = np.zeros(len(kind), np.int64), np.zeros(len(kind), np.uint64)
    block, inside = places.find(owner, graph.edge_target)
    inside &= graph.edge_kind != Edge.CALL
    function, is_function = find(graph.function_address, graph.edge_target)
    slot, is_import = find(graph.import_address, graph.edge_target)
    kind[is_function] = Target.FUNCTION
    number[is_function] = function[is_function]
    kind[is_import] = Target.IMPORT
    other[is_import] = imports[slot[is_import]]
    kind[inside] = Target.WITHIN
    number[inside] = block[inside] - graph.function_blocks[owner[inside]]
    return kind, other, number


def block_hashes(content: Content, partner: Array, blocks: int) -> Array:
    """Return a hash of each block with the functions that it leads to, (B,) u8.

    `partner`: (F,) i8, a number for each function that matched functions share; functions without a
    partner have numbers that the other program does not use.
    """
    token = mix(content.edge_place ^ mix(partner[content.edge_function].astype(np.uint64)))
    sums = np.zeros(blocks, np.uint64)
    np.add.at(sums, content.edge_block, token + _FUNCTION)
    return content.block + sums


def function_hashes(blocks: Array, within: Array, function_blocks: Array) -> Array:
    """Return a hash of the blocks of each function in their order, (F,) u8."""
    return _sequences(mix(blocks) + within, function_blocks)


def _sequences(values: Array, offsets: Array) -> Array:
    """Return a hash of each run of values (u8) in its order; runs may be empty."""
    lengths = np.diff(offsets)
    place = np.arange(len(values)) - np.repeat(offsets[:-1], lengths)
    mixed = mix(mix(values) + place.astype(np.uint64) * _STEP)
    return mix(_sums(mixed, offsets) + lengths.astype(np.uint64))


def _sums(values: Array, offsets: Array) -> Array:
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    return sums[offsets[1:]] - sums[offsets[:-1]]


CLONE = re.compile(r"\.(isra|constprop|part|cold|llvm|lto_priv)(\.|$).*")
"""What compilers add to the name of a function that they changed or made from another."""


def all_names(graph: Graph, function: int) -> set[str]:
    address = graph.function_address[function]
    low, high = (np.searchsorted(graph.symbol_address, address, side) for side in ("left", "right"))
    return {graph.function_name[function], *graph.symbol_name[int(low) : int(high)]} - {""}


def names_of(graph: Graph) -> dict[str, list[int]]:
    result: dict[str, list[int]] = {}
    place, there = find(graph.function_address, graph.symbol_address)
    numbers = place[there].tolist()
    names = [graph.symbol_name[i] for i in np.flatnonzero(there).tolist()]
    for name, number in [*zip(graph.function_name, range(len(graph.function_name)), strict=True),
                         *zip(names, numbers, strict=True)]:  # fmt: skip
        if name and number not in (listed := result.setdefault(name, [])):
            listed.append(number)
    return result


def same_names(a: Mapping[str, list[int]], b: Mapping[str, list[int]]) -> tuple[Array, Array]:
    """Return the pairs of functions (i, j: i8) that alone have a name in their programs.

    Where a name has no partner as it stands, it is looked for without what a compiler added to it.
    A function with several names has the partner of the first of them, by the alphabet.
    """
    pairs: dict[int, int] = {}
    _add_pairs(pairs, a, b)
    left = []
    for names, done in ((a, set(pairs)), (b, set(pairs.values()))):
        short: dict[str, list[int]] = {}
        for name, numbers in names.items():
            listed = short.setdefault(CLONE.sub("", name), [])
            listed += [one for one in numbers if one not in done and one not in listed]
        left.append(short)
    _add_pairs(pairs, *left)
    rows = np.asarray(sorted(pairs.items()), np.int64).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


def _add_pairs(
    pairs: dict[int, int], a: Mapping[str, list[int]], b: Mapping[str, list[int]]
) -> None:
    taken = set(pairs.values())
    for name in sorted(a.keys() & b.keys()):
        one, other = a[name], b[name]
        if len(one) == len(other) == 1 and one[0] not in pairs and other[0] not in taken:
            pairs[one[0]] = other[0]
            taken.add(other[0])


def unique_in_both(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the pairs (places in A, ascending, and in B) of values that both have once."""
    (values_a, first_a), (values_b, first_b) = once(a), once(b)
    _, at_a, at_b = np.intersect1d(values_a, values_b, assume_unique=True, return_indices=True)
    i, j = first_a[at_a], first_b[at_b]
    order = np.argsort(i)
    return i[order], j[order]


def once(values: Array) -> tuple[Array, Array]:
    """Return the values that are there once, ascending, and their places."""
    different, first, count = np.unique(values, return_index=True, return_counts=True)
    return different[count == 1], first[count == 1]
