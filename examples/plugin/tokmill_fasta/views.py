"""The figure `tokmill plot gc STORE…` and the command `tokmill gc STORE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tokmill.report.pages.figures import Figure, Series
from tokmill.store.store import Store
from tokmill.terminal.frame import AsJson
from tokmill.terminal.output import print_json, print_table


def shares(store: Store) -> list[tuple[str, float]]:
    """Return name and share of G and C of each record."""
    records = ((store.record(n)) for n in range(len(store)))
    return [(r["name"], float(np.isin(r["token"], (1, 2)).mean())) for r in records]


def figure(paths: Sequence[Path], column: str = "", **options: Any) -> Figure:
    """Return a histogram of the shares, a series for each store."""
    series = []
    for number, path in enumerate(paths):
        counts, edges = np.histogram([gc for _, gc in shares(Store(path))], 20, (0, 1))
        series.append(Series(path.name, edges, counts, number))
    return Figure("Share of G and C", "share of a sequence", "sequences", "bars", series)


def command(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store of sequences.")],
    as_json: AsJson = False,
) -> None:
    """List the sequences of a store with their share of G and C."""
    rows = shares(Store(store))
    if as_json:
        print_json([{"name": name, "gc": gc} for name, gc in rows])
    else:
        print_table(["sequence", "G and C"], [[name, f"{gc:.1%}"] for name, gc in rows])
