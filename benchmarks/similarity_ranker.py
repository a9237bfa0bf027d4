"""Learn the weights of the baseline `ranker` from the training projects, by pairs of functions.

A query is a function at one level and compiler, its positive the same at another, its negatives are
others that were made as the positive was. The loss is the cross entropy of the positive among them,
over the weighed sum of the cosines, whose weights are not negative.

    python benchmarks/similarity_ranker.py STORE GRAPHS [-o ranker_weights.py]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from tokmill.store.store import Store
from tokmill.x86.features.baselines import parts_of
from tokmill.x86.features.store_functions import store_functions

Array = np.ndarray[Any, np.dtype[Any]]
NEGATIVES = 500
MOST_QUERIES = 2000
"""Of each pair of ways."""
WAYS = (
    (("gcc", "O0"), ("gcc", "O3")), (("gcc", "O2"), ("gcc", "O3")), (("gcc", "O0"), ("gcc", "Os")),
    (("clang", "O0"), ("clang", "O3")), (("gcc", "O3"), ("clang", "O3")),
    (("clang", "O2"), ("gcc", "O0")),
)  # fmt: skip
COLUMNS = ("project", "program", "function", "compiler", "level")
HEAD = '"""Weights of the ranker of functions, learned by `benchmarks/similarity_ranker.py`."""'
LEAST = 5
"""Blocks of a function that is learned from."""


def pairs(store: Store, blocks: Array) -> list[tuple[Array, Array]]:
    """Return (query, positive) records of each pair of ways, without names that stand twice."""
    project, program, function, compiler, level = (
        np.array(
            [text for _, _, batch in store.batches() for text in batch.columns[name].decoded()]
        )
        for name in COLUMNS
    )
    key = np.array([" ".join(one) for one in zip(project, program, function, strict=True)])
    whole = (store.column("part") == 0) & (blocks >= LEAST)

    def side(way: tuple[str, str]) -> tuple[Array, Array]:
        rows = np.flatnonzero(whole & (compiler == way[0]) & (level == way[1]))
        names, first, count = np.unique(key[rows], return_index=True, return_counts=True)
        return rows[first[count == 1]], names[count == 1]

    found = []
    for one, other in WAYS:
        (rows_a, names_a), (rows_b, names_b) = side(one), side(other)
        _, a, b = np.intersect1d(names_a, names_b, return_indices=True)
        found.append((rows_a[a], rows_b[b]))
    return found


def cosines(
    parts: dict[str, Any],
    sides: list[tuple[Array, Array]],
    queries: int = MOST_QUERIES,
    negatives: int = NEGATIVES,
) -> Array:
    """Return the products of queries with their positive (first) and negatives by each part.

    (queries, 1 + negatives, parts), f4.
    """
    rng = np.random.default_rng(0)
    found = []
    for query, positive in sides:
        order = rng.permutation(len(query))[:queries]
        if len(query) < 2:
            continue
        drawn = rng.integers(1, len(query), (len(order), negatives))
        chosen = np.concatenate([order[:, None], (order[:, None] + drawn) % len(query)], axis=1)
        made = np.empty((*chosen.shape, len(parts)), np.float32)
        for place, matrix in enumerate(parts.values()):
            for first in range(0, len(order), 256):
                rows = slice(first, first + 256)
                products = matrix[query[order[rows]]] @ matrix[positive].T
                full = products.toarray() if hasattr(products, "toarray") else products
                made[rows, :, place] = np.take_along_axis(full, chosen[rows], axis=1)
        found.append(made)
    return np.concatenate(found)


def fit(values: Array) -> Array:
    """Return the weights, (parts,) f8, with the least cross entropy."""

    def loss(theta: Array) -> tuple[float, Array]:
        weights = np.exp(theta)
        scores = values @ weights.astype(np.float32)
        scores -= scores.max(1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(1, keepdims=True)
        mean = np.einsum("qn,qnp->p", shares, values, optimize=True) - values[:, 0].sum(0)
        value = -np.log(np.maximum(shares[:, 0], 1e-30)).sum() / len(values)
        # A little weight decay keeps parts that say nothing finite.
        return float(value + 1e-3 * (theta**2).sum()), (
            mean * weights / len(values) + 2e-3 * theta
        ).astype(np.float64)

    start = np.full(values.shape[2], np.log(5.0))
    found: Array = np.exp(minimize(loss, start, jac=True, method="L-BFGS-B").x)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    chosen = parser.parse_args(arguments)
    store = Store(chosen.store)
    functions = store_functions(store, [chosen.graphs])
    parts = parts_of(functions)
    blocks = np.expm1(functions.shape[functions.record, 0])
    values = cosines(parts, pairs(store, np.rint(blocks)))
    weights = fit(values)
    lines = [f'    "{name}": {w:.3g},' for name, w in zip(parts, weights, strict=True)]
    text = "\n".join([
        HEAD, "", f"# {len(values):,} pairs of {chosen.store.name}, {store.fingerprint[:16]}.",
        "WEIGHTS = {", *lines, "}",
        '"""Part of `tokmill.x86.features.baselines.parts_of` → its weight."""', "",
    ])  # fmt: skip
    print(text, end="")
    if chosen.out:
        chosen.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
