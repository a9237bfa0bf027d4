"""Ranks by blocks of products: dense, sparse, ties, and the slow way."""

import numpy as np
import pytest
import scipy.sparse

from tokmill.similarity import vector_rows as blocked
from tokmill.similarity.vector_rows import Rows, ranks


def slow(matrix: np.ndarray, query: list[int], target: list[int]) -> list[tuple[int, int]]:
    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        length = float(np.sqrt(a @ a) * np.sqrt(b @ b))
        return float(a @ b) / length if length else 0.0

    found = []
    for q, t in zip(query, target, strict=True):
        own = cosine(matrix[q], matrix[t])
        others = [cosine(matrix[q], matrix[other]) - own for other in target if other != t]
        found.append((sum(d > 1e-9 for d in others), sum(abs(d) <= 1e-9 for d in others)))
    return found


@pytest.mark.parametrize("form", ["dense", "mapped f4", "csr", "csr of many entries"])
def test_ranks_are_those_of_the_slow_way(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random = np.random.default_rng(1)
    # Few different values, so that there are many ties, and rows of zeros.
    matrix = random.integers(-1, 2, (60, 4)).astype(np.float32)
    matrix[[3, 33]] = 0
    query, target = np.arange(0, 30), np.arange(30, 60)
    given: object = matrix
    if form == "mapped f4":
        path = tmp_path_factory.mktemp("m") / "m.npy"
        np.save(path, matrix)
        given = np.load(path, mmap_mode="r")
    elif form.startswith("csr"):
        given = scipy.sparse.csr_array(matrix)
        if form == "csr":
            monkeypatch.setattr(blocked, "MANY", 2.0)
    monkeypatch.setattr(blocked, "CELLS", 100)
    rows = Rows(given)
    assert rows.sparse == (form == "csr") and rows.zeros == int((matrix == 0).all(1).sum()) >= 2
    above, ties = ranks(rows, query, target)
    exact = slow(matrix.astype(np.float64), query.tolist(), target.tolist())
    assert list(zip(above.tolist(), ties.tolist(), strict=True)) == exact
    assert ties.sum() > 30


@pytest.mark.parametrize("sparse", [False, True])
def test_equal_vectors_tie_whatever_the_rounding(sparse: bool) -> None:
    one = np.random.default_rng(0).normal(size=257).astype(np.float32)
    scale = np.linspace(0.1, 9, 500, dtype=np.float32)[:, None]
    matrix = one * scale
    given = scipy.sparse.csr_array(matrix) if sparse else matrix
    above, ties = ranks(Rows(given), np.arange(250), np.arange(250, 500))
    assert (above == 0).all() and (ties == 249).all()


def test_numbers_of_any_size_have_lengths() -> None:
    rows = Rows(np.asarray([[3e200, 4e200], [3e-200, 4e-200], [0, 0]]))
    assert rows.lengths == pytest.approx([5e200, 5e-200, 0])
    assert rows.take(np.arange(3)) == pytest.approx(np.asarray([[0.6, 0.8], [0.6, 0.8], [0, 0]]))


def test_one_pair() -> None:
    above, ties = ranks(Rows(np.eye(2)), np.asarray([0]), np.asarray([1]))
    assert above.tolist() == [0] and ties.tolist() == [0]


def test_columns_beside_count_as_if_they_were_one_matrix() -> None:
    random = np.random.default_rng(2)
    first, second = (random.integers(-1, 2, (40, d)).astype(np.float32) for d in (3, 5))
    first[[4, 5]], second[[5, 6]] = 0, 0
    query, target = np.arange(20), np.arange(20, 40)
    whole = Rows(np.concatenate([first, second], axis=1), unit=False)
    both = Rows(scipy.sparse.csr_array(first), unit=False, more=second)
    assert both.zeros == whole.zeros == 1 and np.allclose(both.lengths, whole.lengths)
    for one, other in zip(ranks(both, query, target), ranks(whole, query, target), strict=True):
        assert (one == other).all()
    alone = ranks(Rows(first, unit=False), query, target)
    assert (alone[0] != ranks(both, query, target)[0]).any()
