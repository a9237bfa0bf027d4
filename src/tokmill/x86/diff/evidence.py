"""Evidence for a pair of functions: by themselves, and by their neighbours in calls and layout."""

from typing import Any, NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.diff.candidates import WIDTH, Pairs, both_ways
from tokmill.x86.features.bags import matrices, normalized, row_products, row_sums, sketch, tf_idf
from tokmill.x86.features.function_features import BAGS, MEMBERS, SHAPE, Functions
from tokmill.x86.features.tables import Tables
from tokmill.x86.image.image import find

FACTS = ("constants", "strings", "imports")
"""Kinds of features that optimisation does not change."""
AROUND = ("callees", "callers")
"""Facts of the callees, and of the callers."""
LABELS = "labels"
"""Strings that describe the pointers to a function."""
STATIC = (
    *BAGS, *MEMBERS, *AROUND,
    *(f"{kind} mass" for kind in (*FACTS, "members", *AROUND)),
    *(f"{kind} in one alone" for kind in FACTS),
    "covered", "covered with callees",
    *(f"{name} apart" for name in SHAPE), LABELS,
)  # fmt: skip
"""Columns of `static`."""


class Weighted(NamedTuple):
    """TF-IDF matrices of one program."""

    of: dict[str, Any]
    """Kind of feature → CSR (F × features of both programs), rows of length 1. `squares` are those
    of a function's own facts; where `own there` and `all there` are 1, it has the fact, or one of
    its callees has it."""
    total: dict[str, Array]
    """Kind → (F,) f4, length of the rows before: how much there is; of `squares` their sum."""

    def put(self, kind: str, matrix: Any) -> None:
        self.total[kind] = np.sqrt(row_sums(matrix.data**2, matrix.indptr))
        self.of[kind] = normalized(matrix)


def weigh(a: Functions, b: Functions, tables: tuple[Tables, Tables]) -> tuple[Weighted, Weighted]:
    """Return the features of two programs as TF-IDF over both."""
    sides = Weighted({}, {}), Weighted({}, {})
    raw = {kind: tf_idf(matrices([a.bags[kind], b.bags[kind]])) for kind in (*BAGS, *MEMBERS)}
    raw[LABELS] = tf_idf(matrices([one.labels for one in tables]))
    stack = plugins.require("scipy.sparse").hstack
    for number, (side, functions) in enumerate(zip(sides, (a, b), strict=True)):
        for kind, both in raw.items():
            side.put(kind, both[number])
        facts = stack([raw[kind][number] for kind in FACTS], format="csr")
        called = (functions.calls @ facts).tocsr()
        calling = (functions.calls.T.tocsr() @ facts).tocsr()
        for one in (facts, called, calling):
            # Pairs of rows are multiplied in this order; else each time a sorted copy is made.
            one.sort_indices()
        side.put("callees", called)
        side.put("callers", calling)
        side.of["own there"], side.of["all there"] = _ones(facts), _ones((facts + called).tocsr())
        facts.data **= 2
        side.of["squares"], side.total["squares"] = facts, row_sums(facts.data, facts.indptr)
    return sides


def static(
    a: Weighted, b: Weighted, shapes: tuple[Array, Array], i: Array, j: Array, out: Array
) -> None:
    """Write the evidence for pairs (i ascending) to `out`, (n, len(STATIC)) f4.

    It has cosines by kind, the logarithm of all that is shared, how much one has of kinds in which
    the two share nothing, the covered share, and the distance of the counts of `SHAPE`.
    """
    place = {name: number for number, name in enumerate(STATIC)}
    for kind in (*BAGS, *MEMBERS, *AROUND, LABELS):
        cosine = row_products(a.of[kind], b.of[kind], i, j)
        out[:, place[kind]] = cosine
        if f"{kind} mass" in place:
            one, other = a.total[kind][i], b.total[kind][j]
            out[:, place[f"{kind} mass"]] = np.log1p(cosine * one * other) / 4
            if kind in FACTS:
                alone = np.where(cosine == 0, np.maximum(one, other), 0)
                out[:, place[f"{kind} in one alone"]] = np.log1p(alone) / 2
    for name, there in (("covered", "own there"), ("covered with callees", "all there")):
        out[:, place[name]] = _covered(a, b, i, j, there)
    for number, name in enumerate(SHAPE):
        out[:, place[f"{name} apart"]] = np.abs(shapes[0][i, number] - shapes[1][j, number])


def _covered(a: Weighted, b: Weighted, i: Array, j: Array, there: str) -> Array:
    """Return the share of the facts of each that the other has: (n,) f4.

    It is the geometric mean of both shares. `there`: "own there", what it has by itself, or
    "all there", with its callees: if a function was inlined, its caller has its facts.
    """
    shares = []
    for part, whole in (
        (row_products(a.of["squares"], b.of[there], i, j), a.total["squares"][i]),
        (row_products(a.of[there], b.of["squares"], i, j), b.total["squares"][j]),
    ):
        share = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
        shares.append(np.maximum(share, 0))
    return np.sqrt(shares[0] * shares[1])


def _ones(matrix: Any) -> Any:
    ones = np.ones_like(matrix.data)
    return type(matrix)((ones, matrix.indices, matrix.indptr), shape=matrix.shape, copy=False)


SMALL, DEPTH = 64, 3
"""Instructions of functions that may be inlined; how far calls are followed."""
NEAREST, AT_ONCE = 8, 1 << 11
"""Candidates of each function; pairs whose sketches are held at once."""


class Inlined:
    """Sketches of functions, alone and with the small ones that they call; rows of length 1."""

    def __init__(self, sides: tuple[Weighted, Weighted], programs: tuple[Functions, ...]) -> None:
        self.ways: tuple[list[Array], list[Array]] = [], []
        for number, (side, program) in enumerate(zip(sides, programs, strict=True)):
            alone = np.zeros((len(program.shape), WIDTH), np.float32)
            for seed, kind in enumerate((*BAGS, *MEMBERS)):
                alone += sketch(side.of[kind], WIDTH, seed) * side.total[kind][:, None]
            small = program.shape[:, SHAPE.index("instructions")] <= np.log1p(SMALL)
            calls = program.calls.copy()
            calls.data = small[calls.indices].astype(np.float32)
            step = whole = alone
            for _ in range(DEPTH):
                step = calls @ step
                whole = whole + step
            for way, rows in zip(self.ways, (alone, whole)[:: 1 - 2 * number], strict=True):
                length = np.sqrt((rows**2).sum(1, keepdims=True))
                way.append(rows / np.maximum(length, np.float32(1e-9)))

    def candidates(self, i: Array, j: Array) -> list[tuple[Array, Array]]:
        """Return pairs of some functions of both that are similar if one of them is taken whole."""
        pairs = [pair for a, b in self.ways for pair in both_ways(a[i], b[j], NEAREST)]
        return [(i[row], j[column]) for row, column in pairs]

    def cosine(self, i: Array, j: Array) -> Array:
        """Return how similar pairs are if one of them is taken whole: (n,) f4."""
        cosines = np.zeros(len(i), np.float32)
        for low in range(0, len(i), AT_ONCE):
            part = slice(low, low + AT_ONCE)
            products = [(a[i[part]] * b[j[part]]).sum(1) for a, b in self.ways]
            cosines[part] = np.maximum(np.maximum(*products), 0)
        return cosines


SUPPORT = (
    "called", "calling", "called twice", "before", "behind", "turned", "from anchor", "to anchor"
)  # fmt: skip
"""Columns of `support`."""
REACH = 3
"""How many functions before and after are looked at."""
FADE = 0.7
"""Factor for each function in between."""
WEAK = 0.02
"""Pairs with a lower probability say nothing about their neighbours."""


class Neighbours:
    """The call graphs of two programs, weighted: callees with few callers say most."""

    def __init__(self, a: Any, b: Any) -> None:
        """Take two (F, F) CSR matrices of calls."""
        self.callees = [_weighed(one) for one in (a, b)]
        self.callers = [_weighed(one.T.tocsr()) for one in (a, b)]
        self.twice = [normalized((one @ one + one).tocsr()) for one in self.callees]

    def support(self, pairs: Pairs, probability: Array) -> Array:
        """Return how far the neighbours of each pair are matched: (n, len(SUPPORT)) f4 from 0 to 1.

        `probability`: (n,) f4, how probable each pair is so far.
        """
        sparse = plugins.require("scipy.sparse")
        i, j = pairs.i, pairs.j
        kept = probability > WEAK
        shape = (pairs.rows, pairs.columns)
        matched = sparse.csr_array((probability[kept], (i[kept], j[kept])), shape=shape)
        columns = [
            row_products((one @ matched).tocsr(), other, i, j)
            for one, other in (self.callees, self.callers, self.twice)
        ]
        likely, value = pairs.key[kept], probability[kept]
        before = adjacent(pairs, likely, value, -1, -1)
        behind = adjacent(pairs, likely, value, 1, 1)
        turned = np.maximum(
            adjacent(pairs, likely, value, -1, 1), adjacent(pairs, likely, value, 1, -1)
        )
        anchors = anchored(pairs, probability)
        return np.column_stack([*columns, before, behind, turned, *anchors]).astype(np.float32)


def anchored(pairs: Pairs, probability: Array) -> tuple[Array, Array]:
    """Return how well a pair fits the nearest sure pairs before and behind: two (n,) f4.

    e^(-d / 2), where d is the difference of their distances, in functions, from their anchors.
    """
    best = np.zeros(pairs.rows, np.float32)
    np.maximum.at(best, pairs.i, probability)
    sure = (probability >= 0.5) & (probability == best[pairs.i])
    i, j = pairs.i, pairs.j
    at, to = i[sure], j[sure]
    at, first = np.unique(at, return_index=True)
    to = to[first]
    if not len(at):
        return np.zeros(len(i), np.float32), np.zeros(len(i), np.float32)
    sides = []
    for place in (np.searchsorted(at, i) - 1, np.searchsorted(at, i, side="right")):
        there = (place >= 0) & (place < len(at))
        place = np.clip(place, 0, len(at) - 1)
        off = np.abs((i - at[place]) - (j - to[place]))
        sides.append(np.where(there, np.exp(-off / 2), 0).astype(np.float32))
    return sides[0], sides[1]


def adjacent(pairs: Pairs, likely: Array, value: Array, step_a: int, step_b: int) -> Array:
    """Return the best of the pairs next to each pair, in one direction of each program: (n,) f4."""
    best = np.zeros(len(pairs), np.float32)
    i, j = np.divmod(likely, max(pairs.columns, 1))
    for far_a in range(1, REACH + 1):
        for far_b in range(1, REACH + 1):
            # From likely pairs to their neighbours: these are fewer than all pairs.
            one, other = i - far_a * step_a, j - far_b * step_b
            inside = (one >= 0) & (one < pairs.rows) & (other >= 0) & (other < pairs.columns)
            key = one[inside] * pairs.columns + other[inside]
            place, there = find(pairs.key, key)
            faded = value[inside][there] * np.float32(FADE ** (far_a + far_b - 2))
            # Each pair has one neighbour in this direction, so no place is there twice.
            best[place[there]] = np.maximum(best[place[there]], faded)
    return best


def _weighed(calls: Any) -> Any:
    """Return calls with columns weighted by how few rows have them; rows have length 1."""
    uses = np.bincount(calls.indices, minlength=calls.shape[1])
    weighted = calls.copy()
    weighted.data = (1 / np.log2(2 + uses))[calls.indices].astype(np.float32)
    return normalized(weighted)
