"""`build mine --what bbv`: triplets of intervals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from function_stores import many, write_keyed
from interval_stores import counts_of, write_intervals
from making import files_of, quick_build, token_store
from tokmill.bbv.projection import project
from tokmill.builds.mining import cells, hard, interval_vectors, intervals
from tokmill.builds.mining.interval_vectors import projected, spread_of
from tokmill.builds.mining.vectors import UNIT, rounded
from tokmill.errors import TokmillError, UsageError
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.store.validate import validate

TRIPLE = ("anchor", "positive", "negative")


@pytest.fixture
def profiles(tmp_path: Path) -> Store:
    return write_intervals(tmp_path / "profiles")


def cosines(vectors: Array) -> Array:
    wide = vectors.astype(np.int64)
    found: Array = (wide @ wide.T) / UNIT**2
    return found


def dense(store: Store) -> Array:
    rows = np.zeros((len(store), 120))
    for number, record in enumerate(store):
        rows[number, record["block"]] = record["count"]
    return rows


def mined(store: Store) -> Array:
    return np.stack([store.column(name) for name in TRIPLE], 1)


def rules(store: Store, vectors: Array, across: bool = False) -> tuple[Array, ...]:
    """What a twin that compares all with all says: cosines, programs, contents, thresholds."""
    likeness = cosines(vectors)
    program = np.asarray([0 if across else record["program"] for record in store])
    content = np.asarray([hash(row.tobytes()) for row in dense(store)])
    full = vectors.any(axis=1)
    low, high = np.zeros(len(store)), np.zeros(len(store))
    for one in np.unique(program):
        here = np.flatnonzero((program == one) & full)
        pairs = likeness[np.ix_(here, here)][~np.eye(len(here), dtype=bool)]
        high[here] = pairs.mean() + 0.5 * pairs.std()
        low[here] = pairs.mean() - pairs.std()
    same = (program[:, None] == program) & full[:, None] & full
    return likeness, same & (content[:, None] != content), low, high


def test_the_projection_keeps_cosines(profiles: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dense(profiles)[:40]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    errors = {}
    for dimensions in (100, 1600):
        vectors = projected(profiles, dimensions, 0)[:40]
        errors[dimensions] = np.abs(cosines(vectors) - unit @ unit.T).mean()
    assert errors[100] < 0.1 and errors[1600] < errors[100] / 2.5
    whole = projected(profiles, 100, 0)
    assert not np.array_equal(whole, projected(profiles, 100, 1))
    monkeypatch.setattr(interval_vectors, "TOKENS", 11)
    assert np.array_equal(whole, projected(profiles, 100, 0))


def test_the_projection_is_that_of_simpoint(profiles: Store) -> None:
    matrix = scipy.sparse.csr_matrix(dense(profiles))
    wide = project(matrix, np.arange(matrix.shape[1]), 100, 7)
    assert np.array_equal(rounded(wide), projected(profiles, 100, 7))


def test_the_spread_is_that_of_all_pairs(profiles: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = projected(profiles, 100, 0)
    records = np.flatnonzero(vectors.any(axis=1))[::3]
    pairs = cosines(vectors[records])[~np.eye(len(records), dtype=bool)]
    found = spread_of(lambda some: vectors[some].astype(np.float32), records)
    assert found.mean == pytest.approx(pairs.mean(), abs=1e-9)
    assert found.deviation == pytest.approx(pairs.std(), abs=1e-9)
    monkeypatch.setattr(interval_vectors, "ROWS", 7)
    assert spread_of(lambda some: vectors[some].astype(np.float32), records) == found
    assert spread_of(lambda some: vectors[some], records[:1]) == (0, 0)


@pytest.mark.parametrize("across", [False, True])
def test_thresholds(tmp_path: Path, profiles: Store, across: bool) -> None:
    """Positives are above the mean + 0.5 deviations of their program, negatives below - 1."""
    store = quick_build("mine", profiles.path, tmp_path / "m", what="bbv", count=20, across=across)
    likeness, may, low, high = rules(profiles, projected(profiles, 100, 0), across)
    anchor, positive, negative = mined(store).T
    assert may[anchor, positive].all() and may[anchor, negative].all()
    assert (likeness[anchor, positive] > high[anchor] - 1e-9).all()
    assert (likeness[anchor, negative] < low[anchor] + 1e-9).all()
    able = (may & (likeness > high[:, None])).any(1) & (may & (likeness < low[:, None])).any(1)
    counted = Counter(anchor.tolist())
    assert {*counted} == {*np.flatnonzero(able).tolist()} and {*counted.values()} == {20}
    skipped = dict(store.manifest.skipped)
    assert skipped.pop("no blocks") == 3
    assert len(store) + sum(skipped.values()) == 20 * (len(profiles) - 3)
    # All that may be drawn is drawn about as often.
    one = int(anchor[0])
    candidates = np.flatnonzero(may[one] & (likeness[one] > high[one]))
    drawn = positive[anchor == one]
    assert len(set(drawn.tolist())) > min(len(candidates), 20) * 0.5
    assert validate(store).ok


def test_neighbours_are_the_nearest(tmp_path: Path, profiles: Store) -> None:
    options = {"what": "bbv", "count": 30, "neighbours": 5, "negatives": "semi-hard"}
    store = quick_build("mine", profiles.path, tmp_path / "m", cpi=True, **options)
    vectors = projected(profiles, 100, 0)
    known = np.isfinite(profiles.column("cpi"))
    vectors[~known] = 0
    likeness, may, _, high = rules(profiles, vectors)
    anchor, positive, negative = mined(store).T
    program = np.asarray([record["program"] for record in profiles])
    full = vectors.any(axis=1)
    assert known[mined(store)].all()
    for one in np.unique(anchor):
        others = np.flatnonzero((program == program[one]) & full)
        others = others[others != one]
        nearest = others[np.argsort(-likeness[one, others], kind="stable")][:5]
        good = {i for i in nearest.tolist() if may[one, i] and likeness[one, i] > high[one]}
        assert {*positive[anchor == one].tolist()} == good
        last = likeness[one, nearest[-1]]
        for p, n in zip(positive[anchor == one], negative[anchor == one], strict=True):
            top = min(likeness[one, p], last)
            assert likeness[one, p] - 0.2 < likeness[one, n] < top and may[one, n]
    skipped = store.manifest.skipped
    assert skipped["CPI is not known"] == 27 and skipped["no positive above the threshold"] > 0


def test_blocks_and_cells_decide_nothing_else(
    tmp_path: Path, profiles: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bytes however the work is cut; other cells give other neighbours, of the same rule."""
    for name, options in {
        "thresholds": {"count": 2},
        "semi-hard": {"negatives": "semi-hard", "cell": 16},
        "neighbours": {"neighbours": 4, "cell": 16},
    }.items():
        first = quick_build("mine", profiles.path, tmp_path / name, what="bbv", **options)
        with monkeypatch.context() as patch:
            patch.setattr(intervals, "BLOCK", 13)
            patch.setattr(hard, "ROWS", 3)
            patch.setattr(cells, "BLOCK", 5)
            patch.setattr(interval_vectors, "TOKENS", 50)
            again = quick_build(
                "mine", profiles.path, tmp_path / f"{name}-again", what="bbv", **options
            )
        assert files_of(first.path) == files_of(again.path)
        likeness, may, _, high = rules(profiles, projected(profiles, 100, 0))
        anchor, positive, negative = mined(first).T
        assert may[anchor, positive].all() and may[anchor, negative].all()
        assert (likeness[anchor, positive] > high[anchor] - 1e-9).all()
        assert (likeness[anchor, negative] < likeness[anchor, positive]).all()


def test_what_cannot_be(tmp_path: Path, profiles: Store) -> None:
    def mine(**options: object) -> Store:
        return quick_build("mine", profiles.path, tmp_path / "m", what="bbv", **options)

    for options, said in (
        ({"negatives": "hard"}, "hard would be positives"),
        ({"same": ["program"]}, "same does nothing where bbv are mined"),
        ({"dimensions": 0}, "dimensions = 0"),
        ({"dimensions": 10**6}, "dimensions = 1000000"),
        ({"neighbours": 2000}, "neighbours = 2000 are looked for in cells of 1024"),
        ({"above": float("nan")}, "above = nan"),
        ({"neighbours": -1}, "neighbours = -1"),
    ):
        with pytest.raises(UsageError, match=said):
            mine(**options)
    keyed = write_keyed(tmp_path / "functions", many()).path
    with pytest.raises(UsageError, match="no column 'block'"):
        quick_build("mine", keyed, tmp_path / "m", what="bbv")
    plain = token_store(tmp_path / "ids", [[[1, 2]]]).path
    with pytest.raises(UsageError, match="no column 'block'"):
        quick_build("mine", plain, tmp_path / "m", what="bbv")
    one = write_intervals(tmp_path / "one", programs=1, intervals=2, shards=1)
    with pytest.raises(TokmillError, match="not one record was found"):
        quick_build("mine", one.path, tmp_path / "m", what="bbv")


def test_counts_of_64_bits(tmp_path: Path) -> None:
    """The largest counts are shares like any others."""
    from making import rec, write_store
    from tokmill.store.schema import Column

    schema = {"block": Column("u1"), "count": Column("u8")}
    counts = counts_of(30)
    stores = []
    for name, factor in (("small", 1), ("large", 1 << 42)):
        rows = []
        for row in counts:
            block = np.flatnonzero(row)
            rows.append(
                {**rec(), "block": block.tolist(), "count": [int(n) * factor for n in row[block]]}
            )
        stores.append(write_store(tmp_path / name, schema, [rows]))
    assert int(stores[1].record(0)["count"].max()) > 1 << 60
    assert np.array_equal(projected(stores[0], 64, 0), projected(stores[1], 64, 0))
