"""Sums of cosines of functions: untrained, or with weights that were learned from pairs.

A sum is a baseline as of `tokmill.x86.features.baselines`: its rows are those of its parts side by
side, so that a product of two rows is the weighed sum of the cosines of the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.features.baselines import (
    CALLEES,
    FACTS,
    callees,
    facts,
    form_pairs,
    opcodes,
    templates,
)
from tokmill.x86.features.store_functions import CODES, StoreFunctions


def side_by_side(parts: Mapping[str, Any], weights: Mapping[str, float]) -> Any:
    """Return rows whose products are the weighed sums of the products of parts (CSR or dense)."""
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


def sum_of_cosines(functions: StoreFunctions) -> Any:
    """Return the six parts of the untrained sum side by side, all of the same weight.

    Which parts there are was chosen on training and validation projects.
    """
    parts = {
        "templates": templates(functions),
        "shape": shape_rows(functions),
        "facts": facts(functions),
        **neighbours(functions),
    }
    return side_by_side(parts, dict.fromkeys(parts, 1.0))


def ranker_code(functions: StoreFunctions) -> dict[str, Any]:
    return {
        "templates": templates(functions),
        "forms": functions.rows(functions.weighed("forms")),
        "form pairs": form_pairs(functions),
        "shape": shape_rows(functions),
    }


def parts_of(functions: StoreFunctions) -> dict[str, Any]:
    """Return the twelve parts of the ranker, by name."""
    return {
        **ranker_code(functions),
        **{kind: functions.rows(functions.weighed(kind)) for kind in FACTS},
        "facts": facts(functions),
        "callees": callees(functions),
        **neighbours(functions),
    }


def ranker(functions: StoreFunctions) -> Any:
    """Return the twelve parts of the ranker side by side, by weights learned from pairs."""
    weights = plugins.require("tokmill.x86.features.ranker_weights").WEIGHTS
    return side_by_side(parts_of(functions), weights)


def code_sum(functions: StoreFunctions) -> Any:
    """Return the code alone: the sum of cosines of templates, pairs of forms, opcodes and shape."""
    parts = _code(functions)
    return side_by_side(parts, dict.fromkeys(parts, 1.0))


def code_around(functions: StoreFunctions) -> Any:
    """Return the code alone, and that of callees and callers: `code_sum` and their templates."""
    parts = {**_code(functions), **neighbours(functions, (CODES,))}
    return side_by_side(parts, dict.fromkeys(parts, 1.0))


def _code(functions: StoreFunctions) -> dict[str, Any]:
    return {
        "templates": templates(functions),
        "form pairs": form_pairs(functions),
        "opcodes": opcodes(functions),
        "shape": shape_rows(functions),
    }
