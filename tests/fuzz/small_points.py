"""Files of simulation points, of rates of intervals, of clusters of blocks: made and read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

COUNT = 12


def make_points(folder: Path) -> Iterable[Path]:
    """Points as SimPoint 3.2 writes them."""
    from tokmill.bbv.points.simpoint_files import written

    weights = np.random.default_rng(0).dirichlet(np.ones(COUNT))
    for end, text in written(np.arange(COUNT) * 3, weights).items():
        (folder / f"a{end}").write_text(text)
    return sorted(folder.iterdir())


def read_points(folder: Path) -> Any:
    """Intervals and weights."""
    from tokmill.bbv.points.simpoint_files import read

    intervals, weights = read(folder / "a.simpoints", folder / "a.weights")
    assert (intervals >= 0).all() and abs(weights.sum() - 1) < 1e-9 and (weights >= 0).all()
    return intervals.tolist(), weights.tolist()


def make_table(folder: Path) -> Iterable[Path]:
    """Rates of intervals."""
    rows = "".join(f"{i},{i * 0.25},{1e-3 * i}\n" for i in range(COUNT))
    (folder / "t.csv").write_text(f"interval,l1,last\n{rows}")
    return [folder / "t.csv"]


def read_table(folder: Path) -> Any:
    """The columns, of all intervals and of some."""
    from tokmill.bbv.traces.interval_table import read_table as read

    found = []
    for partly in (False, True):
        columns = read(folder / "t.csv", COUNT, partly=partly)
        assert all(len(column) == COUNT for column in columns.values())
        found.append({name: repr(column.tolist()) for name, column in columns.items()})
    return found
