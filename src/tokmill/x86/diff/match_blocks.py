"""Matches blocks of matched functions by their content, their place and their neighbours."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.diff.result import Reason
from tokmill.x86.diff.same import once_in_both
from tokmill.x86.features.bags import (
    Bag,
    bag,
    hash_texts,
    matrices,
    normalized,
    row_products,
    tf_idf,
)
from tokmill.x86.features.function_features import import_names
from tokmill.x86.features.instruction_features import Instructions
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import find, owners
from tokmill.x86.walks import flow_of

ALL = 96
"""If the smaller function has at most so many blocks, all pairs of blocks are compared."""
BAND = 24
"""Otherwise a block is compared with those at most so far from its place in proportion."""
AT_ONCE = 1 << 20
"""Pairs of blocks held at a time."""
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
    instructions: Instructions
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
        parts += [matcher.match(*portion) for portion in _portions(a, b, i, j, changed)]
    joined = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("match", "a", "b", "similarity", "reason")
    ]
    order = np.lexsort((joined[1], joined[0]))
    return BlockMatches(*(column[order] for column in joined))


def _portions(
    a: Side, b: Side, i: Array, j: Array, matches: Array
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield (match, block of A, block of B) of pairs worth a comparison, some at a time."""
    size_a, size_b = np.diff(a.graph.function_blocks)[i], np.diff(b.graph.function_blocks)[j]
    low_a, low_b = a.graph.function_blocks[i], b.graph.function_blocks[j]
    parts: list[tuple[Array, Array, Array]] = []
    count = 0
    for match in matches.tolist():
        rows, columns = int(size_a[match]), int(size_b[match])
        first = int(low_a[match]), int(low_b[match])
        one, other = _worth(rows, columns, a.hashes, b.hashes, first)
        parts.append((np.full(len(one), match), one, other))
        count += len(one)
        if count >= AT_ONCE:
            yield _joined(parts)
            parts, count = [], 0
    if parts:
        yield _joined(parts)


def _joined(parts: list[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    match, one, other = (np.concatenate(column) for column in zip(*parts, strict=True))
    return match, one, other


def _worth(
    rows: int, columns: int, hashes_a: Array, hashes_b: Array, first: tuple[int, int]
) -> tuple[Array, Array]:
    """Return the pairs of blocks of two functions that are compared, ascending."""
    if min(rows, columns) <= ALL:
        one, other = np.divmod(np.arange(rows * columns), max(columns, 1))
        return one + first[0], other + first[1]
    near = np.arange(rows) * columns // rows
    other = (near[:, None] + np.arange(-BAND, BAND + 1)).reshape(-1)
    one = np.repeat(np.arange(rows), 2 * BAND + 1)
    inside = (other >= 0) & (other < columns)
    # And blocks whose content occurs once in both.
    i, j = once_in_both(hashes_a[first[0] :][:rows], hashes_b[first[1] :][:columns])
    key = np.unique(np.concatenate([one[inside] * columns + other[inside], i * columns + j]))
    one, other = np.divmod(key, columns)
    return one + first[0], other + first[1]


class _Blocks:
    """The blocks of two programs, with their features."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b = a, b
        self.forms = _cosine_matrices(
            [
                bag(len(one.block_address), owners(one.block_instructions), side.instructions.form)
                for side, one in ((a, a.graph), (b, b.graph))
            ]
        )
        self.facts = _cosine_matrices([_facts(side.graph, side.callees) for side in (a, b)])
        self.has = [np.diff(one.indptr) > 0 for one in self.facts]
        self.size = [np.log1p(np.diff(side.graph.block_instructions)) for side in (a, b)]
        self.place = [_place(side.graph) for side in (a, b)]
        sizes = [np.diff(side.graph.function_blocks) for side in (a, b)]
        self.blocks = [np.repeat(one, one) for one in sizes]
        """How many blocks the function of each block has: (B,) i8."""
        self.flow = [_flow(side.graph) for side in (a, b)]

    def match(self, match: Array, one: Array, other: Array) -> BlockMatches:
        """Return the pairs that are chosen among those of some matches."""
        key = one * len(self.size[1]) + other
        if (key[1:] <= key[:-1]).any():
            # Blocks ascend within a match, but matches need not.
            order = np.argsort(key)
            match, one, other, key = match[order], one[order], other[order], key[order]
        parts = self._parts(one, other)
        fixed: Array = np.zeros(len(one), np.float32)
        for name, part in parts.items():
            fixed = fixed + WEIGHTS[name] * part
        score = fixed
        flow: Array = np.zeros(len(one), np.float32)
        whole = self._whole(match, one, other)
        links = [self._links(one, other, key, whole, back) for back in (False, True)]
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

    def _whole(self, match: Array, one: Array, other: Array) -> Array:
        """Return which pairs are of functions of which all blocks are compared with all: (n,)."""
        begins = np.flatnonzero(np.diff(match, prepend=-1))
        counts = np.diff(begins, append=len(match))
        rows, columns = self.blocks[0][one[begins]], self.blocks[1][other[begins]]
        return np.repeat(counts == rows * columns, counts)

    def _links(
        self, one: Array, other: Array, key: Array, whole: Array, back: bool
    ) -> tuple[Array, Array, Array]:
        """Return (pair, pair of blocks behind both or before both, weight), n of each.

        `key` (n,) i8, ascending: block of A · blocks of B + block of B; `whole` as of `_whole`.
        """
        ways_a, ways_b = (flow[back] for flow in self.flow)
        # Ways stay within a function, so what is behind both is of the same match, if it is there.
        size_b = np.diff(ways_b.indptr)[other]
        sizes = np.diff(ways_a.indptr)[one] * size_b
        number = np.repeat(np.arange(len(one)), sizes)
        within = np.arange(len(number), dtype=np.int32)
        within -= np.repeat((np.cumsum(sizes) - sizes).astype(np.int32), sizes)
        step_a, step_b = np.divmod(within, size_b.astype(np.int32)[number])
        at_a = ways_a.indptr[one][number] + step_a
        at_b = ways_b.indptr[other][number] + step_b
        to_a, to_b = ways_a.indices[at_a].astype(np.int64), ways_b.indices[at_b].astype(np.int64)
        weight = ways_a.data[at_a] * ways_b.data[at_b]
        # All with all: the place of a pair follows from its blocks.
        columns = self.blocks[1][other]
        neighbour = number + (to_a - one[number]) * columns[number] + (to_b - other[number])
        searched = np.flatnonzero(~whole[number])
        if not len(searched):
            return number, neighbour, weight
        wanted = to_a[searched] * len(self.size[1]) + to_b[searched]
        neighbour[searched], is_pair = find(key, wanted)
        there = np.ones(len(number), bool)
        there[searched] = is_pair
        return number[there], neighbour[there], weight[there]


def _best(one: Array, other: Array, score: Array) -> Array:
    """Return 1 for pairs that are the best of both their blocks, less for others: (n,) f4."""
    odds = np.exp(np.clip(score - LEAST, -20, 20))
    row, column = np.bincount(one, odds), np.bincount(other, odds)
    return np.sqrt(odds / (1 + row[one]) * odds / (1 + column[other])).astype(np.float32)


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


def _facts(graph: Graph, more: tuple[Array, Array]) -> Bag:
    """Return constants, strings and imports of each block, and `more` (block, u8 of what)."""
    slot, is_import = find(graph.import_address, graph.edge_target)
    rows = (
        owners(graph.block_constants),
        owners(graph.block_strings),
        owners(graph.block_edges)[is_import],
        more[0],
    )
    keys = (
        mix(mix(graph.constant.astype(np.uint64)) + _CONSTANT),
        hash_texts(graph.strings)[graph.string],
        mix(hash_texts(import_names(graph))[slot[is_import]] + _IMPORT),
        mix(mix(more[1]) + _MORE),
    )
    return bag(len(graph.block_address), np.concatenate(rows), np.concatenate(keys))


def _cosine_matrices(bags: list[Bag]) -> list[Any]:
    return [normalized(one) for one in tf_idf(matrices(bags))]


def _place(graph: Graph) -> Array:
    sizes = np.diff(graph.function_blocks)
    number = np.arange(len(graph.block_address)) - np.repeat(graph.function_blocks[:-1], sizes)
    return (number / np.maximum(np.repeat(sizes, sizes) - 1, 1)).astype(np.float32)


def _flow(graph: Graph) -> tuple[Any, Any]:
    """Return (B, B) CSR of the edges between blocks, and of the reverse edges; rows of length 1."""
    sparse = plugins.require("scipy.sparse")
    flow, blocks = flow_of(graph), len(graph.block_address)
    ones = np.ones(len(flow.target), np.float32)
    ahead = sparse.csr_array((ones, flow.target, flow.first), shape=(blocks, blocks))
    return normalized(ahead), normalized(ahead.T.tocsr())
