"""Negatives by vectors: cells of near records, and what is chosen in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tokmill
from function_stores import Function, families, many, reasons, write_keyed
from making import files_of, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.mining import cells, hard
from tokmill.builds.mining import mining_source as source
from tokmill.builds.mining.cells import cells_of
from tokmill.builds.mining.hard import Asked, search
from tokmill.builds.mining.mine_triplets import FAR, FARTHER
from tokmill.builds.mining.vector_table import UNIT, rounded
from tokmill.store.schema import Array
from tokmill.store.store import Store


def clustered(records: int, width: int = 16, kinds: int = 12, seed: int = 0) -> Array:
    """Vectors around some centres."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(kinds, width))
    spread = draw.normal(size=(records, width)) * 0.4
    return (centres[draw.integers(0, kinds, records)] + spread).astype(np.float32)


def cosines(vectors: Array) -> Array:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found: Array = unit @ unit.T
    return found


@pytest.fixture
def functions(tmp_path: Path) -> tuple[Path, list[Function], Array]:
    shards = many()
    rows = [one for shard in shards for one in shard]
    write_keyed(tmp_path / "functions", shards)
    vectors = clustered(len(rows))
    np.save(tmp_path / "vectors.npy", vectors)
    return tmp_path / "functions", rows, vectors


def triples(store: Store) -> Array:
    return np.stack([store.column(name) for name in ("anchor", "positive", "negative")], 1)


def test_semi_hard_is_between_the_positive_and_the_margin(
    tmp_path: Path, functions: tuple[Path, list[Function], Array]
) -> None:
    """In a single cell every record can be found, so the rule is checked against all of them."""
    path, rows, vectors = functions
    file = str(tmp_path / "vectors.npy")
    options = {"negatives": "semi-hard", "margin": 0.05, "vectors": file, "count": 40}
    store = quick_build("mine", path, tmp_path / "mined", **options)
    likeness, family, left = cosines(vectors), np.asarray(families(rows)), reasons(rows)
    name = np.asarray([one.function for one in rows])
    used = np.asarray([not why for why in left])
    outside = nearer = 0
    found: dict[tuple[int, int], Counter[int]] = {}
    for anchor, positive, negative in triples(store).tolist():
        may = used & (family != family[anchor]) & (name != name[anchor])
        assert may[negative]
        high = likeness[anchor, positive]
        between = may & (likeness[anchor] < high - 2e-3) & (likeness[anchor] > high - 0.048)
        if between.any():
            assert high - 0.052 < likeness[anchor, negative] < high + 2e-3
            found.setdefault((anchor, positive), Counter())[negative] += 1
        elif (below := may & (likeness[anchor] < high - 0.05)).any():
            best = likeness[anchor][below].max()
            assert best - 4e-3 < likeness[anchor, negative] < high - 0.046
            outside += 1
        else:
            nearer += 1
    notes = store.manifest.notes
    assert outside == pytest.approx(notes[FARTHER], abs=40) and outside > 40
    assert nearer == pytest.approx(notes[FAR], abs=40) and nearer > 20
    # All that may be chosen is chosen, about as often.
    assert max(len(negatives) for negatives in found.values()) > 4


def test_hard_is_the_nearest_of_another_function(
    tmp_path: Path, functions: tuple[Path, list[Function], Array]
) -> None:
    path, rows, vectors = functions
    tokmill.build("overlay", path, values=str(tmp_path / "vectors.npy"), name="near")
    store = quick_build("mine", path, tmp_path / "mined", negatives="hard", vectors="near")
    likeness, family, left = cosines(vectors), np.asarray(families(rows)), reasons(rows)
    name = np.asarray([one.function for one in rows])
    used = np.asarray([not why for why in left])
    for anchor, _, negative in triples(store).tolist():
        may = used & (family != family[anchor]) & (name != name[anchor])
        best = np.where(may, likeness[anchor], -2).max()
        assert may[negative] and likeness[anchor, negative] > best - 2e-3
    assert FAR not in "".join(store.manifest.notes)
    by_file = quick_build(
        "mine", path, tmp_path / "f", negatives="hard", vectors=str(tmp_path / "vectors.npy")
    )
    assert np.array_equal(triples(by_file), triples(store))


def test_small_cells_still_find_near_ones(
    tmp_path: Path, functions: tuple[Path, list[Function], Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In cells of a tenth of the store negatives are nearly as like; blocks decide nothing."""
    path, _, vectors = functions
    likeness = cosines(vectors)
    means = {}
    options = {"negatives": "hard", "vectors": str(tmp_path / "vectors.npy")}
    for cell in (24, 1024):
        store = quick_build("mine", path, tmp_path / f"mined-{cell}", cell=cell, **options)
        anchor, _, negative = triples(store).T
        means[cell] = likeness[anchor, negative].mean()
    assert means[1024] - 0.12 < means[24] < means[1024]
    monkeypatch.setattr(cells, "BLOCK", 5)
    monkeypatch.setattr(hard, "ROWS", 3)
    again = quick_build("mine", path, tmp_path / "again", cell=24, **options)
    assert files_of(again.path) == files_of(tmp_path / "mined-24")


def test_rounded_products_are_exact() -> None:
    """Each order of summation gives the product of whole numbers, also for wide vectors."""
    vectors = np.random.default_rng(1).normal(size=(40, 4096)).astype(np.float32)
    vectors[3] = 0
    vectors[4] *= np.float32(1e-30)
    vectors[5] *= np.float32(1e30)
    units = rounded(vectors)
    whole = units.astype(np.int64)
    assert np.array_equal(units @ units.T, whole @ whole.T)
    assert np.array_equal(units[:, ::-1] @ units[:, ::-1].T, whole @ whole.T)
    assert not units[3].any()
    length = np.linalg.norm(units[np.arange(40) != 3], axis=1)
    assert np.abs(length - UNIT).max() < 1
    kept = np.arange(40) != 3
    error = (whole @ whole.T)[np.ix_(kept, kept)] / UNIT**2 - cosines(vectors[kept].astype(float))
    assert np.abs(error).max() < 2e-3


@pytest.mark.parametrize("most", [2, 7, 100, 5000])
def test_cells_hold_each_record_once(most: int) -> None:
    vectors = rounded(clustered(3000))
    records = np.random.default_rng(2).permutation(3000)[:2000]
    found = cells_of(lambda some: vectors[some], np.sort(records), most, 0)
    assert sorted(found["record"].tolist()) == sorted(records.tolist())
    sizes = np.bincount(found["cell"])
    assert sizes.max() <= most and sizes.min() >= 1
    assert (np.diff(found["cell"]) >= 0).all()
    assert len(sizes) < 4 * 2000 / most + 1


def test_cells_of_equal_and_of_no_vectors() -> None:
    """Where nothing tells records apart they are cut all the same."""
    for vectors in (np.ones((1000, 4), np.float32), np.zeros((1000, 4), np.float32)):
        units = rounded(vectors)
        found = cells_of(lambda some, units=units: units[some], np.arange(1000), 10, 0)
        assert np.bincount(found["cell"]).max() <= 10
    assert len(cells_of(lambda some: units[some], np.arange(0), 10, 0)) == 0
    assert cells_of(lambda some: units[some], np.arange(1), 10, 0)["cell"].tolist() == [0]


def test_search_compares_within_cells_alone() -> None:
    """The work is anchors times cell, never anchors times records."""
    vectors = rounded(clustered(4000))
    found = cells_of(lambda some: vectors[some], np.arange(4000), 100, 0)
    seen = 0

    def allowed(anchors: Array, members: Array) -> Array:
        nonlocal seen
        seen += len(anchors) * len(members)
        return anchors[:, None] != members

    anchor = np.arange(4000)
    two = np.full(4000, 2.0)
    asked = Asked(anchor, anchor.astype(np.uint64), -two, two, allowed, nearest=True)
    negative = search(found, lambda some: vectors[some], asked).record
    assert (negative >= 0).all() and (negative != anchor).all() and seen <= 4000 * 100
    cell = np.empty(4000, int)
    cell[found["record"]] = found["cell"]
    assert np.array_equal(cell[negative], cell[anchor])


def test_vectors_that_cannot_be(
    tmp_path: Path, functions: tuple[Path, list[Function], Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, vectors = functions
    file = tmp_path / "vectors.npy"

    def mine(**options: object) -> Store:
        return quick_build("mine", path, tmp_path / "m", **options)

    with pytest.raises(UsageError, match="semi-hard needs vectors"):
        mine(negatives="semi-hard")
    with pytest.raises(UsageError, match="vectors do nothing where negatives = random"):
        mine(vectors=str(file))
    with pytest.raises(UsageError, match="margin = 0"):
        mine(negatives="semi-hard", vectors=str(file), margin=0)
    with pytest.raises(TokmillError, match="no overlay 'nothing'"):
        mine(negatives="hard", vectors="nothing")
    np.save(tmp_path / "size.npy", np.arange(len(vectors)))
    tokmill.build("overlay", path, values=str(tmp_path / "size.npy"), name="size")
    with pytest.raises(UsageError, match="no columns of vectors"):
        mine(negatives="hard", vectors="size")
    np.save(file, vectors[:-1])
    with pytest.raises(UsageError, match=r"the array has the shape \(239, 16\), and the store 240"):
        mine(negatives="hard", vectors=str(file))
    bad = vectors.copy()
    bad[20, 3] = np.nan
    np.save(file, bad)
    with pytest.raises(TokmillError, match="the vector of record 20 is not finite"):
        mine(negatives="hard", vectors=str(file))
    np.save(file, vectors)
    store = mine(negatives="hard", vectors=str(file))
    np.save(file, vectors[::-1])
    with pytest.raises(TokmillError, match="vectors: .* → "):
        mine(negatives="hard", vectors=str(file))
    assert Store(store.path).fingerprint == store.fingerprint
    read = source.MineSource.read

    def changed(self: source.MineSource, *args: object) -> object:
        np.save(file, np.roll(vectors, 1))
        self.miner.near.table.digest = "0" * 64  # type: ignore[attr-defined]
        return read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(source.MineSource, "read", changed)
    with pytest.raises(TokmillError, match="have changed since the build was planned"):
        quick_build("mine", path, tmp_path / "n", negatives="hard", vectors=str(file))
