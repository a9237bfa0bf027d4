"""Figures: their numbers, their bytes, and what they refuse."""

import csv
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure as MatplotlibFigure

from report_stores import write_run, write_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.report.pages import figures
from tokmill.report.pages.plot import draw, plot, render

PNG = b"\x89PNG\r\n\x1a\n"


@settings(max_examples=100, deadline=None)
@given(found=st.sets(st.integers(0, 5000), min_size=1))
def test_every_length_has_a_bin(found: set[int]) -> None:
    lengths = np.asarray(sorted(found))
    series = figures.length_figure(["s"], [(lengths, np.full(len(found), 2))]).series[0]
    assert series.y.sum() == 2 * len(found)
    assert (np.diff(series.x) > 0).all()
    assert series.y[0] > 0
    assert series.y[-1] > 0


def test_csv_holds_what_is_drawn(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[[2, 2, 3, 0], [2, 0]]])
    written = plot("frequency", [store.path], tmp_path / "f.csv")
    rows = list(csv.reader(io.StringIO(written.read_text())))
    assert rows[0] == ["series", "rank of the id", "share of tokens", "covered", "id", "tokens"]
    assert [row[4:] for row in rows[1:]] == [["2", "3"], ["0", "2"], ["3", "1"]]
    assert [float(row[3]) for row in rows[1:]] == pytest.approx([3 / 6, 5 / 6, 1])
    plot("lengths", [store.path], tmp_path / "l.png")
    rows = list(csv.reader(io.StringIO(figures.write_csv(figures.lengths([store.path])))))
    assert rows[0] == ["series", "from", "to", "records"]
    assert sum(int(row[3]) for row in rows[1:]) == 2
    assert (tmp_path / "l.png").read_bytes().startswith(PNG)


def test_a_csv_has_each_length(tmp_path: Path) -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2]
    one = write_store(tmp_path / "a,b", [[[2] * n for n in lengths[:3]], [[2] * 7]])
    two = write_store(tmp_path / "c", [[[2] * n for n in lengths[3:]]])
    written = plot("lengths", [one.path, two.path], tmp_path / "new/l.csv")
    rows = list(csv.reader(io.StringIO(written.read_text())))
    assert rows[0] == ["series", "number", "length", "in"]
    wanted = [("a,b", [*lengths[:3], 7]), ("c", lengths[3:])]
    assert rows[1:] == [
        [name, str(i), str(length), "tokens"]
        for name, found in wanted
        for i, length in enumerate(found)
    ]
    with pytest.raises(UsageError, match="takes no column"):
        plot("lengths", [one.path], tmp_path / "l.csv", column="token")


def test_how_many_ids_cover_how_much() -> None:
    table = np.asarray([0, 5, 900, 50, 40, 4, 1])
    assert figures.coverage(table) == [(90, 1), (95, 2), (99, 3), (99.9, 5)]
    alone = figures.frequency_figure(["a"], [table])
    assert [(label, x) for label, x, _ in alone.marks] == [
        ("90% of tokens: 1 id", 1), ("95% of tokens: 2 ids", 2),
        ("99% of tokens: 3 ids", 3), ("99.9% of tokens: 5 ids", 5),
    ]  # fmt: skip
    assert figures.frequency_figure(["a", "b"], [table, table]).marks == []


def test_lengths_of_pickles(tmp_path: Path) -> None:
    ids = [{"O0": [[{"opnd_ids": [1, 2]}], [{"opnd_ids": []}]]}, {"O3": [[{"opnd_ids": [1]}]]}]
    (tmp_path / "main_blame.pkl").write_bytes(pickle.dumps(ids))
    figure = figures.lengths([tmp_path / "main_blame.pkl"])
    assert figure.series[0].y.tolist() == [1, 1, 1]
    assert figure.x == "length of a record (opcodes and operands)"
    store = write_store(tmp_path / "s", [[[2, 0]]])
    with pytest.raises(UsageError, match="do not fit into one figure"):
        figures.lengths([tmp_path / "main_blame.pkl", store.path])
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(TokmillError, match="holds no sequences"):
        figures.lengths([tmp_path / "x.pkl"])
    (tmp_path / "x.pkl").write_bytes(2 * pickle.dumps(ids))
    with pytest.raises(TokmillError, match="bytes follow the pickle"):
        figures.lengths([tmp_path / "x.pkl"])


def test_a_loss_has_the_unit_that_its_run_records(tmp_path: Path) -> None:
    lines: list[dict[str, float | None]] = [{"step": 1, "loss": 3.0}]
    run = write_run(tmp_path / "r", lines)
    assert figures.loss([run]).y == "loss"
    recorded = {"fingerprint": "f" * 64, "measures": {"loss": "nats, sum over 2 columns"}}
    (run / "schema.json").write_text(json.dumps(recorded))
    assert figures.loss([run]).y == "loss (nats, sum over 2 columns)"


def test_equal_figures_are_equal_bytes(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[[2, 3, 0], []]])
    figure = figures.lengths([store.path])
    for form in ("svg", "png", "pdf"):
        assert render(figure, form) == render(figure, form)
    assert render(figure, "pdf").startswith(b"%PDF")
    ElementTree.fromstring(render(figure, "svg"))
    inline = render(figure, "svg", page="a").decode()
    ElementTree.fromstring(inline)
    assert "currentColor" in inline
    assert 'role="img"' in inline
    assert "<?xml" not in inline


def test_several_stores_are_compared_by_share(tmp_path: Path) -> None:
    paths = [
        write_store(tmp_path / name / "s$x", [[[2, 0]] * n, [[2] * 300]]).path
        for n, name in ((3, "_a"), (1, "b"))
    ]
    figure = figures.lengths(paths)
    assert [series.label for series in figure.series] == ["_a/s$x", "b/s$x"]
    assert all(series.y.sum() == pytest.approx(100) for series in figure.series)
    assert figure.log_x == 2
    plot("lengths", paths, tmp_path / "out/l.svg")
    plot("frequency", paths, tmp_path / "out/f.png")


def test_loss_of_runs(tmp_path: Path) -> None:
    lines: list[dict[str, float | None]] = [
        {"step": 1, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.0},
        {"step": 3, "val_loss": 2.5},
    ]  # fmt: skip
    run = write_run(tmp_path / "r", lines)
    with (run / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 4, "lo')
    figure = figures.loss([run])
    assert [series.label for series in figure.series] == ["r, train", "r, validation"]
    assert figure.series[0].y.tolist() == [3.0, 2.0]
    plot("loss", [run], tmp_path / "l.png")


def test_a_single_point_is_seen_beside_a_curve(tmp_path: Path) -> None:
    lines: list[dict[str, float | None]] = [{"step": i, "loss": 3 - i / 10} for i in range(1, 10)]
    lines.append({"step": 9, "val_loss": 2.1})
    axes = MatplotlibFigure().add_subplot()
    draw(figures.loss([write_run(tmp_path / "r", lines)]), axes)
    curve, point = axes.lines
    assert len(point.get_xdata()) == 1  # type: ignore[arg-type]
    # No line leads to it, so that it must be as wide as several.
    assert point.get_markersize() > 2 * curve.get_markersize()


def test_refusals(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[[2, 0]]])
    with pytest.raises(UsageError, match=r"\.svg, \.png or \.pdf") as caught:
        plot("lengths", [store.path], tmp_path / "a.jpg")
    assert caught.value.hint == "such as -o lengths.svg"
    with pytest.raises(UsageError, match="did you mean"):
        plot("length", [store.path], tmp_path / "a.svg")
    with pytest.raises(UsageError, match="no ids"):
        plot("frequency", [store.path], tmp_path / "a.svg", column="tokn")
    with pytest.raises(TokmillError, match="no such store"):
        plot("lengths", [tmp_path / "x"], tmp_path / "a.svg")
    with pytest.raises(TokmillError, match="the folder holds no run"):
        plot("loss", [store.path], tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


def test_an_empty_store_has_a_figure(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[]])
    plot("lengths", [store.path], tmp_path / "a.svg")
    plot("frequency", [store.path], tmp_path / "b.svg")


def test_matplotlib_waits_at_its_door() -> None:
    code = (
        "import sys, tokmill.report.pages.plot, tokmill.report.pages.page, tokmill.doctor;"
        "import tokmill.cli.inspect_command;"
        "print([m for m in ('matplotlib', 'jinja2', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
