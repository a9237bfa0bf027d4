"""Untrained vectors of functions: what a trained model has to beat.

Each is a function of the features of a store's functions that returns one row a record (a line in
`plugins.BASELINES`). The similarity of two records is the product of their rows. Rows have length 1
or, where a function has nothing of the kind, 0; those of sums (`tokmill.x86.features.sums`) are
several such rows side by side, so that a product is a sum of cosines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import UsageError, nearest
from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.x86.features.store_functions import CODES, StoreFunctions, store_functions

WIDTH = 64
"""Numbers of a random vector."""
FACTS = ("constants", "strings", "imports")
CALLEES = 0.3
"""Weight of what callees have, beside what a function has itself."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def baselines(
    store: Store,
    graphs: Sequence[Path | str],
    names: Sequence[str],
    layout: str | None = None,
    functions: StoreFunctions | None = None,
) -> dict[str, Any]:
    """Return the rows of the records of a store by each of some baselines.

    Args:
        store: a store of functions of `tokmill build x86`, or selected from such.
        graphs: graph files, or folders of them, that the store was built of.
        names: of `plugins.BASELINES`.
        layout: as of `tokmill build x86`; None: the one in the store's plan.
        functions: the features of the store's functions, where they are there already.

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
    found = store_functions(store, graphs, layout) if functions is None else functions
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
    return functions.rows(_facts(functions, own=0.0))


def facts(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of constants, strings and imports, and a third of what callees have."""
    return functions.rows(_facts(functions))


def _facts(functions: StoreFunctions, own: float = 1.0) -> Any:
    sparse = plugins.require("scipy.sparse")
    found = sparse.hstack([functions.weighed(kind) for kind in FACTS], format="csr") * own
    around = sparse.hstack([functions.around(kind) for kind in FACTS], format="csr")
    found = found + around * CALLEES
    found.eliminate_zeros()
    return found
