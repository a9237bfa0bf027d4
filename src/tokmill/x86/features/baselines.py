"""Vectors of functions that no model made: what a trained model has to beat.

Each is a function of the features of a store's functions that returns a row for each record (a
line in `plugins.BASELINES`). The similarity of two records is the product of their rows. Rows have
length 1 or, where a function has nothing of the kind, 0. Those of sums are the rows of several
parts, side by side, so that a product is a weighted sum of cosines.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import check_name
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.x86.features.function_features import SHAPE
from tokmill.x86.features.store_functions import CODES, StoreFunctions, store_functions

FACTS = ("constants", "strings", "imports")
CALLEES = 0.3
"""Weight of what callees have, relative to what a function has itself."""
NO_LOOPS = [place for place, name in enumerate(SHAPE) if name != "loops"]
"""The weights of the sums were chosen where jumps to rare code counted as loops."""


def baselines(
    store: Store,
    graphs: Sequence[Path | str],
    names: Sequence[str],
    functions: StoreFunctions | None = None,
) -> dict[str, Any]:
    """Return the rows of the records of a store by each of some baselines.

    Args:
        store: a store of functions of `tokmill build x86`, or selected from such.
        graphs: graph files, or folders of them, that the store was built of.
        names: of `plugins.BASELINES`.
        functions: the features of the store's functions, where they are there already.

    Returns:
        Name → CSR or dense matrix, f4, a row a record, in the order of the records.

    Raises:
        UsageError: a baseline is not known.
        TokmillError: the store and the graphs do not belong together (`store_functions`).
    """
    for name in names:
        check_name("no baseline is", name, plugins.BASELINES)
    features = store_functions(store, graphs) if functions is None else functions
    return {name: plugins.load(plugins.BASELINES, name)(features) for name in names}


def opcodes(functions: StoreFunctions) -> Any:
    return functions.rows(functions.counts("mnemonics"))


def facts(functions: StoreFunctions) -> Any:
    """Return the TF-IDF of constants, strings and imports, and 0.3 of those of callees."""
    return functions.rows(_facts(functions))


def code_around(functions: StoreFunctions) -> Any:
    """Return the sum of cosines of code alone, and of the templates of callees and callers."""
    parts = {
        "templates": functions.rows(functions.weighed(CODES)),
        "form pairs": functions.rows(functions.weighed("form pairs")),
        "opcodes": opcodes(functions),
        "shape": shape_rows(functions),
        **neighbours(functions, (CODES,)),
    }
    return side_by_side(parts, dict.fromkeys(parts, 1.0))


def ranker(functions: StoreFunctions) -> Any:
    """Return the twelve parts of the ranker side by side, by weights learned from pairs."""
    weights = plugins.require("tokmill.x86.features.ranker_weights").WEIGHTS
    return side_by_side(parts_of(functions), weights)


def parts_of(functions: StoreFunctions) -> dict[str, Any]:
    return {
        **ranker_code(functions),
        **{kind: functions.rows(functions.weighed(kind)) for kind in FACTS},
        "facts": facts(functions),
        "callees": functions.rows(_facts(functions, own=0.0)),
        **neighbours(functions),
    }


def ranker_code(functions: StoreFunctions) -> dict[str, Any]:
    """Return the parts of the ranker that know code alone, by name."""
    return {
        "templates": functions.rows(functions.weighed(CODES)),
        "forms": functions.rows(functions.weighed("forms")),
        "form pairs": functions.rows(functions.weighed("form pairs")),
        "shape": shape_rows(functions),
    }


def code_parts(functions: StoreFunctions) -> dict[str, Any]:
    """Return the parts of sums with vectors that know code alone, by name."""
    shape = shape_rows(functions, NO_LOOPS)
    return {**ranker_code(functions), "shape": shape, "opcodes": opcodes(functions)}


def side_by_side(parts: Mapping[str, Any], weights: Mapping[str, float]) -> Any:
    """Return rows whose products are the weighted sums of the products of parts (CSR or dense)."""
    sparse = plugins.require("scipy.sparse")
    scaled = [
        sparse.csr_array(parts[name]) * np.float32(weight**0.5)
        for name, weight in weights.items()
        if weight > 0
    ]
    return sparse.hstack(scaled, format="csr", dtype=np.float32)


def neighbours(functions: StoreFunctions, kinds: Sequence[str] = FACTS) -> dict[str, Any]:
    """Return the rows of facts, or other kinds, of a function and of those near it in calls.

    `deep`: with 0.3 of what callees have and 0.09 of what their callees have; `around`: with 0.3 of
    what callees and callers have; `callers`: of callers alone. All are TF-IDF.
    """
    sparse = plugins.require("scipy.sparse")
    own = sparse.hstack([functions.weighed(kind) for kind in kinds], format="csr")
    called = functions.calls @ own
    calling = functions.calls.T.tocsr() @ own
    further = functions.calls @ called
    return {
        "deep": functions.rows(own + called * CALLEES + further * CALLEES**2),
        "around": functions.rows(own + (called + calling) * CALLEES),
        "callers": functions.rows(calling),
    }


def shape_rows(functions: StoreFunctions, columns: Any = slice(None)) -> Array:
    """Return counts of blocks, loops and calls so that products fall with their distance.

    Of each ln(1 + count) x the cosine and the sine of x and 2x stand there, so the product of two
    rows is the mean of cos(x - y) and cos(2x - 2y): (R, 4 · columns) f4.
    """
    values = functions.shape[functions.record][:, columns] * np.float32(np.pi / 8)
    turned = np.concatenate([values, 2 * values], axis=1)
    both = np.concatenate([np.cos(turned), np.sin(turned)], axis=1)
    return (both / np.sqrt(turned.shape[1])).astype(np.float32)


def _facts(functions: StoreFunctions, own: float = 1.0) -> Any:
    sparse = plugins.require("scipy.sparse")
    rows = sparse.hstack([functions.weighed(kind) for kind in FACTS], format="csr") * own
    called = sparse.hstack([functions.around(kind) for kind in FACTS], format="csr")
    rows = rows + called * CALLEES
    rows.eliminate_zeros()
    return rows
