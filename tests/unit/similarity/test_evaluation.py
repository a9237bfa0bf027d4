"""Whole evaluations: what is known to come out."""

from typing import Any

import msgspec
import numpy as np
import pytest

from made_functions import f, functions
from tokmill.base.errors import TokmillError, UsageError
from tokmill.similarity.commands.similarity_tables import print_evaluation
from tokmill.similarity.evaluation import Choice, Evaluation, evaluate
from tokmill.similarity.functions import Functions
from tokmill.similarity.pool_measures import METRICS, Method, Row
from tokmill.similarity.vector_rows import Rows

CHANCE = Method("random", None, True)


def many(count: int = 40, levels: tuple[str, ...] = ("O0", "O3"), **more: Any) -> Functions:
    return functions(*(
        f(f"f{i}", level, project=f"p{i % 4}", **more) for level in levels for i in range(count)
    ))  # fmt: skip


def method(name: str, matrix: Any, baseline: bool = False) -> Method:
    return Method(name, Rows(np.asarray(matrix, np.float32)), baseline)


def by(row: Row, name: str, pool: int, metric: str = "recall@1") -> float:
    (found,) = (one for one in row.results if one.method == name and one.pool == pool)
    return found.values[metric].mean


def run(made: Functions, *methods: Method, **choice: Any) -> Evaluation:
    return evaluate(made, [*methods, CHANCE], Choice(**{"resamples": 50, **choice}))


def test_perfect_constant_and_worst_vectors() -> None:
    made = many()
    # The worst: each query is nearest to all functions but its match.
    worst = np.concatenate([np.eye(40), 1 - np.eye(40)])
    found = run(
        made,
        method("perfect", np.tile(np.eye(40), (2, 1))),
        method("constant", np.full((80, 3), 0.1)),
        method("zeros", np.zeros((80, 3))),
        method("worst", worst),
        pools=(2, 10, 40, 41, 1000),
    )
    (row,) = found.rows
    assert row.too_large == [41, 1000] and row.queries == row.functions == 40 and row.projects == 4
    for pool in (2, 10, 40):
        for metric in METRICS:
            assert by(row, "perfect", pool, metric) == pytest.approx(1)
            chance = by(row, "random", pool, metric)
            assert by(row, "constant", pool, metric) == pytest.approx(chance)
            assert by(row, "zeros", pool, metric) == pytest.approx(chance)
        assert by(row, "random", pool) == pytest.approx(1 / pool)
        assert by(row, "worst", pool) == 0
    assert by(row, "worst", 10, "mrr") == pytest.approx(1 / 10)
    (perfect,) = (c for c in row.compared if c.method == "perfect" and c.pool == 10)
    assert perfect.baseline == "random" and perfect.difference.mean == pytest.approx(0.9)
    assert {one.name: one.zeros for one in found.methods} == {
        "perfect": 0, "constant": 0, "zeros": 80, "worst": 0, "random": 0,
    }  # fmt: skip


def test_expectation_is_the_mean_over_drawn_pools() -> None:
    """The whole way, from vectors to recall, against pools that are drawn and ranked here."""
    made, random = many(60), np.random.default_rng(0)
    code = random.integers(-1, 2, (60, 5)).astype(np.float32)
    vectors = np.concatenate([code, code + random.normal(0, 0.8, (60, 5))])
    vectors[60:80] = np.round(vectors[60:80])  # some tie
    (row,) = run(made, method("vectors", vectors), pools=(20,)).rows
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
    scores = unit[:60] @ unit[60:].T
    hits = []
    for _ in range(150):
        for query in range(60):
            drawn = random.choice(59, 19, replace=False)
            drawn += drawn >= query
            others, own = scores[query, drawn], scores[query, query]
            ties = int((np.abs(others - own) <= 1e-6).sum())
            rank = int((others > own + 1e-6).sum()) + random.integers(0, ties + 1)
            hits.append((rank < 1, rank < 5, rank < 10, 1 / (1 + rank)))
    for metric, value in zip(METRICS, np.mean(hits, 0), strict=True):
        assert by(row, "vectors", 20, metric) == pytest.approx(value, abs=0.02)


def test_order_of_functions_changes_nothing() -> None:
    made, random = many(), np.random.default_rng(0)
    vectors = random.normal(size=(80, 6)).astype(np.float32)
    order = random.permutation(80)
    mixed = Functions(
        "here",
        {name: one.take(order) for name, one in made.names.items()},
        made.blocks[order], None, made.named[order], None,
    )  # fmt: skip
    made.code = None
    one = run(made, method("v", vectors), pools=(7,))
    other = run(mixed, method("v", vectors[order]), pools=(7,))
    assert msgspec.json.encode(one) == msgspec.json.encode(other)


def test_compilers_of_one_row_share_no_pool() -> None:
    """gcc's f and clang's f at O3 would be negatives that are nearly the match."""
    made = functions(*(
        f(f"f{i}", level, compiler=compiler)
        for compiler in ("gcc", "clang") for level in ("O0", "O3") for i in range(5)
    ))  # fmt: skip
    (row, *_) = run(made, method("v", np.tile(np.eye(5), (4, 1))), pools=(2, 5)).rows
    assert row.row == "O0-O3" and row.queries == 10 and row.functions == 5
    assert by(row, "v", 5) == 1


def test_functions_of_other_projects_are_negatives_alone() -> None:
    made = many()
    vectors = np.random.default_rng(6).normal(size=(80, 4))
    (whole,) = run(made, method("v", vectors), pools=(10, 40)).rows
    (some,) = run(made, method("v", vectors), pools=(10, 40), projects=("p1", "p3")).rows
    assert some.queries == some.settings[0].queries == 20 and some.projects == 2
    assert whole.settings[0].pairs == some.settings[0].pairs == 40 and some.too_large == []
    # A query has the same negatives as before, so projects add up to the whole.
    names = made.names["project"].names
    each = [run(made, method("v", vectors), pools=(10, 40), projects=(n,)).rows[0] for n in names]
    for pool in (10, 40):
        mean = sum(one.queries * by(one, "v", pool, "mrr") for one in each) / 40
        assert mean == pytest.approx(by(whole, "v", pool, "mrr"))
    with pytest.raises(UsageError, match="there is no project 'p9'"):
        run(made, projects=("p9",))


def test_no_pair_at_all() -> None:
    for made in (functions(), functions(f("a")), functions(f("a", blocks=1), f("a", "O3"))):
        with pytest.raises(TokmillError, match="no function was compiled in two of the ways"):
            run(made, method("v", np.ones((len(made), 2))))


@pytest.mark.parametrize(("count", "shown"), [(2, False), (5, False), (6, True)])
def test_few_functions_show_nothing(count: int, shown: bool) -> None:
    """Equal signs of n independent differences have a probability of 2 · 2^-n by chance."""
    stats = pytest.importorskip("scipy.stats")
    assert (stats.binomtest(count, count).pvalue < 0.05) == shown
    made = many(count)
    perfect = np.tile(np.eye(count), (2, 1))
    found = run(made, method("perfect", perfect)).rows[0]
    assert found.queries == count and by(found, "perfect", 2) == 1
    assert all((one.difference.ends is not None) == shown for one in found.compared)


def test_one_pair_has_no_pool() -> None:
    found = run(functions(f("a"), f("a", "O3")), method("v", np.ones((2, 2))), pools=(2, 10))
    (row,) = found.rows
    assert row.queries == 1 and row.results == [] and row.too_large == [2, 10]


@pytest.mark.parametrize("resamples", [0, 20])
@pytest.mark.parametrize(
    "made",
    [
        functions(f("f"), f("f", "O3"), f("g"), f("g", "O3"), f("h", compiler="clang-14")),
        functions(f("f"), f("f", "O3"), f("g", "O3", compiler="gcc-13")),
    ],
)
def test_a_kind_of_pairs_without_a_pair_has_no_value(made: Functions, resamples: int) -> None:
    vectors = method("v", np.random.default_rng(0).normal(size=(len(made), 3)))
    found = run(made, vectors, resamples=resamples)
    print_evaluation(found)
    msgspec.json.encode(found)


def test_vectors_that_are_called_as_a_baseline_are_refused() -> None:
    with pytest.raises(UsageError, match="two methods are called 'random'"):
        run(many(), method("random", np.tile(np.eye(40), (2, 1))))
