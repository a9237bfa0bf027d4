"""Matches blocks of matched functions by their content, their place and their neighbours."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.diff.result import Reason
from tokmill.x86.diff.same import unique_in_both
from tokmill.x86.features.bags import (
    Bag,
    bag,
    matrices,
    normalized,
    row_products,
    tf_idf,
)
from tokmill.x86.features.function_features import Functions
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import changes, expand, find, owners
from tokmill.x86.walks import flow_of

ALL = 96
"""If the smaller function has at most so many blocks, all pairs of blocks are compared."""
BAND = 24
"""Otherwise a block is compared with those at most so far from its place in proportion."""
AT_ONCE = 1 << 20
"""Pairs of blocks held at a time."""
IN_CACHE = 1 << 16
"""Pairs of blocks whose neighbours are looked at, at a time."""
ROUNDS = 5
WEIGHTS = {
    "same": 2.4, "forms": 2.5, "facts": 4.8, "facts in one alone": -0.9, "place": 0.9,
    "size": -0.7,
}  # fmt: skip
FLOW = 6.4
"""Weight of how well the blocks before are matched, and of how well those after are."""
_CONSTANT, _IMPORT, _MORE = np.uint64(1), np.uint64(2), np.uint64(3)
LEAST = 3.5
"""Two blocks are matched from this sum of evidence on. It and the weights are the best for the
lines of mawk, xz-utils and bc (gcc -O0, -O2, -O3, clang -O2), which no evaluation uses."""


@dataclass(slots=True)
class Side:
    """The blocks of one program."""

    graph: Graph
    functions: Functions
    hashes: Array
    """(B,) u8, as `tokmill.x86.diff.same.block_hashes`."""
    callees: tuple[Array, Array]
    """(X,) i8 and (X,) u8: blocks that lead to other functions, and common names of these in both
    programs, as numbers."""


@dataclass(slots=True)
class BlockMatches:
    """N pairs of blocks, ascending in match and a."""

    match: Array
    """(N,) i8: number of the pair of functions."""
    a: Array
    b: Array
    similarity: Array
    """(N,) f4."""
    reason: Array
    """(N,) u1."""


def match_blocks(a: Side, b: Side, i: Array, j: Array, same: Array) -> BlockMatches:
    """Return the pairs of blocks of matched functions (i, j).

    `same` (M,) bool: identical functions, whose blocks are paired in order.
    """
    low_a, low_b = a.graph.function_blocks[:-1], b.graph.function_blocks[:-1]
    counts = np.diff(a.graph.function_blocks)[i[same]]
    match = np.repeat(np.flatnonzero(same), counts)
    within = np.arange(len(match)) - np.repeat(np.cumsum(counts) - counts, counts)
    one, other = low_a[i[match]] + within, low_b[j[match]] + within
    parts = [
        BlockMatches(
            match, one, other, np.ones(len(match), np.float32),
            np.full(len(match), Reason.CODE, np.uint8),
        )
    ]  # fmt: skip
    if not same.all():
        matcher = _Blocks(a, b)
        changed = np.flatnonzero(~same)
        changed = changed[np.argsort(i[changed])]
        for portion in _portions(a, b, i, j, changed):
            parts += matcher.match(*portion)
    joined = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("match", "a", "b", "similarity", "reason")
    ]
    order = np.lexsort((joined[1], joined[0]))
    return BlockMatches(*(column[order] for column in joined))


def _portions(
    a: Side, b: Side, i: Array, j: Array, matches: Array
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield (match, block of A, block of B) of pairs worth a comparison, some at a time.

    `matches` ascend in their functions of A, so pairs do in their blocks.
    """
    low_a, low_b = a.graph.function_blocks[i[matches]], b.graph.function_blocks[j[matches]]
    rows = np.diff(a.graph.function_blocks)[i[matches]]
    columns = np.diff(b.graph.function_blocks)[j[matches]]
    large = np.minimum(rows, columns) > ALL
    number = np.repeat(np.arange(len(matches)), rows)
    row = expand(np.zeros_like(rows), rows)
    near = row * columns[number] // rows[number]
    begin = np.where(large[number], np.maximum(near - BAND, 0), 0)
    end = np.where(large[number], near + BAND + 1, columns[number])
    end = np.minimum(end, columns[number])
    starts = np.cumsum(rows) - rows
    # And blocks whose content occurs once in both.
    more = [np.zeros((3, 0), np.int64)]
    for one in np.flatnonzero(large).tolist():
        at, to = unique_in_both(
            a.hashes[low_a[one] :][: rows[one]], b.hashes[low_b[one] :][: columns[one]]
        )
        line = starts[one] + at
        far = (to < begin[line]) | (to >= end[line])
        more.append(np.stack([np.full(far.sum(), one), line[far], to[far]]))
    lines = np.concatenate([np.stack([number, np.arange(len(number)), begin]), *more], 1)
    counts = np.concatenate([end - begin, np.ones(lines.shape[1] - len(number), np.int64)])
    order = np.lexsort((lines[2], lines[1]))
    (number, line, begin), counts = lines[:, order], counts[order]
    one, other = low_a[number] + row[line], low_b[number] + begin
    held = np.bincount(number, counts, len(matches)).astype(np.int64)
    first = 0
    while first < len(matches):
        last = first + 1 + int(np.searchsorted(np.cumsum(held[first:]), AT_ONCE))
        part = slice(*np.searchsorted(number, (first, last)))
        size = counts[part]
        yield (
            np.repeat(matches[number[part]], size),
            np.repeat(one[part], size),
            expand(other[part], size),
        )
        first = last


class _Blocks:
    """The blocks of two programs, with their features."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b = a, b
        self.forms = _cosine_matrices(
            [
                bag(len(one.hashes), owners(one.graph.block_instructions), form)
                for one, form in ((side, side.functions.instructions.form) for side in (a, b))
            ]
        )
        self.facts = _cosine_matrices([_facts(side) for side in (a, b)])
        self.has = [np.diff(one.indptr) > 0 for one in self.facts]
        self.size = [np.log1p(np.diff(side.graph.block_instructions)) for side in (a, b)]
        self.place = [_place(side.graph) for side in (a, b)]
        self.flow = [flow_of(side.graph) for side in (a, b)]
        self.source = owners(self.flow[1].first)
        """Where each way of B begins."""
        self.share = [
            [_share(np.diff(one.first)), _share(np.bincount(one.target, minlength=len(one.first)))]
            for one in self.flow
        ]
        """How much each way from a block counts, and each way to it: (B,) f4."""

    def match(self, match: Array, one: Array, other: Array) -> Iterator[BlockMatches]:
        """Yield the pairs that are chosen among those of some matches."""
        parts = self._parts(one, other)
        begins = np.flatnonzero(changes(match))
        begins = begins[changes(begins // IN_CACHE)]
        for part in map(slice, begins, [*begins[1:], len(match)]):
            some = {name: values[part] for name, values in parts.items()}
            yield self._chosen(match[part], one[part], other[part], some)

    def _chosen(
        self, match: Array, one: Array, other: Array, parts: dict[str, Array]
    ) -> BlockMatches:
        fixed: Array = np.zeros(len(one), np.float32)
        for name, part in parts.items():
            fixed = fixed + WEIGHTS[name] * part
        score = fixed
        flow: Array = np.zeros(len(one), np.float32)
        pair, behind = self._links(one, other)
        links = []
        for back, (number, neighbour) in enumerate(((pair, behind), (behind, pair))):
            weight = self.share[0][back][one] * self.share[1][back][other]
            links.append((number, neighbour, weight[number]))
        for _ in range(ROUNDS):
            share = np.clip(score / 8, 0, 1) * _best(one, other, score)
            flow = np.zeros(len(one), np.float32)
            for number, neighbour, weight in links:
                flow += np.bincount(number, weight * share[neighbour], len(one)).astype(np.float32)
            score = fixed + FLOW * flow
        chosen = greedy(one, other, score)
        same = parts["same"][chosen] > 0
        table = np.stack(
            [
                WEIGHTS["facts"] * parts["facts"],
                WEIGHTS["forms"] * parts["forms"],
                WEIGHTS["place"] * parts["place"],
                FLOW * flow,
            ]
        )[:, chosen]
        whys = (Reason.CONSTANTS, Reason.INSTRUCTIONS, Reason.LAYOUT, Reason.FLOW)
        reason = np.asarray(whys, np.uint8)[table.argmax(0)]
        reason[same] = Reason.CODE
        similarity = np.where(same, 1, np.minimum(parts["forms"][chosen], 0.99))
        return BlockMatches(
            match[chosen], one[chosen], other[chosen], similarity.astype(np.float32), reason
        )

    def _parts(self, one: Array, other: Array) -> dict[str, Array]:
        forms = row_products(self.forms[0], self.forms[1], one, other)
        facts = row_products(self.facts[0], self.facts[1], one, other)
        alone = (self.has[0][one] | self.has[1][other]) & (facts <= 0)
        return {
            "same": (self.a.hashes[one] == self.b.hashes[other]).astype(np.float32),
            "forms": forms,
            "facts": facts,
            "facts in one alone": alone.astype(np.float32),
            "place": 1 - np.abs(self.place[0][one] - self.place[1][other]),
            "size": np.abs(self.size[0][one] - self.size[1][other]),
        }

    def _links(self, one: Array, other: Array) -> tuple[Array, Array]:
        """Return n times a pair, and a pair of blocks behind both: two (n,) i8."""
        ways_a, ways_b = self.flow
        # Runs of pairs of a block of A with blocks of B that follow one another.
        first = np.flatnonzero(changes(one) | changes(other - np.arange(len(other))))
        size = np.diff(first, append=len(one))
        row, column = one[first], other[first]
        # A way of the block of A leads to its runs in the same match, as ways stay in a function.
        ways = np.diff(ways_a.first)[row]
        run = np.repeat(np.arange(len(row)), ways)
        target = ways_a.target[expand(ways_a.first[row], ways)]
        ahead = np.searchsorted(row, target)
        runs = np.searchsorted(row, target, side="right") - ahead
        run, ahead = np.repeat(run, runs), expand(ahead, runs)
        # All ways of the blocks of B in a run lie side by side.
        begin, end = ways_b.first[column], ways_b.first[column + size]
        counts = (end - begin)[run]
        way = expand(begin[run], counts)
        step = ways_b.target[way] - np.repeat(column[ahead], counts)
        there = (step >= 0) & (step < np.repeat(size[ahead], counts))
        number = self.source[way] + np.repeat((first - column)[run], counts)
        return number[there], (step + np.repeat(first[ahead], counts))[there]


def _share(ways: Array) -> Array:
    return 1 / np.sqrt(np.maximum(ways, 1).astype(np.float32))


def _best(one: Array, other: Array, score: Array) -> Array:
    """Return 1 for pairs that are the best of both their blocks, less for others: (n,) f4."""
    odds = np.exp(np.clip(score - LEAST, -20, 20)).astype(np.float64)
    row, column = np.bincount(one, odds), np.bincount(other, odds)
    return np.sqrt(odds / (1 + row)[one] * odds / (1 + column)[other]).astype(np.float32)


def greedy(one: Array, other: Array, score: Array, least: float = LEAST) -> Array:
    """Return the numbers of pairs, the best first, none of either side in two: i8, ascending.

    Each round takes the pairs that are the best left for both of their sides; ties go to the first.
    Pairs whose score is not above `least` are left out.
    """
    left = np.flatnonzero(score > least)
    left = left[np.argsort(-score[left], kind="stable")]
    i, j = one[left], other[left]
    best_i, best_j = (np.zeros(side.max(initial=-1) + 1, np.int64) for side in (i, j))
    free_i, free_j = np.ones(len(best_i), bool), np.ones(len(best_j), bool)
    chosen = []
    while len(left):
        # They are sorted, so the first of a block is its best: it is written last.
        place = np.arange(len(left))
        best_i[i[::-1]] = best_j[j[::-1]] = place[::-1]
        mutual = (best_i[i] == place) & (best_j[j] == place)
        chosen.append(left[mutual])
        free_i[i[mutual]] = free_j[j[mutual]] = False
        kept = free_i[i] & free_j[j]
        left, i, j = left[kept], i[kept], j[kept]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *chosen]))


def _facts(side: Side) -> Bag:
    graph, functions = side.graph, side.functions
    slot, is_import = find(graph.import_address, graph.edge_target)
    rows = (
        owners(graph.block_constants),
        owners(graph.block_strings),
        owners(graph.block_edges)[is_import],
        side.callees[0],
    )
    keys = (
        mix(mix(graph.constant.astype(np.uint64)) + _CONSTANT),
        functions.texts[graph.string],
        mix(functions.imports[slot[is_import]] + _IMPORT),
        mix(mix(side.callees[1]) + _MORE),
    )
    return bag(len(graph.block_address), np.concatenate(rows), np.concatenate(keys))


def _cosine_matrices(bags: list[Bag]) -> list[Any]:
    return [normalized(one) for one in tf_idf(matrices(bags))]


def _place(graph: Graph) -> Array:
    sizes = np.diff(graph.function_blocks)
    number = np.arange(len(graph.block_address)) - np.repeat(graph.function_blocks[:-1], sizes)
    return (number / np.maximum(np.repeat(sizes, sizes) - 1, 1)).astype(np.float32)
