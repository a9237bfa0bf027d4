"""Evidence for a pair of functions that does not depend on other matches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.features.bags import matrices, normalized, row_sums, tf_idf
from tokmill.x86.features.cosines import row_products
from tokmill.x86.features.functions import BAGS, SHAPE, Functions
from tokmill.x86.features.tables import Tables

FACTS = ("constants", "strings", "imports")
"""Kinds of features that optimisation does not change."""
AROUND = ("callees", "callers")
"""Facts of the callees, and of the callers."""
LABELS = "labels"
"""Strings that describe the pointers to a function."""
STATIC = (
    *BAGS, *AROUND,
    *(f"{kind} mass" for kind in (*FACTS, *AROUND)),
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
        """Keep a matrix with rows of length 1."""
        self.total[kind] = np.sqrt(row_sums(matrix.data**2, matrix.indptr))
        self.of[kind] = normalized(matrix)


def weigh(a: Functions, b: Functions, tables: tuple[Tables, Tables]) -> tuple[Weighted, Weighted]:
    """Return the features of two programs as TF-IDF over both."""
    sides = Weighted({}, {}), Weighted({}, {})
    raw = {kind: tf_idf(matrices([a.bags[kind], b.bags[kind]])) for kind in BAGS}
    raw[LABELS] = tf_idf(matrices([one.labels for one in tables]))
    stack = plugins.require("scipy.sparse").hstack
    for number, (side, functions) in enumerate(zip(sides, (a, b), strict=True)):
        for kind, both in raw.items():
            side.put(kind, both[number])
        facts = stack([raw[kind][number] for kind in FACTS], format="csr")
        called = (functions.calls @ facts).tocsr()
        side.put("callees", called)
        side.put("callers", (functions.calls.T.tocsr() @ facts).tocsr())
        side.of["own there"], side.of["all there"] = _ones(facts), _ones((facts + called).tocsr())
        squares = facts.copy()
        squares.data = facts.data**2
        side.of["squares"], side.total["squares"] = squares, row_sums(squares.data, facts.indptr)
    return sides


def static(a: Weighted, b: Weighted, shapes: tuple[Array, Array], i: Array, j: Array) -> Array:
    """Return the evidence for pairs (i ascending): (n, len(STATIC)) f4.

    It has cosines by kind, the logarithm of all that is shared, how much one has of kinds in which
    the two share nothing, the covered share, and the distance of the counts of `SHAPE`.
    """
    columns, masses, alone = [], [], []
    for kind in (*BAGS, *AROUND):
        cosine = row_products(a.of[kind], b.of[kind], i, j)
        columns.append(cosine)
        if kind in FACTS or kind in AROUND:
            one, other = a.total[kind][i], b.total[kind][j]
            masses.append(np.log1p(cosine * one * other) / 4)
            if kind in FACTS:
                alone.append(np.log1p(np.where(cosine == 0, np.maximum(one, other), 0)) / 2)
    apart = np.abs(shapes[0][i] - shapes[1][j])
    inside = _covered(a, b, i, j)
    labels = row_products(a.of[LABELS], b.of[LABELS], i, j)
    found: Array = np.column_stack([*columns, *masses, *alone, *inside, apart, labels])
    return found.astype(np.float32, copy=False)


def _covered(a: Weighted, b: Weighted, i: Array, j: Array) -> list[Array]:
    """Return the share of the facts of each that the other has: by itself, and with its callees.

    It is the geometric mean of both shares. If a function was inlined, its caller has its facts.
    """
    found = []
    for there in ("own there", "all there"):
        shares = []
        for part, whole in (
            (row_products(a.of["squares"], b.of[there], i, j), a.total["squares"][i]),
            (row_products(a.of[there], b.of["squares"], i, j), b.total["squares"][j]),
        ):
            share = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
            shares.append(np.maximum(share, 0))
        found.append(np.sqrt(shares[0] * shares[1]))
    return found


def _ones(matrix: Any) -> Any:
    """Return a CSR matrix with 1 for each entry."""
    made = matrix.copy()
    made.data = np.ones_like(matrix.data)
    return made
