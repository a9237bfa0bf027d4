"""The numbers of figures; `plot.py` draws them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, check_name, nearest
from tokmill.base.progress import human_count
from tokmill.formats.notes import lengths as record_lengths
from tokmill.report.comparison.compare_runs import common_name, group_by_seed, settings_of
from tokmill.report.comparison.comparison_table import csv_text
from tokmill.report.comparison.run_summaries import RunSummary, read_runs
from tokmill.report.describe.pickles import PICKLES, lengths_of_pickle
from tokmill.report.describe.recogniser import short_names
from tokmill.store.checks.stats import count, id_columns, length_figures
from tokmill.store.manifest import canonical_digest
from tokmill.store.marks import has_store_files
from tokmill.store.schema import Array
from tokmill.store.store import Store

POINTS = 600
"""Largest number of points of a rank-frequency curve: more would not be visible on a log axis."""
COVERED = (90, 95, 99, 99.9)
"""Shares of the tokens, in per cent, for which the number of ids that cover them is shown."""
LOWEST, HIGHEST = "lowest", "highest"
OF_VECTORS = "tsne"


@dataclass(frozen=True)
class Series:
    """One curve or histogram: x and y (of bars, x are edges, one more than y)."""

    label: str
    x: Array
    y: Array
    colour: int
    line: str = "-"
    """Style of a curve: solid (-), dashed (--) or dotted (:)."""
    more: dict[str, Array] = field(default_factory=dict)
    """Further columns of the CSV; `LOWEST` and `HIGHEST` are drawn as a band."""


@dataclass(frozen=True)
class Figure:
    """A figure before it is drawn."""

    title: str
    x: str
    y: str
    form: Literal["line", "bars", "points"]
    series: list[Series]
    log_x: int = 0
    """Base of the logarithmic axis; 0: linear."""
    log_y: int = 0
    percent: bool = False
    """y is a share, shown as per cent."""
    marks: list[tuple[str, float, int]] = field(default_factory=list)
    """(label, x, colour) of vertical lines."""


def lengths(paths: Sequence[Path], column: str = "") -> Figure:
    """Return the histogram of lengths: of records of stores, or of sequences in pickles."""
    refuse("lengths", column=column)
    tables = [_length_table(path) for path in paths]
    units = {unit for unit, _, _ in tables}
    if len(units) > 1:
        raise UsageError(
            f"lengths in {' and in '.join(sorted(units))} do not fit into one figure",
            hint="draw them one by one",
        )
    return length_figure(short_names(paths), [t[1:] for t in tables], units.pop())


def each_length(paths: Sequence[Path], **options: Any) -> Iterator[bytes]:
    """Yield as CSV each of what `lengths` counts: series, number in it, length, unit."""
    refuse("lengths", **options)
    yield csv_text([["series", "number", "length", "in"]]).encode()
    for label, path in zip(short_names(paths), paths, strict=True):
        if path.suffix.lower() in PICKLES:
            unit, lengths = lengths_of_pickle(path)
            parts = iter([lengths])
        else:
            unit, parts = "tokens", record_lengths(Store(path))
        number = itertools.count()
        for part in parts:
            yield csv_text((label, next(number), n, unit) for n in part.tolist()).encode()


def length_figure(
    labels: Sequence[str], tables: Sequence[tuple[Array, Array]], unit: str = "tokens"
) -> Figure:
    """Return the histogram of tables (lengths in rising order, number of each)."""
    edges, base = length_edges(np.concatenate([lengths for lengths, _ in tables]))
    series, marks = [], []
    for i, (label, (lengths, times)) in enumerate(zip(labels, tables, strict=True)):
        # Length 0 is not on a logarithmic axis, so it is counted in its bin from 0.5.
        heights, _ = np.histogram(np.maximum(lengths, edges[0]), edges, weights=times)
        share = heights / max(times.sum(), 1) * 100
        alone = len(tables) == 1
        series.append(
            Series(label, edges, heights, i)
            if alone
            else Series(label, edges, share, i, more={"records": heights})
        )
        median = length_figures(lengths, times).median
        marks.append((f"median {median:,.1f}", median, i))
    return Figure(
        "Lengths of records",
        f"length of a record ({unit})",
        "records" if len(tables) == 1 else "share of records (%)",
        "bars",
        series,
        log_x=base,
        marks=marks,
    )


def length_edges(lengths: Array) -> tuple[Array, int]:
    """Return the edges of bins for lengths, and the base of their axis (0: linear).

    Lengths within a factor of 32 get at most 60 bins of equal width. Otherwise there are two bins
    an octave with whole edges, and length 0 has its own bin, 0.5 … 1.
    """
    if not len(lengths):
        return np.asarray([0.0, 1.0]), 0
    low, high = int(lengths.min()), int(lengths.max())
    if high <= 32 * max(low, 1):
        step = -(-(high - low + 1) // 60)
        return np.arange(low, high + step + 1, step) - 0.5, 0
    octaves = high.bit_length()
    edges = np.unique(np.ceil(2 ** (np.arange(2 * octaves + 1) / 2) - 1e-9))
    start = 0 if low == 0 else np.searchsorted(edges, low, side="right") - 1
    edges = edges[start:]
    edges = edges[: np.searchsorted(edges, high, side="right") + 1]
    return (np.append(0.5, edges) if low == 0 else edges), 2


def frequency(paths: Sequence[Path], column: str = "") -> Figure:
    """Return the share of each id by rank, for a column of stores or for counted vocabularies."""
    vocabularies = plugins.require("tokmill.x86.tokens.vocabularies.vocabulary")
    parts, names = [], set()
    for path in paths:
        if has_store_files(path) or not vocabularies.is_vocabulary(path):
            store = Store(path)
            name = column_of(store, column)
            parts.append(count(store).ids[name])
        else:
            name = column
            parts.append(_counts_of_list(path, column))
        names.add(name)
    return frequency_figure(short_names(paths), parts, names.pop() if len(names) == 1 else "")


def _counts_of_list(path: Path, column: str) -> Array:
    """Return the counts of a list; in a folder, of the list of `column`, else of the first."""
    files = plugins.require("tokmill.x86.tokens.vocabularies.vocabulary")
    if path.is_dir():
        lists = files.find_lists(path)
        if column and column not in lists:
            raise UsageError(
                f"there is no list of {column!r}", where=str(path), hint=nearest(column, lists)
            )
        tokens = lists[column or next(iter(lists))].tokens
    else:
        # Only the counts of a file matter, so any column will do.
        tokens = files.read_list(path, column="asm").tokens
    if tokens.counts is None:
        raise TokmillError(
            "the list has no counts",
            where=str(path),
            hint="use a list of `tokmill vocab build x86`, or a store",
        )
    return np.asarray(tokens.counts, np.int64)


def column_of(store: Store, column: str = "") -> str:
    """Return the named column of ids, else the first one."""
    names = id_columns(store)
    if column and column not in names:
        raise UsageError(
            f"the store has no ids in a column {column!r}",
            where=str(store.path),
            hint=nearest(column, names),
        )
    if not names:
        raise TokmillError(
            "the store has no column of ids",
            where=str(store.path),
            hint="name a column with --column: `tokmill inspect` lists them",
        )
    return column or names[0]


def frequency_figure(labels: Sequence[str], tables: Sequence[Array], column: str = "") -> Figure:
    """Return the rank-frequency curves of tables id → number of tokens; `column`: for the title."""
    series = []
    for i, (label, table) in enumerate(zip(labels, tables, strict=True)):
        order = np.lexsort((np.arange(len(table)), -table))
        order = order[: np.count_nonzero(table)]
        rank = np.arange(1, len(order) + 1)
        covered = np.cumsum(table[order]) / max(int(table.sum()), 1)
        if len(rank) > POINTS:
            thin = np.unique(np.geomspace(1, len(rank), POINTS).round().astype(np.int64))
            order, rank, covered = order[thin - 1], thin, covered[thin - 1]
        counts = table[order]
        share = counts / max(int(table.sum()), 1)
        more = {"id": order, "tokens": counts, "covered": covered}
        series.append(Series(label, rank, share, i, more=more))
    marks = []
    if len(tables) == 1 and tables[0].any():
        # With several curves these lines would hide them; the CSV has the column `covered`.
        marks = [
            (f"{share:g}% of tokens: {human_count(n, 'id')}", float(n), 0)
            for share, n in coverage(tables[0])
        ]
    title = f"Frequency of ids of {column}" if column else "Frequency of ids"
    return Figure(
        title, "rank of the id", "share of tokens", "line", series, log_x=10, log_y=10,
        percent=True, marks=marks,
    )  # fmt: skip


def coverage(table: Array) -> list[tuple[float, int]]:
    """Return (per cent, number of most frequent ids that cover this share of the tokens).

    `table`: id → tokens, with at least one token.
    """
    covered = np.cumsum(np.sort(table)[::-1])
    shares = [(share, covered[-1] * share / 100) for share in COVERED]
    return [(share, int(np.searchsorted(covered, wanted)) + 1) for share, wanted in shares]


LOSSES = {"loss": ("train", "-"), "val_loss": ("validation", "--")}
"""Metric of a run → label and style (`Series.line`) of its curve."""


def loss(paths: Sequence[Path], column: str = "") -> Figure:
    """Return the loss of runs by step, on training and on validation rows.

    Runs that differ only in seeds form one curve: their mean, with a band from the lowest to the
    highest, over the steps that all of them have.
    """
    refuse("loss", column=column)
    runs = read_runs(paths)
    return Figure("Loss", "step", loss_unit(runs), "line", curves_of(runs, LOSSES, "loss"))


def curves_of(
    runs: Sequence[RunSummary], metrics: Mapping[str, tuple[str, str]], what: str
) -> list[Series]:
    """Return metrics of runs by step, a curve for runs that differ only in seeds.

    `metrics`: name → name in the legend, and style of the line; `what`: what they are in errors.
    """
    names = short_names([run.path for run in runs])
    keys = [(canonical_digest(settings_of(run)), run.finished) for run in runs]
    series: list[Series] = []
    for colour, (numbers, _) in enumerate(group_by_seed(runs, keys)):
        label = common_name(numbers, names)
        label += f" ({len(numbers)} seeds)" if len(numbers) > 1 else ""
        members = [runs[number] for number in numbers]
        for key, (name, line) in metrics.items():
            x, y = _curves(members, key)
            if len(x):
                more = {LOWEST: y.min(0), HIGHEST: y.max(0)} if len(members) > 1 else {}
                series.append(Series(f"{label}, {name}", x, y.mean(0), colour, line, more))
        if not any(one.colour == colour for one in series):
            raise TokmillError(
                f"no {what} is logged there",
                where=", ".join(str(run.path) for run in members),
                hint="metrics.jsonl has a line from the first step",
            )
    return series


def loss_unit(runs: Sequence[RunSummary]) -> str:
    units = {run.measures.loss for run in runs}
    if len(units) == 1:
        unit = units.pop()
        return f"loss ({unit})" if unit else "loss"
    if all(unit.startswith("nats") for unit in units):
        return "loss (nats, sum over the columns of each run)"
    return "loss (of each task its own)"


def _curves(runs: Sequence[RunSummary], metric: str) -> tuple[Array, Array]:
    """Return the steps (n) at which all runs have a finite metric, and its values (runs, n)."""
    values = [{x: y for x, y in run.points(metric) if np.isfinite(y)} for run in runs]
    steps = sorted(set(values[0]).intersection(*values[1:]))
    return np.asarray(steps, float), np.asarray([[one[x] for x in steps] for one in values])


def make(kind: str, paths: Sequence[Path], column: str = "", vectors: str = "") -> Figure:
    check_name("no figure is", kind, plugins.FIGURES)
    further = {}
    if kind == OF_VECTORS:
        further = {"vectors": vectors}
    else:
        refuse(kind, vectors=vectors)
    return plugins.load(plugins.FIGURES, kind)(paths, column, **further)


def refuse(kind: str, **options: Any) -> None:
    for name, value in options.items():
        if value:
            raise UsageError(f"the figure {kind} takes no {name}", hint=f"leave out --{name}")


def write_csv(figure: Figure) -> str:
    """Return the numbers of a figure as CSV: series, x (of bars: from, to), y, further columns."""
    extra = sorted({name for s in figure.series for name in s.more})
    bars = figure.form == "bars"
    lines: list[list[Any]] = [
        ["series", *(["from", "to"] if bars else [figure.x]), figure.y, *extra]
    ]
    for series in figure.series:
        columns = [series.x[:-1], series.x[1:]] if bars else [series.x]
        lacks = np.full(len(series.y), "")
        columns += [series.y, *(series.more.get(name, lacks) for name in extra)]
        for row in zip(*(c.tolist() for c in columns), strict=True):
            whole = (
                int(one) if isinstance(one, float) and one.is_integer() else one for one in row
            )
            lines.append([series.label, *whole])
    return csv_text(lines)


def _length_table(path: Path) -> tuple[str, Array, Array]:
    if path.suffix.lower() in PICKLES:
        unit, lengths = lengths_of_pickle(path)
        return unit, *np.unique(lengths, return_counts=True)
    counts = count(Store(path))
    return "tokens", counts.lengths, counts.records
