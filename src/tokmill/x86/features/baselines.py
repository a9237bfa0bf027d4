"""Untrained vectors of functions: what a trained model has to beat.

Each is a function of the features of a store's functions that returns one row a record (a line in
`plugins.BASELINES`). The similarity of two records is the product of their rows. Rows have length 1
or, where a function has nothing of the kind, 0; those of sums are several such rows side by side,
so that a product is a sum of cosines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.errors import UsageError, nearest
from tokmill.store.hashes import mix
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.x86.features.store_functions import CODES, StoreFunctions, store_functions

WIDTH = 64
"""Numbers of a random vector."""
HASHES = 128
"""Hash functions of MinHash."""
FACTS = ("constants", "strings", "imports")
CALLEES = 0.3
"""Weight of what callees have, beside what a function has itself."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def baselines(
    store: Store,
    graphs: Sequence[Path | str],
    names: Sequence[str],
    layout: str | None = None,
) -> dict[str, Any]:
    """Return the rows of the records of a store by each of some baselines.

    Args:
        store: a store of functions of `tokmill build x86`, or selected from such.
        graphs: graph files, or folders of them, that the store was built of.
        names: of `plugins.BASELINES`.
        layout: as of `tokmill build x86`; None: the one in the store's plan.

    Returns:
        Name → CSR or dense matrix, f4, a row a record, in the order of the records.

    Raises:
        UsageError: a baseline is not known.
        TokmillError: the store and the graphs do not belong together (`store_functions`).
    """
    for name in names:
        if name not in plugins.BASELINES:
            raise UsageError(
                f"no baseline is called {name!r}", hint=nearest(name, plugins.BASELINES)
            )
    found = store_functions(store, graphs, layout)
    return {name: plugins.load(plugins.BASELINES, name)(found) for name in names}


def random_vectors(functions: StoreFunctions) -> Array:
    """Return a vector a record that knows nothing of it, by its number: (R, 64) f4."""
    number = np.arange(len(functions), dtype=np.uint64)[:, None]
    hashed = mix(mix(number) + np.arange(WIDTH, dtype=np.uint64)[None] * _GOLDEN)
    # Uniform in a cube, not on a sphere: near enough in 64 dimensions.
    values = (hashed >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1
    found: Array = values / np.linalg.norm(values, axis=1, keepdims=True)
    return found.astype(np.float32)


def opcodes(functions: StoreFunctions) -> Any:
    """Return the histogram of mnemonics."""
    return functions.rows(functions.counts("mnemonics"))


def minhash(functions: StoreFunctions) -> Any:
    """Return 128 minima of hashes of the set of templates (Broder 1997), one entry each.

    A template is an instruction without its numbers. The product of two rows is the share of minima
    that are equal, an estimate of the Jaccard similarity.
    """
    sparse = plugins.require("scipy.sparse")
    bag = functions.bags[CODES]
    rows = bag.rows
    begins = np.searchsorted(bag.row, np.arange(rows))
    full = np.flatnonzero(np.diff(np.append(begins, len(bag.row))))
    minima = np.zeros((len(full), HASHES), np.uint64)
    salts = mix(np.arange(HASHES, dtype=np.uint64))
    for number in range(HASHES):
        hashed = mix(bag.key ^ salts[number])
        if len(full):
            minima[:, number] = np.minimum.reduceat(hashed, begins[full])
    # Equal minima of two hash functions are no agreement.
    minima = mix(minima + np.arange(HASHES, dtype=np.uint64))
    keys, column = np.unique(minima, return_inverse=True)
    starts = np.zeros(rows + 1, np.int64)
    starts[full + 1] = HASHES
    shape = (rows, max(len(keys), 1))
    data = np.ones(minima.size, np.float32)
    matrix = sparse.csr_array((data, column.reshape(-1), np.cumsum(starts)), shape=shape)
    return functions.rows(matrix)


def templates(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of instructions without their numbers."""
    return functions.rows(functions.weighed(CODES))


def form_pairs(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of pairs of instructions without registers and numbers."""
    return functions.rows(functions.weighed("form pairs"))


def constants(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of constants."""
    return functions.rows(functions.weighed("constants"))


def strings(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of strings."""
    return functions.rows(functions.weighed("strings"))


def imports(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of called imports."""
    return functions.rows(functions.weighed("imports"))


def callees(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of constants, strings and imports of the functions that are called."""
    return functions.rows(_facts(functions, FACTS, own=0.0))


def facts(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of constants, strings and imports, and a third of what callees have."""
    return functions.rows(_facts(functions, FACTS))


def facts_without_constants(functions: StoreFunctions) -> Any:
    """Return `facts` without constants."""
    return functions.rows(_facts(functions, ("strings", "imports")))


def facts_without_strings(functions: StoreFunctions) -> Any:
    """Return `facts` without strings."""
    return functions.rows(_facts(functions, ("constants", "imports")))


def facts_without_imports(functions: StoreFunctions) -> Any:
    """Return `facts` without imports."""
    return functions.rows(_facts(functions, ("constants", "strings")))


def facts_without_callees(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of a function's own constants, strings and imports."""
    return functions.rows(_facts(functions, FACTS, callees=0.0))


def _facts(
    functions: StoreFunctions, kinds: Sequence[str], own: float = 1.0, callees: float = CALLEES
) -> Any:
    sparse = plugins.require("scipy.sparse")
    found = sparse.hstack([functions.weighed(kind) for kind in kinds], format="csr") * own
    if callees:
        around = sparse.hstack([functions.around(kind) for kind in kinds], format="csr")
        found = found + around * callees
    found.eliminate_zeros()
    return found


def side_by_side(parts: Mapping[str, Any], weights: Mapping[str, float]) -> Any:
    """Return rows whose products are the weighed sums of the products of parts (CSR or dense)."""
    sparse = plugins.require("scipy.sparse")
    scaled = [
        sparse.csr_array(parts[name]) * np.float32(weight**0.5)
        for name, weight in weights.items()
        if weight > 0
    ]
    return sparse.hstack(scaled, format="csr", dtype=np.float32)


def parts_of(functions: StoreFunctions) -> dict[str, Any]:
    """Return the parts of the sum and of the ranker, by name."""
    return {
        "opcodes": opcodes(functions),
        "templates": templates(functions),
        "forms": functions.rows(functions.weighed("forms")),
        "form pairs": form_pairs(functions),
        **{kind: functions.rows(functions.weighed(kind)) for kind in FACTS},
        **{f"{kind} of callees": functions.rows(functions.around(kind)) for kind in FACTS},
        "callers": functions.rows(_callers(functions)),
        "shape": shape_rows(functions),
    }


def _callers(functions: StoreFunctions) -> Any:
    sparse = plugins.require("scipy.sparse")
    return sparse.hstack([functions.around(kind, callers=True) for kind in FACTS], format="csr")


def shape_rows(functions: StoreFunctions) -> Array:
    """Return counts of blocks, loops and calls so that products fall with their distance.

    Of each ln(1 + count) x the cosine and the sine of x and 2x stand there, so the product of two
    rows is the mean of cos(x - y) and cos(2x - 2y): (R, 28) f4.
    """
    values = functions.shape[functions.record] * np.float32(np.pi / 8)
    turned = np.concatenate([values, 2 * values], axis=1)
    both = np.concatenate([np.cos(turned), np.sin(turned)], axis=1)
    found: Array = (both / np.sqrt(turned.shape[1])).astype(np.float32)
    return found


SUMMED = ("form pairs", "templates", *FACTS, "callees")


def sum_of_cosines(functions: StoreFunctions) -> Any:
    """Return the six parts of the untrained sum side by side, all of the same weight."""
    parts = {
        "form pairs": form_pairs(functions),
        "templates": templates(functions),
        **{kind: functions.rows(functions.weighed(kind)) for kind in FACTS},
        "callees": callees(functions),
    }
    return side_by_side(parts, dict.fromkeys(SUMMED, 1.0))


def ranker(functions: StoreFunctions) -> Any:
    """Return the twelve parts of the ranker side by side, by weights learned from pairs."""
    weights = plugins.require("tokmill.x86.features.ranker_weights").WEIGHTS
    return side_by_side(parts_of(functions), weights)


def code_sum(functions: StoreFunctions) -> Any:
    """Return the code alone: the sum of cosines of templates, pairs of forms, opcodes and shape."""
    parts = {
        "templates": templates(functions),
        "form pairs": form_pairs(functions),
        "opcodes": opcodes(functions),
        "shape": shape_rows(functions),
    }
    return side_by_side(parts, dict.fromkeys(parts, 1.0))
