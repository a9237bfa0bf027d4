"""`build mine --what bbv`: triplets of intervals."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from function_stores import many, write_keyed
from interval_stores import counts_of, write_intervals
from making import files_of, quick_build, rec, token_store, write_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.bbv.points.simpoint import PROJECTION_SEED, project
from tokmill.builds.mining import interval_vectors, intervals
from tokmill.builds.mining.interval_vectors import UNIT, projected, rounded, spread_of
from tokmill.store.checks.validate import validate
from tokmill.store.schema import Array, Column
from tokmill.store.store import Store

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
    wide = project(matrix, np.arange(matrix.shape[1]), 100)
    assert np.array_equal(rounded(wide), projected(profiles, 100, PROJECTION_SEED))


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


def of_shares(folder: Path, sizes: tuple[int, ...]) -> Store:
    """A program with phases of some sizes, whose blocks have nothing in common."""
    draw = np.random.default_rng(1)
    rows = []
    for phase, size in enumerate(sizes):
        for _ in range(size):
            block = np.arange(8) + 8 * phase
            counts = draw.integers(800, 1000, 8)
            rows.append({**rec(), "block": block.tolist(), "count": counts.tolist()})
    schema = {"block": Column("u1"), "count": Column("u8")}
    return write_store(folder / "store", schema, [rows])


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize(
    ("sizes", "moved"), [((27, 3), "above"), ((6,) * 5, "below"), ((20, 10), "")]
)
def test_thresholds_that_no_pair_reaches(
    tmp_path: Path, sizes: tuple[int, ...], moved: str, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quantile of a normal distribution is taken, 0.69 or 0.16; others stay as they are."""
    if drawn:
        monkeypatch.setattr(interval_vectors, "PAIRS", 300)
        monkeypatch.setattr(intervals, "PAIRS", 300)
    profiles = of_shares(tmp_path, sizes)
    likeness = cosines(projected(profiles, 100, 0))
    pairs = likeness[np.triu_indices(len(profiles), 1)]
    high, low = pairs.mean() + 0.5 * pairs.std(), pairs.mean() - pairs.std()
    assert (high > pairs.max(), low < pairs.min()) == (moved == "above", moved == "below")
    store = quick_build("mine", profiles.path, tmp_path / "m", what="bbv", count=20)
    assert store.manifest.notes == ({intervals.BY_QUANTILE: 1} if moved else {})
    close = 0.15 if drawn else 1e-9
    edges = {
        "above": np.quantile(pairs, 0.6914624612740131, method="lower"),
        "below": np.quantile(pairs, 0.15865525393145705, method="higher"),
    }
    high, low = (
        edges.get(moved * (moved == "above"), high),
        edges.get(moved * (moved == "below"), low),
    )
    anchor, positive, negative = mined(store).T
    assert (likeness[anchor, positive] > high - close).all()
    assert (likeness[anchor, negative] < low + close).all()
    able = (likeness > high + close) & ~np.eye(len(profiles), dtype=bool)
    able = able.any(1) & (likeness < low - close).any(1)
    assert {*np.flatnonzero(able)} <= {*anchor.tolist()} and len(store) > 100


def test_what_is_looked_for_keeps_the_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One near pair among many, which no draw finds, is a pair above the threshold."""
    rows = [{**rec(), "block": [0, i + 1], "count": [10_000, 1000]} for i in range(34)]
    far = [{**rec(), "block": [60 + i], "count": [5000]} for i in range(4)]
    near = [{**rec(), "block": [0, 50], "count": [10_000 + i, 1000]} for i in range(2)]
    schema = {"block": Column("u1"), "count": Column("u8")}
    profiles = write_store(tmp_path / "store", schema, [[*rows, *far, *near]])
    monkeypatch.setattr(interval_vectors, "PAIRS", 30)
    monkeypatch.setattr(intervals, "PAIRS", 30)
    likeness = cosines(projected(profiles, 1600, 0))
    pairs = likeness[~np.eye(len(profiles), dtype=bool)]
    high = pairs.mean() + 0.5 * pairs.std()
    assert (pairs > high).sum() == 2 and likeness[38, 39] > high
    store = quick_build("mine", profiles.path, tmp_path / "m", what="bbv", dimensions=1600)
    assert mined(store)[:, :2].tolist() == [[38, 39], [39, 38]] and not store.manifest.notes


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


def test_blocks_decide_nothing(
    tmp_path: Path, profiles: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bytes however the work is cut."""
    for name, options in {
        "thresholds": {"count": 2},
        "semi-hard": {"negatives": "semi-hard"},
        "neighbours": {"neighbours": 4},
    }.items():
        first = quick_build("mine", profiles.path, tmp_path / name, what="bbv", **options)
        with monkeypatch.context() as patch:
            patch.setattr(intervals, "BLOCK", 13)
            patch.setattr(interval_vectors, "COSINES", 150)
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
        ({"negatives": "hard"}, "'hard' is not known"),
        ({"same": ["program"]}, "same does nothing where bbv are mined"),
        ({"dimensions": 0}, "dimensions: expected"),
        ({"dimensions": 10**6}, "dimensions: expected"),
        ({"above": float("nan")}, "above: expected"),
        ({"neighbours": -1}, "neighbours: expected"),
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
    with pytest.raises(TokmillError, match="no record was found"):
        quick_build("mine", one.path, tmp_path / "m", what="bbv")


def test_counts_of_64_bits(tmp_path: Path) -> None:
    """The largest counts are shares like any others."""
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
