"""The figure of vectors."""

from pathlib import Path

import numpy as np
import pytest

from making import quick_build, rec, write_store
from tokmill.base.errors import UsageError
from tokmill.bbv.points.executions import as_matrix
from tokmill.bbv.points.simpoint import simpoints
from tokmill.bbv.traces.read import read
from tokmill.report.pages import tsne as figure
from tokmill.report.pages.figures import make
from tokmill.report.pages.plot import plot
from tokmill.store.schema import Column

SCHEMA = {
    "token": Column("u2"),
    "kind": Column("utf8", per="record"),
    "cost": Column("f4", per="record"),
}


def groups(folder: Path, count: int = 90, kinds: int = 3) -> tuple[Path, Path]:
    """Write a store of kinds of records, and vectors that tell them."""
    random = np.random.default_rng(0)
    kind = np.arange(count) % kinds
    records = [rec([1], kind=f"kind {k:02}", cost=float(k) + 0.5) for k in kind]
    write_store(folder / "store", SCHEMA, [records])
    vectors = np.eye(kinds)[kind] * 3 + random.normal(0, 0.05, (count, kinds))
    np.save(folder / "v.npy", vectors.astype(np.float32))
    return folder / "store", folder / "v.npy"


def test_what_is_alike_lies_together(tmp_path: Path) -> None:
    store, vectors = groups(tmp_path)
    made = make("tsne", [store], column="kind", vectors=str(vectors))
    assert made.form == "points" and [one.label for one in made.series] == [
        "kind 00", "kind 01", "kind 02",
    ]  # fmt: skip
    middles = [np.asarray([one.x.mean(), one.y.mean()]) for one in made.series]
    for one, middle in zip(made.series, middles, strict=True):
        assert len(one.x) == 30
        off = np.hypot(one.x - middle[0], one.y - middle[1]).max()
        assert off < min(np.linalg.norm(middle - other) for other in middles if other is not middle)
    again = make("tsne", [store], column="kind", vectors=str(vectors))
    assert all((a.x == b.x).all() for a, b in zip(made.series, again.series, strict=True))
    for suffix in (".svg", ".png", ".csv"):
        written = plot("tsne", [store], tmp_path / f"f{suffix}", column="kind",
                       vectors=str(vectors))  # fmt: skip
        assert written.stat().st_size > 3000
    assert len(written.read_text().splitlines()) == 91


def test_basic_block_vectors_need_no_training(tmp_path: Path) -> None:
    """A file, and a store of it: colours of the phases that `tokmill simpoint` finds."""
    draw = np.random.default_rng(0)
    phase = np.arange(48) // 8 % 3
    rows = [
        {4 * int(kind) + b: int(draw.integers(500, 600)) for b in range(1, 5)} for kind in phase
    ]
    lines = ("T" + "".join(f":{b}:{n} " for b, n in row.items()) + "\n" for row in rows)
    trace = tmp_path / "program.bb"
    trace.write_text("".join(lines) + "T\n")
    found = make("tsne", [trace])
    assert found.title == "t-SNE of basic block vectors: 48 of 49 records"
    matrix, ids = as_matrix(read(trace))
    labels = simpoints(matrix, ids).labels[:48]
    assert {one.label: len(one.x) for one in found.series} == {
        f"phase {n}": int((labels == n).sum()) for n in range(3)
    }
    middles = {one.label: np.asarray([one.x.mean(), one.y.mean()]) for one in found.series}
    for one in found.series:
        off = np.hypot(one.x - middles[one.label][0], one.y - middles[one.label][1]).max()
        assert off < min(np.linalg.norm(middles[one.label] - other)
                         for name, other in middles.items() if name != one.label)  # fmt: skip
    (tmp_path / "cpi.csv").write_text("cpi\n" + "".join(f"{1 + k}\n" for k in phase) + "9\n")
    store = quick_build("bbv", trace, tmp_path / "store", cpi=[str(tmp_path / "cpi.csv")])
    again = make("tsne", [store.path])
    assert all((a.x == b.x).all() for a, b in zip(found.series, again.series, strict=True))
    by_cpi = make("tsne", [store.path], column="cpi")
    assert [one.label for one in by_cpi.series] == ["1", "2", "3"]
    for arguments in ({"column": "cpi"}, {"vectors": "v.npy"}):
        with pytest.raises(UsageError, match="a file has no columns"):
            make("tsne", [trace], **arguments)


def test_phases_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three phases of different CPI, in turns, and an interval in which nothing ran."""
    phase = np.arange(48) // 8 % 3
    draw = np.random.default_rng(0)
    counts = draw.integers(500, 600, size=(48, 4))
    lines = [
        "T" + "".join(f":{4 * kind + b + 1}:{n} " for b, n in enumerate(row)) + "\n"
        for kind, row in zip(phase.tolist(), counts.tolist(), strict=True)
    ]
    (tmp_path / "a.bb").write_text("".join(lines) + "T\n")
    found = make("phases", [tmp_path / "a.bb"])
    assert found.y == "phase" and "3 simulation points" in found.title
    for one in found.series:
        assert len(set(phase[one.x.astype(int)])) == 1 and len(one.x) == 16
    assert sorted(phase[int(at)] for _, at, _ in found.marks) == [0, 1, 2]
    table = [f"{at},{counts[at].sum()},{1 + kind}" for at, kind in enumerate(phase)] + ["48,0,9"]
    (tmp_path / "a.intervals.csv").write_text("\n".join(["interval,instructions,cpi", *table]))
    again = make("phases", [tmp_path / "a.bb"])
    assert again.y == "CPI, given"
    assert all((one.y == 1 + phase[one.x.astype(int)]).all() for one in again.series)
    plot("phases", [(tmp_path / "a.bb").rename(tmp_path / "a$b^$.bb")], tmp_path / "a.svg")
    (tmp_path / "a$b^$.bb").rename(tmp_path / "a.bb")
    with pytest.raises(UsageError, match="one file"):
        make("phases", [tmp_path])
    monkeypatch.setattr(figure, "MOST", 20)
    part = make("phases", [tmp_path / "a.bb"])
    assert part.title.endswith("20 of 49 intervals")
    assert sum(len(one.x) for one in part.series) in (19, 20)


def test_numbers_are_in_parts_and_rare_words_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, vectors = groups(tmp_path, 160, 20)
    monkeypatch.setattr(figure, "embedded", lambda units: units[:, :2])
    words = make("tsne", [store], column="kind", vectors=str(vectors)).series
    assert len(words) == figure.KEYS + 1 and words[-1].label == "8 others"
    parts = make("tsne", [store], column="cost", vectors=str(vectors)).series
    assert len(parts) == figure.LEVELS and parts[0].label.startswith("0.5 to ")
    assert sum(len(one.x) for one in parts) == 160
    monkeypatch.setattr(figure, "MOST", 50)
    some = make("tsne", [store], vectors=str(vectors))
    assert "50 of 160 records" in some.title and len(some.series[0].x) == 50


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([100_001, 100_002, 100_001], ["100001", "100002"]),
        ([0.25, np.nan, -0.0, 0.0], ["0", "0.25", "(none)"]),
        (range(1_000_000, 1_000_100), ["1e+06 to 1.00002e+06", "1.00008e+06 to 1.0001e+06"]),
    ],
)
def test_different_numbers_have_different_names(values: list[float], names: list[str]) -> None:
    labels = figure._levels(np.asarray(values))
    shown = figure._ordered(labels, numbers=True)
    assert [shown[0], shown[-1]] == [names[0], names[-1]]
    assert set(names) <= set(shown) and len(shown) == min(len(set(labels)), figure.LEVELS)


def test_few_and_equal_vectors(tmp_path: Path) -> None:
    store, _ = groups(tmp_path, 4, 2)
    np.save(tmp_path / "one.npy", np.ones((4, 3), np.float32))
    assert len(make("tsne", [store], vectors=str(tmp_path / "one.npy")).series[0].x) == 4
    np.save(tmp_path / "w.npy", np.asarray([[1], [-1], [2], [0]], np.float32))
    with pytest.raises(UsageError, match="3 vectors that are not zeros"):
        make("tsne", [store], vectors=str(tmp_path / "w.npy"))


def test_what_is_refused(tmp_path: Path) -> None:
    store, vectors = groups(tmp_path, 6, 2)
    with pytest.raises(UsageError, match="nothing says which vectors"):
        make("tsne", [store])
    with pytest.raises(UsageError, match="'token' is not a column with a value per record"):
        make("tsne", [store], column="token", vectors=str(vectors))
    with pytest.raises(UsageError, match="of one store"):
        make("tsne", [store, store], vectors=str(vectors))
    with pytest.raises(UsageError, match="takes no vectors"):
        make("lengths", [store], vectors=str(vectors))
