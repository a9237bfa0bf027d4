"""`tokmill simpoint` as a user meets it."""

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
    out, err = here("simpoint", "one.bb", "two.bb", "-o", "points", "--json")
    reports = json.loads(out)
    assert [one["program"] for one in reports] == ["one", "two"]
    for report, made in zip(reports, programs.values(), strict=True):
        assert report["points"] == len(np.unique(made.phase))
        assert report["speed_up"] > 3
    names = sorted(path.name for path in (tmp_path / "points").iterdir())
    assert names == [f"{n}.{e}" for n in ("one", "two") for e in ("simpoints", "weights")]
    before = (tmp_path / "points/one.simpoints").read_bytes()
    here("simpoint", "one.bb", "-o", "again")
    assert (tmp_path / "again/one.simpoints").read_bytes() == before
    assert "of what it executes" not in here("simpoint", "one.bb", "-o", "again")[1]
    err = here("simpoint", "one.bb", "-o", "most", "--points", 119)[1]
    assert "% of what it executes; shorter intervals" in err


def test_the_error_of_the_estimate(here: Here, programs: dict[str, Phases]) -> None:
    for method in ("simpoint", "two-phase"):
        (report,) = json.loads(
            here("simpoint", "one.bb", "--memory", "one.rates.csv", "--cpi", "one.cpi.csv",
                 "--method", method, "--points", 20, "--json")[0]
        )  # fmt: skip
        assert report["true_cpi"] == pytest.approx(programs["one"].truth, rel=1e-6)
        assert abs(report["error"]) < 0.1
        assert (report["low"] is None) == (method == "simpoint")


@pytest.mark.parametrize("method", ["simpoint", "two-phase"])
def test_simulate_the_points_then_estimate(
    here: Here, tmp_path: Path, programs: dict[str, Phases], method: str
) -> None:
    asked = ("simpoint", "one.bb", "--memory", "one.rates.csv", "--method", method)
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
    both = "interval,cpi_measured,cpi\n" + "".join(f"{line},99\n" for line in lines)
    (tmp_path / "both.csv").write_text(both)
    out, _ = here(*asked, "--points", 12, "--simulated", "both.csv", "--json")
    assert json.loads(out)[0]["estimated_cpi"] == report["estimated_cpi"]
    (tmp_path / "done.csv").write_text("interval,cpi\n" + "\n".join(lines[1:]) + "\n")
    _, err = here(*asked, "--points", 12, "--simulated", "done.csv", code=1)
    assert f"the CPI of 1 of 12 points is missing, such as of interval {chosen[0]}" in err


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("one.bb",), "nothing says where the points go", 2),
        (("one.bb", "one.bb", "-o", "x"), "would both be called 'one'", 2),
        (("one.bb", "-o", "x", "--method", "simpoints"), "did you mean 'simpoint'?", 2),
        (
            ("one.bb", "-o", "x", "--points", "9", "--max-points", "4"),
            "limits the choice by BIC",
            2,
        ),
        (
            ("one.bb", "-o", "x", "--method", "two-phase", "--max-points", "4"),
            "limits the choice by BIC",
            2,
        ),
        (("one.bb", "two.bb", "-o", "x", "--cpi", "one.cpi.csv"), "1 file of --cpi for 2 files", 2),
        (
            ("one.bb", "-o", "x", "--cpi", "two.cpi.csv"),
            "30 missing intervals: 90 here and 120 in the trace",
            1,
        ),
        (("one.cpi.csv", "-o", "x"), "interval", 1),
        (("empty.bb", "-o", "x"), "", 1),
        (("zeros.bb", "-o", "x"), "no interval has instructions", 1),
        (("bad.bb", "--cpi", "bad.csv"), "cpi is -1", 1),
        (("bad.bb", "--cpi", "no.csv"), "no.csv: no interval with instructions has a CPI", 1),
        (("zeros.bb", "--cpi", "none-of-2.csv"), "no interval has instructions", 1),
        (("none.bb", "-o", "x"), "none.bb: there is no such file", 1),
        (("bad.bb", "--cpi", "none.csv"), "none.csv: there is no such file", 1),
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
    (tmp_path / "no.csv").write_text("instructions,cpi\n5,\n")
    (tmp_path / "none-of-2.csv").write_text("instructions,cpi\n0,\n0,\n")
    _, err = here("simpoint", *arguments, code=code)
    assert said in err and "hint:" in err
    assert not (tmp_path / "x").exists()


def test_intervals_that_are_left_out_are_counted_once(here: Here, tmp_path: Path) -> None:
    (tmp_path / "a.bb").write_text("T:1:10\nT\nT:1:10\nT\nT:2:10\n")
    (tmp_path / "a.csv").write_text("interval,cpi\n0,1\n1,\n2,\n3,5\n4,2\n")
    (report,) = json.loads(here("simpoint", "a.bb", "--cpi", "a.csv", "--json")[0])
    assert (report["empty"], report["unmeasured"], report["instructions"]) == (2, 1, 20)
    assert report["true_cpi"] == 1.5


def test_a_trace_that_may_be_cut_off_is_told(here: Here, tmp_path: Path) -> None:
    (tmp_path / "a.bb").write_text("T:1:10\nT:1:10\nT:2:1")
    assert "may be cut off" in here("simpoint", "a.bb", "-o", "p")[1]
    assert json.loads(here("simpoint", "a.bb", "-o", "p", "--json")[0])[0]["torn"]
