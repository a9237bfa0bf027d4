"""Matches functions of two programs: evidence, rounds of support by neighbours, an assignment.

Twins are two matches whose functions could as well be matched crosswise, as copies of one file.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.diff.candidates import Pairs, near, pairs_of, rare
from tokmill.x86.diff.evidence import (
    LABELS,
    STATIC,
    SUPPORT,
    Inlined,
    Neighbours,
    Weighted,
    static,
)
from tokmill.x86.diff.evidence_net import net
from tokmill.x86.diff.evidence_weights import CODE, FIRST_BIAS, LATER_BIAS, LEAST, WEIGHTS
from tokmill.x86.diff.pointer_tables import PLACES, Places
from tokmill.x86.diff.result import Reason
from tokmill.x86.features.function_features import MEMBERS, Functions
from tokmill.x86.features.tables import Tables
from tokmill.x86.image.image import find

SEARCH = {
    "mnemonics": 0.6, "forms": 0.7, "form pairs": 0.7, "constants": 1.0, "strings": 1.2,
    "imports": 1.0, "callees": 0.7, "callers": 0.5, "members": 0.7, "member pairs": 0.7,
}  # fmt: skip
"""Weights of the features by which candidates are looked for."""
ROUNDS = 3
"""Number of rounds that use the neighbours; before each but the last, candidates are added."""
STRONG = 0.5
"""Probability from which the neighbours of a pair become candidates."""
MOST_NEIGHBOURS = 16
"""Callees (or callers) of functions with more of them do not become candidates."""
NEXT = (-2, -1, 1, 2)
OWN = (*STATIC, "inlined", "code")
"""Evidence for pairs without their neighbours."""
EVIDENCE = (*OWN, *SUPPORT, *PLACES)
NEAR = 2.0
"""Evidence of their own that two matches lose at most by crossing, if they are twins."""
SURE = 30.0
"""Logit of pairs that are given."""
REASONS = {
    Reason.STRINGS: ("strings", "strings mass"),
    Reason.CONSTANTS: ("constants", "constants mass"),
    Reason.IMPORTS: ("imports", "imports mass"),
    Reason.CALLS: (
        "callees", "callers", "callees mass", "callers mass", "called", "calling", "called twice",
    ),
    Reason.LAYOUT: ("before", "behind", "turned", "from anchor", "to anchor"),
    Reason.INSTRUCTIONS: ("mnemonics", "forms", "form pairs", *MEMBERS, "members mass", "inlined"),
    Reason.CODE: ("code",),
    Reason.TABLES: (LABELS, *PLACES),
}  # fmt: skip
"""Reason → its evidence, which is summed; if none is for a pair, the reason is `STRUCTURE`."""


@dataclass(slots=True)
class Given:
    """Pairs that are known before anything is compared, ascending in i; no function in two."""

    i: Array
    """i8, functions of A."""
    j: Array
    """i8, functions of B."""
    reason: Array
    """u1, a `Reason`."""


@dataclass(slots=True)
class Matched:
    """M matched functions, ascending in i."""

    i: Array
    """(M,) i8, functions of A."""
    j: Array
    """(M,) i8, functions of B."""
    confidence: Array
    """(M,) f4 from 0 to 1."""
    reason: Array
    """(M,) u1, a `Reason`."""


def match_functions(
    a: Functions,
    b: Functions,
    weighted: tuple[Weighted, Weighted],
    hashes: tuple[Array, Array],
    tables: tuple[Tables, Tables],
    given: Given,
) -> Matched:
    """Return which functions of two programs are the same; bags are only read as `weighted`.

    `hashes`: of the code of each function, (F,) u8; `given`: pairs that are known, as by names.
    """
    if not len(a.shape) or not len(b.shape):
        none = np.zeros(0, np.int64)
        return Matched(none, none, none.astype(np.float32), none.astype(np.uint8))
    return _Matcher(a, b, weighted, hashes, tables, given).run()


class _Matcher:
    """Two programs whose functions are compared."""

    def __init__(
        self,
        a: Functions,
        b: Functions,
        weighted: tuple[Weighted, Weighted],
        hashes: tuple[Array, Array],
        tables: tuple[Tables, Tables],
        given: Given,
    ) -> None:
        self.a, self.b, self.hashes, self.given = a, b, hashes, given
        self.weighted = weighted
        self.places = Places(*tables)
        self.free = [np.ones(len(one.shape), bool) for one in (a, b)]
        """Functions that are in no given pair: only these are compared."""
        self.free[0][given.i] = self.free[1][given.j] = False
        self.neighbours = Neighbours(a.calls, b.calls)
        self.inlined = Inlined(weighted, (a, b))
        weights = WEIGHTS | {"code": (CODE, CODE)}
        first, self.later = np.asarray([weights[name] for name in EVIDENCE], np.float32).T
        self.first = first[: len(OWN)]
        self.table = np.zeros((0, len(OWN)), np.float32)
        """The evidence for the pairs that are compared."""

    def run(self) -> Matched:
        pairs = pairs_of(
            len(self.a.shape), len(self.b.shape), (self.given.i, self.given.j), *self.candidates()
        )
        self.table = self.evidence(pairs)
        logit = self.table @ self.first + np.float32(FIRST_BIAS)
        for number in range(ROUNDS):
            probability = self.compete(pairs, logit)
            if number < ROUNDS - 1:
                pairs, probability = self.grow(pairs, probability, number == 0)
            around = self.around(pairs, probability)
            logit = self.look(pairs, around)
        probability = self.compete(pairs, logit)
        chosen = assign(pairs, np.log(np.maximum(probability, 1e-9) / LEAST))
        confidence = self.confidence(pairs, chosen, probability, logit)
        reason = self.reasons(np.concatenate([self.table[chosen], around[chosen]], 1))
        key = self.given.i * pairs.columns + self.given.j
        is_chosen = np.isin(key, pairs.key[chosen])
        reason[np.searchsorted(pairs.key[chosen], key[is_chosen])] = self.given.reason[is_chosen]
        return Matched(pairs.i[chosen], pairs.j[chosen], confidence, reason)

    def confidence(self, pairs: Pairs, chosen: Array, probability: Array, logit: Array) -> Array:
        """Return how sure matches are: (M,) f4, below a half if they could as well be crossed."""
        instead = crossed(pairs, chosen, np.round(self.table @ self.later[: len(OWN)], 2))
        if np.array_equal(instead, chosen):
            return probability[chosen]
        other = probability.copy()
        other[instead], other[chosen] = probability[chosen], probability[instead]
        loss = logit[chosen] - self.look(pairs, self.around(pairs, other))[instead]
        loss = loss_if_crossed((self.a.calls, self.b.calls), pairs, chosen, instead, loss)
        # The factors fit programs that were learned from.
        share = (1 / (1 + 1.01 * np.exp(-2 * loss))).astype(np.float32)
        return np.minimum(probability[chosen], share)

    def around(self, pairs: Pairs, probability: Array) -> Array:
        return np.column_stack(
            [one.support(pairs, probability) for one in (self.neighbours, self.places)]
        )

    def look(self, pairs: Pairs, around: Array) -> Array:
        """Return the logit of pairs by their evidence and that of their neighbours: (n,) f4."""
        linear, layer = net().terms(self.later, self.table, around)
        # The layer takes no function from one with the same code.
        same = self.table[:, -1] > 0
        for function, size in ((pairs.i, pairs.rows), (pairs.j, pairs.columns)):
            most = np.full(size, -np.inf, np.float32)
            np.maximum.at(most, function[~same], layer[~same])
            layer[same] = np.maximum(layer[same], most[function[same]])
        return linear + layer + np.float32(LATER_BIAS)

    def candidates(self) -> list[tuple[Array, Array]]:
        """Return pairs that are similar, of functions that are in no given pair."""
        free = [np.flatnonzero(one) for one in self.free]
        a, b = (side.of for side in self.weighted)
        kinds = (
            (a[kind][free[0]] * np.float32(weight), b[kind][free[1]] * np.float32(weight))
            for kind, weight in SEARCH.items()
        )
        shape = self.a.shape[free[0]], self.b.shape[free[1]]
        pairs = near(kinds, shape)
        pairs.append(
            rare(*(s.of[LABELS][rows] for s, rows in zip(self.weighted, free, strict=True)))
        )
        return [(free[0][i], free[1][j]) for i, j in pairs]

    def evidence(self, pairs: Pairs) -> Array:
        """Return the evidence for pairs: (n, len(OWN)) f4."""
        i, j = pairs.i, pairs.j
        # One table from the start: of large programs it is hundreds of megabytes.
        evidence: Array = np.zeros((len(pairs), len(OWN)), np.float32)
        static(*self.weighted, (self.a.shape, self.b.shape), i, j, evidence[:, : len(STATIC)])
        evidence[:, -2] = self.inlined.cosine(i, j)
        evidence[:, -1] = self.hashes[0][i] == self.hashes[1][j]
        return evidence

    def compete(self, pairs: Pairs, logit: Array) -> Array:
        """Return the probability of pairs; given pairs are sure."""
        if len(self.given.i):
            logit = logit.copy()
            logit[np.searchsorted(pairs.key, self.given.i * pairs.columns + self.given.j)] = SURE
        return compete(pairs, logit)

    def grow(self, pairs: Pairs, probability: Array, first: bool) -> tuple[Pairs, Array]:
        """Return the pairs and the neighbours of strong ones, with probability; take evidence."""
        more = self.more(pairs, probability, first)
        old = np.searchsorted(more.key, pairs.key)
        new = np.ones(len(more), bool)
        new[old] = False
        grown = np.zeros((len(more), self.table.shape[1]), np.float32)
        grown[old] = self.table
        # The old table goes before evidence is taken, which needs as much again.
        self.table = grown
        grown[new] = self.evidence(Pairs(more.rows, more.columns, more.key[new]))
        carried = np.zeros(len(more), np.float32)
        carried[old] = probability
        return more, carried

    def more(self, pairs: Pairs, probability: Array, first: bool) -> Pairs:
        """Return the pairs, those of the neighbours of strong ones, and at first inlined ones."""
        strong = probability > STRONG
        i, j = pairs.i[strong], pairs.j[strong]
        candidates = [(pairs.i, pairs.j)]
        for step in NEXT:
            inside = (i + step >= 0) & (i + step < pairs.rows)
            inside &= (j + step >= 0) & (j + step < pairs.columns)
            candidates.append((i[inside] + step, j[inside] + step))
        candidates.append(_around(self.a.calls, self.b.calls, i, j))
        candidates.append(_around(self.a.calls.T.tocsr(), self.b.calls.T.tocsr(), i, j))
        candidates.append(self.places.candidates(pairs, probability))
        if first:
            left = np.setdiff1d(np.arange(pairs.rows), i), np.setdiff1d(np.arange(pairs.columns), j)
            candidates += self.inlined.candidates(*left)
        free = [self.free[0][i] & self.free[1][j] for i, j in candidates]
        new = [(i[kept], j[kept]) for (i, j), kept in zip(candidates, free, strict=True)]
        return pairs_of(pairs.rows, pairs.columns, (pairs.i, pairs.j), *new)

    def reasons(self, evidence: Array) -> Array:
        """Return the strongest reason of pairs: (n,) u1."""
        parts = dict(zip(EVIDENCE, (evidence * self.later).T, strict=True))
        sums = {why: sum(parts[name] for name in names) for why, names in REASONS.items()}
        # It is not known which of a function's facts are covered, so the likeliest kind is taken.
        facts = np.stack([sums[why] for why in (Reason.STRINGS, Reason.CONSTANTS, Reason.IMPORTS)])
        most = facts.argmax(0)
        for number, why in enumerate((Reason.STRINGS, Reason.CONSTANTS, Reason.IMPORTS)):
            covered = parts["covered"] + parts["covered with callees"]
            sums[why] = sums[why] + np.where((most == number) & (facts[number] > 0), covered, 0)
        table = np.stack(list(sums.values()))
        reasons = np.asarray(list(sums), np.uint8)[table.argmax(0)]
        reasons[table.max(0) <= 0] = Reason.STRUCTURE
        return reasons


def _around(a: Any, b: Any, i: Array, j: Array) -> tuple[Array, Array]:
    """Return the pairs of neighbours (CSR) of pairs that have few."""
    sparse = plugins.require("scipy.sparse")
    few = (np.diff(a.indptr)[i] <= MOST_NEIGHBOURS) & (np.diff(b.indptr)[j] <= MOST_NEIGHBOURS)
    i, j = i[few], j[few]
    shape = (a.shape[0], b.shape[0])
    matched = sparse.csr_array((np.ones(len(i), np.float32), (i, j)), shape=shape)
    both = (a.T.tocsr() @ matched @ b).tocoo()
    return both.row.astype(np.int64), both.col.astype(np.int64)


def crossed(pairs: Pairs, chosen: Array, own: Array) -> Array:
    """Return the pair that each match, `chosen` by number, would be: (M,) i8, itself for none.

    `own`: (n,) f4, what speaks for each pair without its neighbours.
    """
    i, j = pairs.i, pairs.j
    match = np.full(pairs.rows, -1), np.full(pairs.columns, -1)
    match[0][i[chosen]] = match[1][j[chosen]] = number = np.arange(len(chosen))
    one, other = match[0][i], match[1][j]
    pair = np.flatnonzero((one >= 0) & (other >= 0) & (one != other))
    back, there = find(pairs.key, i[chosen[other[pair]]] * pairs.columns + j[chosen[one[pair]]])
    pair, back = pair[there], back[there]
    one, other = one[pair], other[pair]
    loss = own[chosen[one]] + own[chosen[other]] - own[pair] - own[back]
    order = np.lexsort((other, loss, one))
    order = order[loss[order] < NEAR]
    first = order[np.unique(one[order], return_index=True)[1]]
    twin, instead = number.copy(), chosen.copy()
    twin[one[first]], instead[one[first]] = other[first], pair[first]
    return np.where(twin[twin] == number, instead, chosen)


def loss_if_crossed(calls: Any, pairs: Pairs, chosen: Array, instead: Array, loss: Array) -> Array:
    """Return what twins that call each other or lie side by side lose if all of them are crossed.

    (M,) f8, the mean of their `loss`, as neighbours decide about each other; others get infinity.
    """
    sparse = plugins.require("scipy.sparse")
    among = np.flatnonzero(instead != chosen)
    places = pairs.i[chosen[among]], pairs.j[chosen[among]]
    order = np.argsort(places[1])
    twin = order[np.searchsorted(places[1][order], pairs.j[instead[among]])]
    edges = [(np.arange(len(among)), twin)]
    for graph, place in zip(calls, places, strict=True):
        order = np.argsort(place)
        neighbours = np.flatnonzero(np.diff(place[order]) == 1)
        edges += [graph[place][:, place].nonzero(), (order[neighbours], order[neighbours + 1])]
    row, column = (np.concatenate(side) for side in zip(*edges, strict=True))
    table = sparse.csr_array((np.ones(len(row)), (row, column)), shape=(len(among), len(among)))
    number = plugins.require("scipy.sparse.csgraph").connected_components(table, False)[1]
    result = np.full(len(chosen), np.inf)
    result[among] = (np.bincount(number, loss[among]) / np.bincount(number))[number]
    return result


def compete(pairs: Pairs, logit: Array) -> Array:
    """Return the probability of pairs if each function has one partner or none: (n,) f4.

    A pair has the share e^logit of its row, and of its column, where no partner has 1; the
    probability is the geometric mean of both shares.
    """
    odds = np.exp(np.clip(logit, -SURE, SURE).astype(np.float64))
    row = np.bincount(pairs.i, odds, pairs.rows)
    column = np.bincount(pairs.j, odds, pairs.columns)
    shares = (odds / (1 + row[pairs.i])) * (odds / (1 + column[pairs.j]))
    return np.sqrt(shares).astype(np.float32)


def assign(pairs: Pairs, gain: Array) -> Array:
    """Return the numbers of the chosen pairs: i8, ascending.

    The sum of their gains (n,) is the largest; pairs without gain are never chosen. This is the
    method of Jonker and Volgenant for sparse costs (scipy's `min_weight_full_bipartite_matching`);
    each row has one more column of its own, which means no partner.
    """
    kept = np.flatnonzero(gain > 0)
    i, j = pairs.i[kept], pairs.j[kept]
    # Most pairs are the only ones of both their functions.
    alone = (np.bincount(i, minlength=1)[i] == 1) & (np.bincount(j, minlength=1)[j] == 1)
    taken: Array = kept[alone].astype(np.int64)
    kept = kept[~alone]
    if not len(kept):
        return taken
    sparse = plugins.require("scipy.sparse")
    graph = plugins.require("scipy.sparse.csgraph")
    rows, i = np.unique(pairs.i[kept], return_inverse=True)
    columns, j = np.unique(pairs.j[kept], return_inverse=True)
    most = float(gain[kept].max()) + 1
    # Costs must not be 0, and a row's own column costs as much as a pair without gain.
    cost = np.concatenate([most - gain[kept].astype(np.float64), np.full(len(rows), most)])
    at = (
        np.concatenate([i, np.arange(len(rows))]),
        np.concatenate([j, len(columns) + np.arange(len(rows))]),
    )
    table = sparse.csr_matrix((cost, at), shape=(len(rows), len(columns) + len(rows)))
    row, column = graph.min_weight_full_bipartite_matching(table)
    paired = column < len(columns)
    chosen = rows[row[paired]] * pairs.columns + columns[column[paired]]
    return np.sort(np.concatenate([taken, np.searchsorted(pairs.key, chosen)]))
