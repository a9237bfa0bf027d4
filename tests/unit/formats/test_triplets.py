"""Pickles of triplets of intervals, read and written."""

from __future__ import annotations

import io
import pickle
import pickletools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokmill
from interval_stores import BLOCKS, write_intervals
from making import files_of, quick_build, token_store
from tokmill import plugins, recipe
from tokmill.errors import TokmillError, UsageError
from tokmill.store.store import Store
from tokmill.store.validate import validate


def export(store: Store, out: Path, **options: Any) -> Path:
    part = plugins.load(plugins.EXPORTS, "triplets")
    part(recipe.convert(part.Config, options)).write(store, out)
    return out


@pytest.fixture
def mined(tmp_path: Path) -> Store:
    profiles = write_intervals(tmp_path / "profiles")
    return quick_build("mine", profiles.path, tmp_path / "mined", what="bbv", cpi=True)


@pytest.fixture
def vectors(tmp_path: Path, mined: Store) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(0).normal(size=(BLOCKS, 300)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", values)
    blocks = mined.reference("anchor").reference("block").path
    tokmill.build(
        "overlay", blocks, values=str(tmp_path / "vectors.npy"), name="near", per="record"
    )
    return values


def put(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("cpi", [False, True])
@pytest.mark.parametrize("by_vector", [False, True])
def test_python_reads_what_is_written(
    tmp_path: Path, mined: Store, vectors: np.ndarray[Any, Any], cpi: bool, by_vector: bool
) -> None:
    """The tuples are those of the script; the same store gives the same bytes."""
    options = {"cpi": cpi, "vectors": "near" if by_vector else ""}
    path = export(mined, tmp_path / "t.pkl", **options)
    with warnings.catch_warnings():
        # The old name of numpy's module, which versions 1 and 2 have.
        warnings.simplefilter("ignore", DeprecationWarning)
        entries = pickle.loads(path.read_bytes())  # noqa: S301 (written here)
    assert isinstance(entries, list) and len(entries) == len(mined) > 50
    profiles = mined.reference("anchor")
    for entry, row in zip(entries, mined, strict=True):
        assert isinstance(entry, tuple) and len(entry) == (9 if cpi else 6)
        members = [profiles.record(int(row[name])) for name in ("anchor", "positive", "negative")]
        for i, record in enumerate(members):
            blocks, weights = entry[2 * i], entry[2 * i + 1]
            assert weights == sorted(record["count"].tolist())
            pairs = {int(b): int(c) for b, c in zip(record["block"], record["count"], strict=True)}
            if by_vector:
                assert all(one.dtype == np.float32 and one.shape == (300,) for one in blocks)
                blocks = [int(np.flatnonzero((vectors == one).all(1))[0]) for one in blocks]
            assert dict(zip(blocks, weights, strict=True)) == pairs
            if cpi:
                assert entry[6 + i] == record["cpi"]
    again = export(mined, tmp_path / "u.pkl", **options)
    assert again.read_bytes() == path.read_bytes()
    pickletools.dis(path.read_bytes(), out=io.StringIO())


@pytest.mark.parametrize("by_vector", [False, True])
def test_what_is_written_is_read(
    tmp_path: Path, mined: Store, vectors: np.ndarray[Any, Any], by_vector: bool
) -> None:
    path = export(mined, tmp_path / "t.pkl", cpi=True, vectors="near" if by_vector else "")
    store = quick_build("triplets", path, tmp_path / "s")
    profiles = mined.reference("anchor")
    assert len(store) == 3 * len(mined) and validate(store).ok
    names = ("anchor", "positive", "negative")
    for number, record in enumerate(store):
        entry, role = divmod(number, 3)
        assert (record["entry"], record["role"]) == (entry, role)
        theirs = profiles.record(int(mined.column(names[role])[entry]))
        order = np.lexsort((theirs["block"], theirs["count"]))
        assert np.array_equal(record["weight"], theirs["count"][order].astype(np.float32))
        if by_vector:
            assert np.array_equal(record["vector"], vectors[theirs["block"][order]])
        else:
            assert np.array_equal(record["block"], theirs["block"][order])
        assert record["cpi"] == theirs["cpi"]


@pytest.mark.parametrize("protocol", range(6))
def test_all_that_the_script_may_have_written(tmp_path: Path, protocol: int) -> None:
    """Lists, tuples and arrays, weights of numpy's types, in each protocol."""
    one = np.arange(3, dtype=np.float32)
    entries = [
        ([one, one + 1], [3, 4], [one], [np.int64(9)], (one * 2, one), (0.5, 1)),
        ([one.tolist()], np.asarray([7]), np.stack([one, one]), [1, 2], [one], [2**40]),
        ([], [], [one], [1], [one], [1]),
        [[one], [1], [one], [1], [one], [1]],
    ]
    store = quick_build("triplets", put(tmp_path / "a.pkl", entries, protocol), tmp_path / "s")
    assert store.manifest.skipped == {"a member has no blocks": 1}
    assert [len(record["weight"]) for record in store] == [2, 1, 2, 1, 2, 1, 1, 1, 1]
    assert store.record(2)["vector"].tolist() == [[0, 2, 4], [0, 1, 2]]
    assert store.record(5)["weight"].tolist() == [2.0**40]
    assert set(store.column("entry").tolist()) == {0, 1, 3}
    ids = [([1, 2], [3, 4], [2**40], [1], [0], [1])]
    store = quick_build("triplets", put(tmp_path / "b.pkl", ids, protocol), tmp_path / "t")
    assert [record["block"].tolist() for record in store] == [[1, 2], [2**40], [0]]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([(1, 2)], "entry 0: no triplet|tuple of 2"),
        ({"a": 1}, "the file is a dict"),
        ([([1], [1, 2], [1], [1], [1], [1])], "1 blocks and 2 weights"),
        ([([-1], [1], [1], [1], [1], [1])], "from 0 on"),
        ([([1.5], [1], [1], [1], [1], [1])], "in place of a list of numbers"),
        ([([1], ["x"], [1], [1], [1], [1])], "weights or CPI that are no numbers"),
        ([([1], [float("nan")], [1], [1], [1], [1])], "not finite"),
        ([([1], [2**70], [1], [1], [1], [1])], "more than 64 bits"),
        ([([1], [True], [1], [1], [1], [1])], "no numbers"),
        ([([[1.0, 2.0], [1.0]], [1, 1], [1], [1], [1], [1])], "several lengths"),
        ([([[1.0]], [1], [1], [1], [1], [1])], "vectors of 0, 1 numbers"),
        ([([1], [1], [1], [1], [1], [1], 1.0, 2.0, float("inf"))], "not finite"),
        ([([1],) * 6, ([1],) * 9], "tuple of|in place of|CPI"),
        ([([1], [1]) * 3, (*([1], [1]) * 3, 1.0, 2.0, 3.0)], "CPI in some entries, not in all"),
        ([([1], [1]) * 3, ([[1.0]], [1]) * 3], "blocks of 1 numbers, not of no"),
        ("text", "list"),
        ([], "nothing|not one record"),
    ],
)
def test_what_is_no_triplet(tmp_path: Path, value: Any, said: str) -> None:
    path = put(tmp_path / "a.pkl", value)
    with pytest.raises(TokmillError) as error:
        quick_build("triplets", path, tmp_path / "s")
    text = f"{error.value.where}: {error.value}"
    assert any(part in text for part in said.split("|")), text


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "run",))

    path = put(tmp_path / "a.pkl", [([Evil()], [1], [1], [1], [1], [1])])
    with pytest.raises(TokmillError):
        quick_build("triplets", path, tmp_path / "s")
    assert not (tmp_path / "run").exists()


def test_bytes_after_the_pickle(tmp_path: Path) -> None:
    path = put(tmp_path / "a.pkl", [([1], [1]) * 3])
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(TokmillError, match="4 bytes follow the pickle"):
        quick_build("triplets", path, tmp_path / "s")


def test_parts_hold_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [([i, 1], [2, 3], [i], [1], [5], [i + 1]) for i in range(200)]
    path = put(tmp_path / "a.pkl", entries)
    whole = quick_build("triplets", path, tmp_path / "whole")
    monkeypatch.setattr("tokmill.formats.triplets.MAX_ITEM", 500)
    cut = quick_build("triplets", path, tmp_path / "cut")
    assert len(cut.shards) > 5 and len(whole.shards) == 1
    for one, other in zip(whole, cut, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in whole.schema)
    again = quick_build("triplets", path, tmp_path / "cut")
    assert files_of(again.path) == files_of(cut.path)


def test_exports_that_cannot_be(tmp_path: Path, mined: Store) -> None:
    plain = token_store(tmp_path / "plain", [[[1]]])
    with pytest.raises(UsageError, match="no column 'anchor'"):
        export(plain, tmp_path / "t.pkl")
    with pytest.raises(TokmillError, match="no overlay 'none'"):
        export(mined, tmp_path / "t.pkl", vectors="none")
    profiles = mined.reference("anchor").path
    known = quick_build("mine", profiles, tmp_path / "all", what="bbv")
    with pytest.raises(TokmillError, match="the CPI of interval .* is not known"):
        export(known, tmp_path / "t.pkl", cpi=True)
    assert not (tmp_path / "t.pkl").exists()
