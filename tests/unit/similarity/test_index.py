"""Indexes: the nearest rows as the slow way finds them, damage, stale stores, a build cut short."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from making import token_store
from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.similarity import dense_index, sparse_index
from tokmill.similarity.dense_index import DenseIndex, dense_arrays
from tokmill.similarity.index import ARRAYS, Index, write_index
from tokmill.similarity.sparse_index import SparseIndex, sparse_arrays
from tokmill.store.store import Store


def clustered(count: int, width: int = 24, groups: int = 40) -> np.ndarray:
    random = np.random.default_rng(0)
    centres = random.normal(size=(groups, width))
    near = random.normal(0, 0.5, (count, width))
    return (centres[random.integers(0, groups, count)] + near).astype(np.float32)


def sparse_rows(count: int, width: int = 300) -> Any:
    """Rows of few columns each, some columns frequent, with rows of nothing."""
    random = np.random.default_rng(1)
    dense = np.zeros((count, width), np.float32)
    for row in range(0, count, 1):
        chosen = (width * random.random(random.integers(0, 12)) ** 3).astype(int)
        dense[row, chosen] = random.random(len(chosen)) + 0.1
    return scipy.sparse.csr_array(dense)


def slow(matrix: np.ndarray, query: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(matrix, axis=1)
    return (matrix @ query) / np.where(lengths > 0, lengths, 1) / max(np.linalg.norm(query), 1e-30)


def test_dense_finds_what_the_slow_way_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = clustered(3000)
    matrix[17] = 0
    monkeypatch.setattr(dense_index, "BLOCK", 700)
    index = DenseIndex(dense_arrays(matrix), "here")
    assert len(index) == 3000
    for row in (0, 99, 2999):
        rows, scores = index.nearest(matrix[row], 20)
        exact = slow(matrix, matrix[row])
        assert scores == pytest.approx(exact[rows], abs=1e-6)
        assert rows.tolist() == np.argsort(-exact, kind="stable")[:20].tolist()
        assert index.vectors[row] == pytest.approx(
            matrix[row] / np.linalg.norm(matrix[row]), abs=1e-6
        )
    assert not index.vectors[17].any()
    assert not len(index.nearest(index.vectors[17], 5)[0]), "zeros are near to nothing"


@pytest.mark.parametrize("count", [1, 2, 255, 257])
def test_few_rows(count: int) -> None:
    matrix = clustered(count)
    index = DenseIndex(dense_arrays(matrix), "here")
    rows, _ = index.nearest(matrix[0], 1000)
    assert sorted(rows.tolist()) == list(range(count))


def test_equal_rows_come_in_their_order() -> None:
    matrix = np.ones((700, 3), np.float32)
    rows, scores = DenseIndex(dense_arrays(matrix), "here").nearest(matrix[0], 9)
    assert rows.tolist() == list(range(9)) and scores == pytest.approx(1)
    sparse = SparseIndex(sparse_arrays(scipy.sparse.csr_array(matrix)), "here")
    rows, _ = sparse.nearest(sparse.entries(0), 9)
    assert rows.tolist() == list(range(9))


@pytest.mark.parametrize("exact", [True, False])
def test_sparse_finds_what_the_slow_way_finds(exact: bool) -> None:
    matrix = sparse_rows(800)
    dense = matrix.toarray()
    index = SparseIndex(sparse_arrays(matrix), "here")
    for row in range(0, 800, 13):
        rows, scores = index.nearest(index.entries(row), 10, exact=exact)
        products = dense @ dense[row]
        best = np.lexsort((np.arange(800), -products))[:10]
        wanted = best[products[best] > 0]
        assert scores[: len(wanted)] == pytest.approx(products[wanted], rel=1e-5)
        # Of rows that nearly tie, rounding may choose another one.
        assert len(np.intersect1d(rows[: len(wanted)], wanted)) >= 0.8 * len(wanted)


def test_sparse_follows_what_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column 0 is everywhere; with little to follow, the rare column leads to the right row."""
    dense = np.zeros((500, 3), np.float32)
    dense[:, 0] = 0.3
    dense[[4, 9], 1] = 0.9
    monkeypatch.setattr(sparse_index, "FOLLOWED", 10)
    index = SparseIndex(sparse_arrays(scipy.sparse.csr_array(dense)), "here")
    rows, scores = index.nearest(index.entries(4), 5)
    assert rows.tolist() == [4, 9] and scores == pytest.approx(0.9)
    # Where there is nothing rare, the frequent one is followed.
    assert len(index.nearest(index.entries(7), 5)[0]) == 5
    shares = index.shares(9, index.entries(4), {"frequent": 1, "rare": 3})
    assert shares == pytest.approx([0.09, 0.81])


def test_a_row_of_nothing_is_like_nothing() -> None:
    matrix = scipy.sparse.csr_array(np.asarray([[0, 0], [1, 0]], np.float32))
    index = SparseIndex(sparse_arrays(matrix), "here")
    assert [len(part) for part in index.nearest(index.entries(0), 5)] == [0, 0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return token_store(tmp_path / "s", [[[1]] * 30, [[2, 3]] * 10])


def make(store: Store, path: Path, kind: str, **more: Any) -> None:
    matrix = clustered(40) if kind == "dense" else sparse_rows(40)
    write_index(path, store, matrix, of="v", bounds={} if kind == "dense" else {"all": 300}, **more)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_written_and_read(store: Store, tmp_path: Path, kind: str) -> None:
    make(store, tmp_path / "ix", kind)
    index = Index(tmp_path / "ix")
    rows, scores, shares = index.nearest(3, 5)
    assert rows[0] == 3 and scores[0] == pytest.approx(scores.max()) and len(shares) == len(rows)
    if kind == "sparse":
        assert [sum(one) for one in shares] == pytest.approx(scores.tolist(), rel=1e-5)
    before = (tmp_path / "ix").read_bytes()
    with pytest.raises(TokmillError, match="there is an index already"):
        make(store, tmp_path / "ix", kind)
    make(store, tmp_path / "ix", kind, fresh=True)
    assert (tmp_path / "ix").read_bytes() == before, "equal vectors make equal bytes"
    # Any reader of safetensors sees the arrays.
    arrays = load_file(tmp_path / "ix")
    assert {name: array.dtype for name, array in arrays.items()} == {
        name: np.dtype(dtype) for name, dtype in ARRAYS[kind].items()
    }
    other = "sparse" if kind == "dense" else "dense"
    make(store, tmp_path / "ix", other, fresh=True)
    assert Index(tmp_path / "ix").facts.kind == other


def test_a_moved_pair_is_found(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    store.path.rename(tmp_path / "a/s")
    make(Store(tmp_path / "a/s"), tmp_path / "a/ix", "dense")
    (tmp_path / "a").rename(tmp_path / "b")
    assert len(Index(tmp_path / "b/ix").store) == 40


def test_a_stale_index_is_refused(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "ix", "dense")
    token_store(tmp_path / "other", [[[1]] * 40])
    shutil.rmtree(store.path)
    (tmp_path / "other").rename(store.path)
    with pytest.raises(TokmillError, match="the index is stale"):
        Index(tmp_path / "ix")


def test_an_index_that_was_cut_short_changes_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a full disk nothing is in the way, and nothing of it stays."""
    make(store, tmp_path / "ix", "dense")
    rows = Index(tmp_path / "ix").nearest(1, 5)[0].tolist()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("tokmill.base.files.os.rename", full)
    for place, fresh in ((tmp_path / "ix", True), (tmp_path / "new", False)):
        with pytest.raises(MachineError, match="No space left"):
            make(store, place, "sparse", fresh=fresh)
    monkeypatch.undo()
    assert sorted(tmp_path.iterdir()) == before
    assert Index(tmp_path / "ix").nearest(1, 5)[0].tolist() == rows


def test_places_where_none_can_be_made(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("the user's")
    for place, what in ((tmp_path / "file", "is no index"), (store.path, "this is a folder")):
        with pytest.raises(UsageError, match=what):
            make(store, place, "dense", fresh=True)
    assert (tmp_path / "file").read_text() == "the user's"
    for place, what in ((tmp_path / "no", "there is no such index"), (store.path, "is no index")):
        with pytest.raises(TokmillError, match=what):
            Index(place)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_damage_is_refused(store: Store, tmp_path: Path, kind: str) -> None:
    """What a file says is not believed: each array too short, too long, of another type, wild."""
    path = tmp_path / "ix"
    make(store, path, kind)
    good, arrays = path.read_bytes(), load_file(path)
    facts = metadata(path)
    for name, values in arrays.items():
        wild = np.full_like(values, np.iinfo(values.dtype).max) if values.dtype.kind in "iu" else (
            np.full_like(values, np.nan)
        )  # fmt: skip
        for bad in (values[:-1], np.concatenate([values, values]), values.astype("f8"), wild):
            save_file({**arrays, name: np.ascontiguousarray(bad)}, path, facts)
            refused_or_found(path, kind, name)
        save_file({key: value for key, value in arrays.items() if key != name}, path, facts)
        with pytest.raises(TokmillError, match="no index|damaged"):
            Index(path)
    for data in (b"", good[:50], good[:400], good[: len(good) - 3], b"\xff" + good, good + b"x"):
        path.write_bytes(data)
        with pytest.raises(TokmillError, match="no index|damaged"):
            Index(path)
    path.write_bytes(good)
    Index(path)


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "numpy") as file:
        found: dict[str, str] = file.metadata()
    return found


def refused_or_found(path: Path, kind: str, name: str) -> None:
    try:
        index = Index(path)
        for row in range(0, 40, 3):
            rows, scores, _ = index.nearest(row, 5)
            assert ((rows >= 0) & (rows < 40)).all() and np.isfinite(scores).all()
    except TokmillError as error:
        assert "damaged" in str(error) or "no index" in str(error)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("version", 9, "the version 9"),
        ("kind", "best", "damaged"),
        ("kind", "sparse", "damaged"),
        ("records", 41, "do not fit"),
        ("store", "../nowhere", "there is no such store"),
        ("more", 1, "damaged"),
    ],
)
def test_what_the_facts_say_is_not_believed(
    store: Store, tmp_path: Path, key: str, value: Any, what: str
) -> None:
    make(store, tmp_path / "ix", "dense")
    raw = (tmp_path / "ix").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    facts = json.loads(header["__metadata__"]["facts"])
    header["__metadata__"]["facts"] = json.dumps({**facts, key: value})
    text = json.dumps(header, separators=(",", ":")).encode()
    (tmp_path / "ix").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(TokmillError, match=what):
        Index(tmp_path / "ix")
