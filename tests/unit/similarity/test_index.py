"""Indexes: the nearest rows as the slow way finds them, damage, stale stores, a full disk."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from making import token_store
from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.similarity import index as module
from tokmill.similarity.index import Index, best_of, write_index
from tokmill.store.store import Store


def clustered(count: int, width: int = 24, groups: int = 40) -> np.ndarray:
    random = np.random.default_rng(0)
    centres = random.normal(size=(groups, width))
    near = random.normal(0, 0.5, (count, width))
    return (centres[random.integers(0, groups, count)] + near).astype(np.float32)


def slow(matrix: np.ndarray, query: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(matrix, axis=1)
    return (matrix @ query) / np.where(lengths > 0, lengths, 1) / max(np.linalg.norm(query), 1e-30)


def index_of(folder: Path, matrix: np.ndarray) -> Index:
    store = token_store(folder / "rows", [[[1]] * len(matrix)])
    write_index(folder / "index", store, matrix, of="v")
    return Index(folder / "index")


def test_it_finds_what_the_slow_way_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = clustered(3000)
    matrix[17] = 0
    monkeypatch.setattr(module, "BLOCK", 700)
    index = index_of(tmp_path, matrix)
    assert len(index.vectors) == 3000
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
def test_few_rows(tmp_path: Path, count: int) -> None:
    matrix = clustered(count)
    rows, _ = index_of(tmp_path, matrix).nearest(matrix[0], 1000)
    assert sorted(rows.tolist()) == list(range(count))


def test_rows_that_float32_cannot_tell_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their order is that of products in float64, as they are rounded."""
    draw = np.random.default_rng(0)
    near = draw.normal(size=(1, 500)) + draw.normal(0, 1e-5, (900, 500))
    monkeypatch.setattr(module, "BLOCK", 250)
    index = index_of(tmp_path, near.astype(np.float32))
    exact, query = index.vectors.astype(np.float64), index.vectors[7].astype(np.float64)
    cosines = (exact @ query / np.linalg.norm(query)).round(module.DIGITS)
    rows, scores = index.nearest(index.vectors[7], 40)
    assert rows.tolist() == np.argsort(-cosines, kind="stable")[:40].tolist()
    assert scores.tolist() == cosines[rows].tolist()
    single = index.vectors @ index.vectors[7]
    assert set(np.argsort(-single, kind="stable")[:40].tolist()) != set(rows.tolist())


def test_equal_rows_come_in_their_order(tmp_path: Path) -> None:
    matrix = np.ones((700, 3), np.float32)
    rows, scores = index_of(tmp_path, matrix).nearest(matrix[0], 9)
    assert rows.tolist() == list(range(9)) and scores == pytest.approx(1)
    # Products of equal rows with one row differ in their last bits.
    rows, _ = best_of(np.arange(9), 1 + np.arange(9) * 2e-16, 3)
    assert rows.tolist() == [0, 1, 2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return token_store(tmp_path / "s", [[[1]] * 30, [[2, 3]] * 10])


def make(store: Store, path: Path, **more: Any) -> None:
    write_index(path, store, clustered(40), of="v", **more)


def test_written_and_read(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "ix")
    index = Index(tmp_path / "ix")
    rows, scores = index.nearest(index.vectors[3], 5)
    assert rows[0] == 3 and scores[0] == pytest.approx(scores.max())
    before = (tmp_path / "ix").read_bytes()
    make(store, tmp_path / "ix")
    assert (tmp_path / "ix").read_bytes() == before, "equal vectors make equal bytes"
    # Any reader of safetensors sees the vectors.
    arrays = load_file(tmp_path / "ix")
    assert list(arrays) == ["vector"] and (arrays["vector"] == index.vectors).all()


def test_a_moved_pair_is_found(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    store.path.rename(tmp_path / "a/s")
    make(Store(tmp_path / "a/s"), tmp_path / "a/ix")
    (tmp_path / "a").rename(tmp_path / "b")
    assert len(Index(tmp_path / "b/ix").store) == 40


def test_a_stale_index_is_refused(store: Store, tmp_path: Path) -> None:
    make(store, tmp_path / "ix")
    token_store(tmp_path / "other", [[[1]] * 40])
    shutil.rmtree(store.path)
    (tmp_path / "other").rename(store.path)
    with pytest.raises(TokmillError, match="the index is stale"):
        Index(tmp_path / "ix")


def test_an_index_that_was_cut_short_changes_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a full disk nothing is in the way, and nothing of it stays."""
    make(store, tmp_path / "ix")
    before_vectors = Index(tmp_path / "ix").vectors.copy()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("tokmill.base.files.os.rename", full)
    for place in (tmp_path / "ix", tmp_path / "new"):
        with pytest.raises(MachineError, match="No space left"):
            make(store, place)
    monkeypatch.undo()
    assert sorted(tmp_path.iterdir()) == before
    assert (Index(tmp_path / "ix").vectors == before_vectors).all()


def test_places_where_none_can_be_made(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("the user's")
    for place, what in ((tmp_path / "file", "is not an index"), (store.path, "this is a folder")):
        with pytest.raises(UsageError, match=what):
            make(store, place)
    assert (tmp_path / "file").read_text() == "the user's"
    for place, what in ((tmp_path / "no", "there is no such index"), (store.path, "not an index")):
        with pytest.raises(TokmillError, match=what):
            Index(place)


def test_damage_is_refused(store: Store, tmp_path: Path) -> None:
    """What a file says is not believed: an array of another size or type, not finite."""
    path = tmp_path / "ix"
    make(store, path)
    good, values = path.read_bytes(), load_file(path)["vector"]
    with safe_open(path, "numpy") as file:
        facts = file.metadata()
    for name, bad in (
        ("vector", values[:-1]), ("vector", np.concatenate([values, values])),
        ("vector", values.astype("f8")), ("vector", values.reshape(-1)), ("other", values),
    ):  # fmt: skip
        save_file({name: np.ascontiguousarray(bad)}, path, facts)
        with pytest.raises(TokmillError, match="damaged"):
            Index(path)
    save_file({"vector": np.full_like(values, np.nan)}, path, facts)
    with pytest.raises(TokmillError, match="damaged"):
        Index(path).nearest(values[0], 5)
    for data in (b"", good[:50], good[:400], good[: len(good) - 3], b"\xff" + good, good + b"x"):
        path.write_bytes(data)
        with pytest.raises(TokmillError, match="not an index|damaged"):
            Index(path)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("version", 9, "the version 9"),
        ("records", 41, "does not fit"),
        ("store", "../nowhere", "there is no such store"),
        ("more", 1, "damaged"),
    ],
)
def test_what_the_facts_say_is_not_believed(
    store: Store, tmp_path: Path, key: str, value: Any, what: str
) -> None:
    make(store, tmp_path / "ix")
    raw = (tmp_path / "ix").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    facts = json.loads(header["__metadata__"]["facts"])
    header["__metadata__"]["facts"] = json.dumps({**facts, key: value})
    text = json.dumps(header, separators=(",", ":")).encode()
    (tmp_path / "ix").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(TokmillError, match=what):
        Index(tmp_path / "ix")
