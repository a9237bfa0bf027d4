"""Indexes: the nearest rows as the slow way finds them, damage, stale stores, a build cut short."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from making import token_store
from tokmill.errors import MachineError, TokmillError, UsageError
from tokmill.files import write_file, writing
from tokmill.similarity import dense_index, sparse_index
from tokmill.similarity import index as index_module
from tokmill.similarity.dense_index import DenseIndex, dense_arrays
from tokmill.similarity.index import FILE, Index, read_facts, write_index
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


def test_dense_exact_finds_what_the_slow_way_finds() -> None:
    matrix = clustered(3000)
    matrix[17] = 0
    index = DenseIndex(dense_arrays(matrix), "here")
    assert len(index) == 3000 and sorted(index.row.tolist()) == list(range(3000))
    for row in (0, 99, 2999):
        rows, scores = index.nearest(matrix[row], 20, exact=True)
        exact = slow(matrix, matrix[row])
        assert scores == pytest.approx(exact[rows], abs=1e-6)
        assert rows.tolist() == np.argsort(-exact, kind="stable")[:20].tolist()
        assert index.vector(row) == pytest.approx(
            matrix[row] / np.linalg.norm(matrix[row]), abs=1e-6
        )
    assert not index.vector(17).any()
    assert not len(index.nearest(index.vector(17), 5)[0]), "zeros are near to nothing"


def test_dense_cells_find_most(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = clustered(20_000, groups=300)
    index = DenseIndex(dense_arrays(matrix), "here")
    assert len(index.centre) > 2 * dense_index.PROBES
    found = 0
    for row in range(0, 20_000, 400):
        exact, _ = index.nearest(matrix[row], 10, exact=True)
        quick, scores = index.nearest(matrix[row], 10)
        found += len(np.intersect1d(exact, quick))
        assert len(quick) == 10 and quick[0] == row and (np.diff(scores) <= 0).all()
    assert found >= 0.95 * 500


@pytest.mark.parametrize("count", [1, 2, 255, 257])
def test_few_rows(count: int) -> None:
    matrix = clustered(count)
    index = DenseIndex(dense_arrays(matrix), "here")
    rows, _ = index.nearest(matrix[0], 1000)
    assert sorted(rows.tolist()) == list(range(count))


def test_equal_rows_come_in_their_order() -> None:
    matrix = np.ones((700, 3), np.float32)
    rows, scores = DenseIndex(dense_arrays(matrix), "here").nearest(matrix[0], 9, exact=True)
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
    before = {path.name for path in (tmp_path / "ix").iterdir()}
    with pytest.raises(TokmillError, match="there is an index already"):
        make(store, tmp_path / "ix", kind)
    make(store, tmp_path / "ix", kind, fresh=True)
    after = {path.name for path in (tmp_path / "ix").iterdir()}
    assert after == before, "equal vectors make equal files"
    assert Index(tmp_path / "ix").nearest(3, 5)[0].tolist() == rows.tolist()
    other = "sparse" if kind == "dense" else "dense"
    make(store, tmp_path / "ix", other, fresh=True)
    assert before & {path.name for path in (tmp_path / "ix").iterdir()} == {FILE}


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
    make(store, tmp_path / "ix", "dense")
    rows = Index(tmp_path / "ix").nearest(1, 5)[0].tolist()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tokmill.similarity.index.msgspec.json.format", full)
    with pytest.raises(OSError):
        make(store, tmp_path / "ix", "sparse", fresh=True)
    assert Index(tmp_path / "ix").nearest(1, 5)[0].tolist() == rows


@pytest.mark.parametrize("killed", [False, True])
def test_the_same_command_makes_an_index_that_was_cut_short(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """After a full disk or a kill nothing is in the way, and nothing of it stays."""
    place = tmp_path / "ix"

    def full(path: Path, *_: Any, **__: Any) -> None:
        if path.name == FILE:
            raise OSError(28, "No space left on device")
        whole(path, *_, **__)

    whole = write_file
    monkeypatch.setattr(index_module, "write_file", full)
    if killed:
        monkeypatch.setattr(index_module, "_tidy", lambda _: None)
        monkeypatch.setattr(index_module, "remove", lambda _: None)
    with pytest.raises(OSError):
        make(store, place, "dense")
    assert place.exists() == killed
    monkeypatch.undo()
    for _ in range(2):
        make(store, place, "dense", fresh=_ == 1)
        assert {path.name for path in place.iterdir()} == {
            FILE, *read_facts(place).files.values()
        }  # fmt: skip
        assert len(Index(place).rows) == 40
    (place / "row-00000000.npy").write_text("the user's")
    make(store, place, "sparse", fresh=True)
    assert (place / "row-00000000.npy").read_text() == "the user's"


def test_one_writer_at_a_time(store: Store, tmp_path: Path) -> None:
    place = tmp_path / "ix"
    with (
        writing(place / FILE),
        pytest.raises(MachineError, match="another process is writing index.json"),
    ):
        make(store, place, "dense")


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_the_same_input_makes_the_same_files(store: Store, tmp_path: Path, kind: str) -> None:
    for name in "ab":
        make(store, tmp_path / name, kind)
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"
    )
    assert one == other


def test_places_where_none_can_be_made(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, what in ((tmp_path / "file", "this is a file"), (store.path, "is not empty")):
        with pytest.raises(UsageError, match=what):
            make(store, place, "dense")
    for place, what in ((tmp_path / "no", "there is no such index"), (store.path, "is no index")):
        with pytest.raises(TokmillError, match=what):
            Index(place)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_damage_is_refused(store: Store, tmp_path: Path, kind: str) -> None:
    """What a file says is not believed: each array too short, too long, of another type, wild."""
    path = tmp_path / "ix"
    make(store, path, kind)
    facts = read_facts(path)
    for name, file in facts.files.items():
        good = (path / file).read_bytes()
        values = np.load(path / file)
        wild = np.full_like(values, np.iinfo(values.dtype).max) if values.dtype.kind in "iu" else (
            np.full_like(values, np.nan)
        )  # fmt: skip
        for bad in (values[:-1], np.concatenate([values, values]), values.astype("f8"), wild):
            np.save(path / file, bad)
            refused_or_found(path, kind, name)
        for data in (b"", good[:50], good[: len(good) - 3], b"\x93NUMPY\xff" + good):
            (path / file).write_bytes(data)
            with pytest.raises(TokmillError, match="damaged"):
                Index(path)
        (path / file).unlink()
        with pytest.raises(TokmillError):
            Index(path)
        (path / file).write_bytes(good)
    Index(path)


def refused_or_found(path: Path, kind: str, name: str) -> None:
    try:
        index = Index(path)
        for row in range(0, 40, 3):
            rows, scores, _ = index.nearest(row, 5)
            assert ((rows >= 0) & (rows < 40)).all() and np.isfinite(scores).all()
    except TokmillError as error:
        assert "damaged" in str(error)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("format", "other", "the index has the format 'other'"),
        ("version", 9, "version 9"),
        ("kind", "best", "cannot be read"),
        ("records", 41, "do not fit"),
        ("files", {"vector": "../../s/manifest.json"}, "damaged"),
        ("store", "../nowhere", "there is no such store"),
        ("more", 1, "cannot be read"),
    ],
)
def test_what_the_facts_say_is_not_believed(
    store: Store, tmp_path: Path, key: str, value: Any, what: str
) -> None:
    make(store, tmp_path / "ix", "dense")
    file = tmp_path / "ix" / FILE
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, key: value}))
    with pytest.raises(TokmillError, match=what):
        Index(tmp_path / "ix")
    if key == "version":
        names = {**facts["files"], "vector": "../s/manifest.json"}
        file.write_text(json.dumps({**facts, "files": names}))
        with pytest.raises(TokmillError, match="leads out of the folder"):
            Index(tmp_path / "ix")
