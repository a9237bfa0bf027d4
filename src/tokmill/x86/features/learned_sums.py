"""Sums of cosines with vectors that a model learned: of a function, and of those around it.

A model gives a function a vector of its code. What it calls, and what calls it, have vectors too,
and a compiler that inlines moves code from one to another: so these count, by weights that were
learned from pairs of training projects (`learned_weights.py`). Products of rows are the sums.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.features import learned_weights
from tokmill.x86.features.baselines import code_parts, parts_of, side_by_side
from tokmill.x86.features.store_functions import StoreFunctions

COMMON = 0.5
"""How much of their mean is subtracted from vectors: otherwise a few are near to all others."""


class SumRows(NamedTuple):
    """Rows of a sum: a product of two is that of the sparse parts and that of the dense ones."""

    sparse: Any
    """CSR (R, …), f4."""
    dense: Array
    """(R, …) f4."""


def sum_of(kind: str, functions: StoreFunctions, vectors: Array) -> SumRows:
    """Return the sum of vectors (R, d) and of counts.

    `kind`: of `code`, without constants, strings and names; or of `facts`, the parts of the ranker.
    """
    parts = code_parts(functions) if kind == "code" else parts_of(functions)
    weights = getattr(learned_weights, f"WITH_{kind.upper()}")
    learned = vector_parts(functions, vectors)
    scaled = [rows * np.float32(weights[part] ** 0.5) for part, rows in learned.items()]
    rest = {part: weight for part, weight in weights.items() if part in parts}
    return SumRows(side_by_side(parts, rest), np.concatenate(scaled, axis=1, dtype=np.float32))


def vector_parts(functions: StoreFunctions, vectors: Array) -> dict[str, Array]:
    """Return the rows of vectors of functions and of those near them, by name: (R, d) f4 each.

    `vectors` itself; `callees`: the sum of these; `callers`: a weighted sum; `inlined`: with the
    vectors of callees, and of theirs, by how much of them is likely to be inlined.
    Rows have length 1, or 0 where there is nothing.
    """
    calls, own = functions.calls, own_vectors(functions, vectors)
    callee, caller, calling = (
        call_weights(functions, weights)[:, None]
        for weights in (learned_weights.CALLEE, learned_weights.CALLER, learned_weights.CALLING)
    )
    inlined = caller * (calls @ (callee * own))
    parts = {
        "vectors": own,
        "vectors of callees": calls @ own,
        "vectors of callers": calls.T.tocsr() @ (calling * own),
        "vectors, inlined": own + inlined + caller * (calls @ (callee * inlined)),
    }
    return {name: _centred(rows)[functions.record] for name, rows in parts.items()}


def call_weights(functions: StoreFunctions, weights: Sequence[float]) -> Array:
    """Return what each function counts as a callee or caller, (F,) f4."""
    logs = functions.shape @ np.asarray(weights[:-1], np.float32) + weights[-1]
    return np.exp(np.clip(logs, *learned_weights.LOG_WEIGHTS))


def own_vectors(functions: StoreFunctions, vectors: Array) -> Array:
    """Return the mean vector of the records of each function, (F, d) f4, of length 1 or 0."""
    sparse = plugins.require("scipy.sparse")
    record, count = functions.record, len(functions.record)
    ones, shape = np.ones(count, np.float32), (functions.calls.shape[0], count)
    joined = sparse.csr_array((ones, (record, np.arange(count))), shape=shape)
    return _centred(joined @ _units(np.asarray(vectors, np.float32)))


def _centred(rows: Array) -> Array:
    """Return unit rows, less `COMMON` of their mean, of length 1 again; zeros stay zeros."""
    units = _units(rows)
    there = units.any(axis=1)
    units[there] -= COMMON * units.sum(axis=0) / max(1, there.sum())
    return _units(units)


def _units(rows: Array) -> Array:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
