"""`tokmill simpoint` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from phases import Phases, phases

Here = Callable[..., tuple[str, str]]


def put(folder: Path, name: str, made: Phases) -> None:
    """Write a program's block vectors, rates and CPI."""
    lines = []
    for row in made.vectors:
        cells = zip(row.indices.tolist(), row.data.tolist(), strict=True)
        lines.append("T" + " ".join(f":{block + 1}:{int(count)}" for block, count in cells))
    (folder / f"{name}.bb").write_text("\n".join(lines) + "\n")
    rates = np.stack(list(made.rates.values()), axis=1)
    np.savetxt(folder / f"{name}.rates.csv", rates, delimiter=",", header="d1,last", comments="")
    numbered = np.stack([np.arange(len(made.cpi)), made.cpi], axis=1)
    np.savetxt(
        folder / f"{name}.cpi.csv", numbered, fmt=["%d", "%.9g"], delimiter=",",
        header="interval,cpi", comments="",
    )  # fmt: skip


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, Phases]:
    found = {"one": phases(11, intervals=120), "two": phases(12, intervals=90)}
    for name, made in found.items():
        put(tmp_path, name, made)
    return found


def test_points_of_two_programs(here: Here, tmp_path: Path, programs: dict[str, Phases]) -> None:
    out, err = here("simpoint", "one.bb", "two.bb", "-o", "points", "--labels", "--json")
    reports = json.loads(out)
    assert [one["program"] for one in reports] == ["one", "two"]
    for report, made in zip(reports, programs.values(), strict=True):
        assert report["points"] == len(np.unique(made.phase))
        assert report["speed_up"] > 3
    names = sorted(path.name for path in (tmp_path / "points").iterdir())
    assert names == [f"{n}.{e}" for n in ("one", "two") for e in ("labels", "simpoints", "weights")]
    before = (tmp_path / "points/one.simpoints").read_bytes()
    here("simpoint", "one.bb", "-o", "again")
    assert (tmp_path / "again/one.simpoints").read_bytes() == before
    assert "of what it executes" not in here("simpoint", "one.bb", "-o", "again")[1]
    err = here("simpoint", "one.bb", "-o", "most", "--points", 119)[1]
    assert "% of what it executes; shorter intervals" in err
    out, err = here("simpoint", "one.bb", "--from", "points", "--cpi", "one.cpi.csv")
    assert "one" in out and "%" in out


def test_the_error_of_the_estimate(here: Here, programs: dict[str, Phases]) -> None:
    for method in ("simpoint", "two-phase"):
        (report,) = json.loads(
            here("simpoint", "one.bb", "--memory", "one.rates.csv", "--cpi", "one.cpi.csv",
                 "--method", method, "--points", 20, "--json")[0]
        )  # fmt: skip
        assert report["true_cpi"] == pytest.approx(programs["one"].truth, rel=1e-6)
        assert abs(report["error"]) < 0.1
        assert (report["low"] is None) == (method == "simpoint")


def test_simulate_the_points_then_estimate(
    here: Here, tmp_path: Path, programs: dict[str, Phases]
) -> None:
    asked = ("simpoint", "one.bb", "--memory", "one.rates.csv", "--method", "two-phase")
    here(*asked, "--points", 12, "-o", "points")
    chosen = [
        int(line.split()[0])
        for line in (tmp_path / "points/one.simpoints").read_text().splitlines()
    ]
    lines = [f"{number},{programs['one'].cpi[number]:.9g}" for number in chosen]
    (tmp_path / "done.csv").write_text("interval,cpi\n" + "\n".join(lines) + "\n")
    out, _ = here(*asked, "--points", 12, "--simulated", "done.csv", "--json")
    (report,) = json.loads(out)
    assert report["estimated_cpi"] == pytest.approx(programs["one"].truth, rel=0.1)
    (tmp_path / "done.csv").write_text("interval,cpi\n" + "\n".join(lines[1:]) + "\n")
    _, err = here(*asked, "--points", 12, "--simulated", "done.csv", code=1)
    assert f"the CPI of 1 of 12 points is missing, such as of interval {chosen[0]}" in err


def test_how_many_points_a_target_needs(here: Here, programs: dict[str, Phases]) -> None:
    asked = ("simpoint", "one.bb", "--points", "20", "--simulated", "one.cpi.csv", "--json")
    few = json.loads(here(*asked, "--target-error", "20%")[0])[0]
    many = json.loads(here(*asked, "--target-error", "0.3%")[0])[0]
    # SimPoint's points tell nothing about their error.
    assert few["method"] == many["method"] == "two-phase" and few["points"] == many["points"] == 20
    assert few["points_needed"] < 20 < many["points_needed"]


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("one.bb",), "nothing says where the points go", 2),
        (("one.bb", "one.bb", "-o", "x"), "would both be called 'one'", 2),
        (("one.bb", "-o", "x", "--method", "simpoints"), "did you mean 'simpoint'?", 2),
        (("one.bb", "-o", "x", "--target-error", "5%"), "nothing says how large the error is", 2),
        (("one.bb", "-o", "x", "--target-error", "-5%"), "is no share", 2),
        (("one.bb", "-o", "x", "--target-error", "nan"), "is no share", 2),
        (("one.bb", "-o", "x", "--confidence", "1"), "a confidence of 1", 2),
        (("one.bb", "two.bb", "-o", "x", "--cpi", "one.cpi.csv"), "1 file of --cpi for 2 files", 2),
        (
            ("one.bb", "-o", "x", "--cpi", "two.cpi.csv"),
            "30 missing intervals: 90 here and 120 in the trace",
            1,
        ),
        (("one.bb", "-o", "x", "--method", "two-phase", "--labels"), "--labels are of clusters", 2),
        (("one.cpi.csv", "-o", "x"), "interval", 1),
        (("empty.bb", "-o", "x"), "", 1),
        (("zeros.bb", "-o", "x"), "no interval has instructions", 1),
        (("bad.bb", "--cpi", "bad.csv"), "cpi is -1", 1),
        (("one.bb", "-o", "x", "--from", "p", "--labels"), "--from does not use --labels", 2),
        (("one.bb", "-o", "x", "--from", "p", "--points", "3"), "does not use --points", 2),
        (("hole.bb", "-o", "x", "--from", "nothing"), "no point lies in an interval that has", 1),
    ],
)
def test_what_is_refused(
    here: Here, tmp_path: Path, programs: dict[str, Phases], arguments: tuple[str, ...], said: str,
    code: int,
) -> None:  # fmt: skip
    (tmp_path / "empty.bb").write_bytes(b"")
    (tmp_path / "zeros.bb").write_text("T:1:0\nT:2:0\n")
    (tmp_path / "bad.bb").write_text("T:1:5\n")
    (tmp_path / "bad.csv").write_text("cpi\n-1\n")
    (tmp_path / "hole.bb").write_text("T:1:0\nT:1:5\n")
    points(tmp_path / "nothing", "hole", {0: 1.0})
    _, err = here("simpoint", *arguments, code=code)
    assert said in err and "hint:" in err
    assert not (tmp_path / "x").exists()


def points(folder: Path, name: str, weights: dict[int, float]) -> None:
    """Write points as SimPoint does: the weight of each interval."""
    folder.mkdir()
    rows = list(enumerate(weights.items()))
    for end, which in (("simpoints", 0), ("weights", 1)):
        lines = [f"{pair[which]} {cluster}\n" for cluster, pair in rows]
        (folder / f"{name}.{end}").write_text("".join(lines))


def test_a_given_point_without_a_cpi_is_left_out(here: Here, tmp_path: Path) -> None:
    """The first interval of a measured profile has none, and SimPoint may choose it."""
    (tmp_path / "a.bb").write_text("T:1:10\nT:1:10\nT:2:10\nT:2:10\n")
    (tmp_path / "a.csv").write_text("interval,cpi\n0,\n1,4\n2,6\n3,8\n")
    points(tmp_path / "p", "a", {0: 0.5, 1: 0.25, 3: 0.25})
    command = ("simpoint", "a.bb", "--from", "p", "--cpi", "a.csv")
    [report] = json.loads(here(*command, "--json")[0])
    assert report["true_cpi"] == report["estimated_cpi"] == 6
    assert report["points"] == 2 and report["points_left_out"] == 1
    assert "1 point of intervals without instructions or a CPI left out" in here(*command)[1]


def test_a_trace_that_may_be_cut_off_is_told(here: Here, tmp_path: Path) -> None:
    (tmp_path / "a.bb").write_text("T:1:10\nT:1:10\nT:2:1")
    assert "may be cut off" in here("simpoint", "a.bb", "-o", "p")[1]
    assert json.loads(here("simpoint", "a.bb", "-o", "p", "--json")[0])[0]["torn"]
