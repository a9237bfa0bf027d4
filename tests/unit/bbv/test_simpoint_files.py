"""`.simpoints`, `.weights`, tables of intervals: written as SimPoint does, read with care."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.bbv.points import simpoint_files
from tokmill.bbv.traces import interval_table


def put(folder: Path, points: str, weights: str) -> tuple[Path, Path]:
    (folder / "a.simpoints").write_text(points)
    (folder / "a.weights").write_text(weights)
    return folder / "a.simpoints", folder / "a.weights"


def test_simpoint_s_format() -> None:
    texts = simpoint_files.written(np.asarray([4, 0, 17]), np.asarray([0.5, 0.25, 0.25]))
    assert texts == {
        ".simpoints": "4 0\n0 1\n17 2\n",
        ".weights": "0.5 0\n0.25 1\n0.25 2\n",
    }
    labels = b"".join(simpoint_files.labels_text(np.asarray([1, 0]), np.asarray([0.0, 0.125])))
    assert labels == b"1 0\n0 0.125\n"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(30))
    intervals = np.arange(30) * 7
    texts = simpoint_files.written(intervals, weights)
    found = simpoint_files.read(*put(tmp_path, texts[".simpoints"], texts[".weights"]))
    assert (found[0] == intervals).all()
    assert np.abs(found[1] - weights).max() < 1e-8


def test_files_of_simpoint_3_2_are_read(tmp_path: Path) -> None:
    # Clusters need not be in order, nor be all of them; weights have six digits.
    pair = put(tmp_path, "33 2\n4 0\n\n# note\n8 5\n", "0.333333 0\n0.333333 2\n0.333333 5\n")
    intervals, weights = simpoint_files.read(*pair)
    assert intervals.tolist() == [4, 33, 8]
    assert weights.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("points", "weights", "said"),
    [
        ("", "", "there is no point"),
        ("1 0\n", "", "cluster 0 is not in"),
        ("1 0\n", "0.5 0\n0.5 1\n", "cluster 1 is not in"),
        ("1 0\n2 0\n", "1 0\n", "cluster 0 stands twice"),
        ("1 0 3\n", "1 0\n", "is not two numbers"),
        ("1.5 0\n", "1 0\n", "is not two numbers"),
        ("-1 0\n", "1 0\n", "interval -1 of cluster 0"),
        ("1 -1\n", "1 -1\n", "of cluster -1"),
        ("1 0\n", "nan 0\n", "weight nan of cluster 0"),
        ("1 0\n", "inf 0\n", "weight inf of cluster 0"),
        ("1 0\n", "-0.5 0\n", "weight -0.5 of cluster 0"),
        ("1 0\n2 1\n", "0.5 0\n0.3 1\n", "the weights sum to 0.8, not to 1"),
        ("9" * 40 + " 0\n", "1 0\n", "interval 999"),
        ("1 " + "9" * 5000 + "\n", "1 0\n", "two numbers|of cluster 9"),
    ],
)
def test_damaged_points_are_told(tmp_path: Path, points: str, weights: str, said: str) -> None:
    with pytest.raises(TokmillError, match=said):
        simpoint_files.read(*put(tmp_path, points, weights))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="No such file"):
        simpoint_files.read(tmp_path / "a", tmp_path / "b")


def table(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_text(text)
    return path


def test_tables_by_order_and_by_interval(tmp_path: Path) -> None:
    plain = interval_table.read_table(table(tmp_path, "l1, l2\r\n1,2\r\n3,4\r\n"), 2)
    assert {name: column.tolist() for name, column in plain.items()} == {
        "l1": [1, 3], "l2": [2, 4],
    }  # fmt: skip
    mixed = interval_table.read_table(table(tmp_path, "cpi,interval\n2.5,1\n1.5,0\n"), 2)
    assert mixed["cpi"].tolist() == [1.5, 2.5] and "interval" not in mixed
    partly = interval_table.read_table(table(tmp_path, "interval,cpi\n2,9\n"), 4, partly=True)
    assert np.isnan(partly["cpi"]).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "does not name the columns"),
        ("1,2\n3,4\n", "does not name the columns"),
        ("a,a\n1,2\n", "does not name the columns"),
        ("a\n", "no line but the header"),
        ("a\n1\n", "1 lines for 3 intervals"),
        ("a\n1\n2\nx\n", "could not convert string 'x'"),
        ("a\n1\n2\nnan\n", "a of line 3 after the header is not finite"),
        ("a,b\n1\n2\n3\n", "2 names, 1 columns"),
        ("a,b\n1,2\n3\n4,5\n", "number of columns changed"),
        ("interval,a\n0,1\n1,1\n", "1 are missing and 0 stand more than once; 0 lines"),
        ("interval,a\n0,1\n1,1\n1,1\n2,1\n", "0 are missing and 1 stand more than once"),
        ("interval,a\n0,1\n1,1\n2,1\n3,1\n", "1 lines are of other intervals"),
        ("interval,a\n0,1\n1,1\n1.5,1\n", "1 lines are of other intervals"),
        ("interval,a\n0,1\n1,1\n1e300,1\n", "1 lines are of other intervals"),
        ("\xff\n1\n", "does not name|not UTF-8|lines for"),
    ],
)
def test_damaged_tables_are_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TokmillError, match=said):
        interval_table.read_table(table(tmp_path, text), 3)


def test_part_of_a_table_needs_its_intervals(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="no column says which intervals"):
        interval_table.read_table(table(tmp_path, "cpi\n1\n"), 3, partly=True)
    with pytest.raises(TokmillError, match="there is no column 'cpi'"):
        interval_table.one_column(tmp_path, {"cpu": np.ones(1)}, ("cpi",))
