"""Sums of learned vectors with code and facts: what stands around a function counts too."""

import numpy as np
import pytest

from making import quick_build
from tokmill.store.store import Store
from tokmill.x86.features import learned_weights
from tokmill.x86.features.baselines import code_parts, parts_of
from tokmill.x86.features.function_features import SHAPE
from tokmill.x86.features.learned_sums import COMMON, sum_of, vector_parts
from tokmill.x86.features.store_functions import StoreFunctions, store_functions
from tokmill.x86.graphs.lifting import lift_files
from x86_programs import C_SOURCE, compiles

D = 6


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> StoreFunctions:
    """The features of a store of one program, with long functions cut into parts."""
    folder = tmp_path_factory.mktemp("sums")
    program = compiles(folder, "tool", C_SOURCE, "-O1", "-g")
    (folder / "in").mkdir()
    program.rename(folder / "in/tool")
    lift_files([str(folder / "in")], folder / "graphs")
    store = quick_build("x86", folder / "graphs", folder / "s")
    return store_functions(Store(store.path), [folder / "graphs"])


def test_rows_are_of_a_function_and_of_those_around_it(functions: StoreFunctions) -> None:
    # Two records more of the first function, as if it had been cut.
    functions = StoreFunctions(
        np.append(functions.record, functions.record[[0, 0]]),
        functions.bags, functions.shape, functions.calls,
    )  # fmt: skip
    vectors = np.random.default_rng(0).normal(size=(len(functions), D)).astype(np.float32)
    vectors[2] = 0
    parts = vector_parts(functions, vectors)

    def unit(row: np.ndarray) -> np.ndarray:
        length = np.sqrt(row @ row)
        return row / length if length else row

    units = [unit(row) for row in vectors.astype(np.float64)]
    size = functions.calls.shape[0]

    def apart(rows: list[np.ndarray]) -> list[np.ndarray]:
        some = [unit(row) for row in rows]
        there = [row for row in some if row.any()]
        common = COMMON * sum(there, np.zeros(D)) / max(1, len(there))
        return [unit(row - common) if row.any() else row for row in some]

    own = apart(
        [
            sum((u for u, f in zip(units, functions.record, strict=True) if f == one), np.zeros(D))
            for one in range(size)
        ]
    )
    calls = functions.calls.toarray() > 0
    assert calls.any()

    def summed(
        rows: list[np.ndarray], there: np.ndarray, counts: np.ndarray | None = None
    ) -> list[np.ndarray]:
        times = np.ones(size) if counts is None else counts
        return [
            sum((times[j] * rows[j] for j in np.flatnonzero(line)), np.zeros(D)) for line in there
        ]

    def counts(weights: tuple[float, ...]) -> np.ndarray:
        return np.array(
            [
                np.exp(sum(w * x for w, x in zip(weights, shape, strict=False)) + weights[-1])
                for shape in functions.shape.astype(np.float64)
            ]
        )

    callee, caller = counts(learned_weights.CALLEE), counts(learned_weights.CALLER)
    each = range(size)
    inlined = [caller[i] * row for i, row in enumerate(summed(own, calls, callee))]
    further = [caller[i] * row for i, row in enumerate(summed(inlined, calls, callee))]
    wanted = {
        "vectors": own,
        "vectors of callees": summed(own, calls),
        "vectors of callers": summed(own, calls.T, counts(learned_weights.CALLING)),
        "vectors, inlined": [own[i] + inlined[i] + further[i] for i in each],
    }
    assert list(parts) == list(wanted)
    for name, rows in wanted.items():
        slow = np.array(apart(rows))[functions.record]
        assert np.allclose(parts[name], slow, atol=1e-5), name
    assert not parts["vectors"][2].any() or (functions.record == functions.record[2]).sum() > 1


@pytest.mark.parametrize("kind", ["code", "facts"])
def test_a_product_is_the_weighed_sum_of_all_parts(functions: StoreFunctions, kind: str) -> None:
    vectors = np.random.default_rng(1).normal(size=(len(functions), D)).astype(np.float32)
    others, weights = {
        "code": (code_parts, learned_weights.WITH_CODE),
        "facts": (parts_of, learned_weights.WITH_FACTS),
    }[kind]
    rows = sum_of(kind, functions, vectors)
    parts = {**others(functions), **vector_parts(functions, vectors)}
    assert set(parts) == set(weights) and all(weight >= 0 for weight in weights.values())
    dense = {n: p.toarray() if hasattr(p, "toarray") else p for n, p in parts.items()}
    wanted = sum(weight * dense[name] @ dense[name].T for name, weight in weights.items())
    found = (rows.sparse @ rows.sparse.T).toarray() + rows.dense @ rows.dense.T
    assert np.allclose(found, wanted, atol=1e-2, rtol=1e-3)
    assert weights["vectors"] > 0.1


def test_a_small_function_with_one_caller_counts_as_inlined() -> None:
    blocks, edges, loops, calls, callees, callers = 3, 4, 0, 0, 0, 1
    small = np.log1p([blocks, 15, edges, loops, calls, callees, callers])
    shared = np.log1p([blocks, 15, edges, loops, calls, callees, 40])
    *weights, added = learned_weights.CALLEE
    one, many = (float(np.exp(shape @ weights + added)) for shape in (small, shared))
    assert one > 2 * many


def test_functions_that_are_near_to_all_are_less_so(functions: StoreFunctions) -> None:
    vectors = np.random.default_rng(2).normal(size=(len(functions), D)).astype(np.float32)
    vectors[:, 0] += 4
    before = [row / np.sqrt(row @ row) for row in vectors]
    near = np.stack(before) @ np.stack(before).T
    own = vector_parts(functions, vectors)["vectors"]
    assert (own @ own.T).mean() < near.mean() - 0.2


def test_the_shape_of_code_has_no_loops(functions: StoreFunctions) -> None:
    more = StoreFunctions(functions.record, functions.bags, functions.shape.copy(), functions.calls)
    more.shape[:, SHAPE.index("loops")] += 1
    same = code_parts(functions)["shape"], code_parts(more)["shape"]
    assert np.array_equal(*same)
    more.shape[:, SHAPE.index("blocks")] += 1
    assert not np.array_equal(code_parts(functions)["shape"], code_parts(more)["shape"])


def test_code_alone_knows_no_facts(functions: StoreFunctions) -> None:
    assert not {"constants", "strings", "imports", "facts"} & set(learned_weights.WITH_CODE)
    assert set(code_parts(functions)) < set(learned_weights.WITH_CODE)
