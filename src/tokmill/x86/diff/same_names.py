"""Functions that have the same symbol name in both programs."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.features.function_features import find
from tokmill.x86.graph import Graph

CLONE = re.compile(r"\.(isra|constprop|part|cold|llvm|lto_priv)(\.|$).*")
"""What compilers add to the name of a function that they changed or made from another."""


def all_names(graph: Graph, function: int) -> set[str]:
    address = graph.function_address[function]
    low, high = (np.searchsorted(graph.symbol_address, address, side) for side in ("left", "right"))
    return {graph.function_name[function], *graph.symbol_name[int(low) : int(high)]} - {""}


def names_of(graph: Graph) -> dict[str, list[int]]:
    """Return name → the functions that have it, as their only name or as one of several."""
    result: dict[str, list[int]] = {}
    place, there = find(graph.function_address, graph.symbol_address)
    numbers = place[there].tolist()
    others = [graph.symbol_name[i] for i in np.flatnonzero(there).tolist()]
    for name, number in [*zip(graph.function_name, range(len(graph.function_name)), strict=True),
                         *zip(others, numbers, strict=True)]:  # fmt: skip
        if name and number not in (known := result.setdefault(name, [])):
            known.append(number)
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
            known = short.setdefault(CLONE.sub("", name), [])
            known += [one for one in numbers if one not in done and one not in known]
        left.append(short)
    _add_pairs(pairs, *left)
    found = np.asarray(sorted(pairs.items()), np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _add_pairs(
    pairs: dict[int, int], a: Mapping[str, list[int]], b: Mapping[str, list[int]]
) -> None:
    taken = set(pairs.values())
    for name in sorted(a.keys() & b.keys()):
        one, other = a[name], b[name]
        if len(one) == len(other) == 1 and one[0] not in pairs and other[0] not in taken:
            pairs[one[0]] = other[0]
            taken.add(other[0])
