"""The figures `tsne`, vectors in two dimensions, and `phases`, an execution over time."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from tokmill import plugins
from tokmill.base.errors import UsageError, nearest
from tokmill.base.progress import elapsed, human_count
from tokmill.bbv.points.choose_points import load
from tokmill.bbv.points.executions import as_matrix, block_vectors
from tokmill.bbv.points.simpoint import project, simpoints
from tokmill.bbv.traces.read import SIDECARS, read, stem_of
from tokmill.builds.mining.interval_vectors import UNIT, VectorTable, rounded
from tokmill.report.pages.figures import Figure, Series, refuse
from tokmill.store.schema import Array
from tokmill.store.store import Store

MOST = 5000
"""Points that are drawn; of more records a random part is."""
FEWEST = 4
DIMENSIONS = 100
"""Dimensions of projected block vectors, as `tokmill build mine` compares them."""
PERPLEXITY = 30
KEYS = 12
"""Values of a key with a colour of their own, the most frequent; the others share one."""
PHASES = 6
"""Phases with a colour of their own."""
LEVELS = 5
"""Parts, equally many records each, into which numbers are put."""


def tsne(paths: Sequence[Path], column: str = "", vectors: str = "") -> Figure:
    """Return vectors of a store's records in two dimensions (van der Maaten, Hinton, JMLR 2008).

    Near are vectors of small angle; distances between far groups mean nothing. Vectors of zeros
    are left out. The same store gives the same figure.

    Args:
        paths: one store, or a file of basic block vectors.
        column: of the records, for colours: strings, or numbers in five equal parts. Basic block
            vectors without one have a colour for each phase, a cluster of `tokmill simpoint`.
        vectors: name of an overlay with vectors, or an .npy file with a row a record. Without it
            the figure is of basic block vectors, projected at random as by `build mine`.
    """
    store = check_tsne(paths, column, vectors)
    if store is not None and vectors:
        count, chosen = len(store), sampled(len(store))
        units = VectorTable(store, vectors).units(chosen)
    else:
        intervals = read(paths[0]) if store is None else block_vectors(store)
        count, chosen = len(intervals), sampled(len(intervals))
        matrix, ids = as_matrix(intervals)
        units = rounded(project(matrix[chosen], ids, DIMENSIONS))
    filled = (units != 0).any(axis=1)
    chosen, units = chosen[filled], units[filled] / UNIT
    if len(chosen) < FEWEST:
        raise UsageError(
            f"{human_count(len(chosen), 'vector')} that are not zeros",
            where=str(paths[0]),
            hint=f"at least {FEWEST} are needed",
        )
    labels = np.full(len(chosen), "records")
    if store is not None and column:
        labels = keys_of(store, chosen, column)
    elif not vectors:
        phases = simpoints(matrix, ids).labels[chosen]
        labels = merge_rare(np.asarray([f"phase {phase}" for phase in phases]))
    with elapsed(f"t-SNE of {len(chosen):,} vectors"):
        places = embedded(units)
    numbers = store is not None and bool(column) and store.schema[column].dtype != "utf8"
    series = [
        Series(label, places[labels == label, 0], places[labels == label, 1], number)
        for number, label in enumerate(_ordered(labels, numbers=numbers))
    ]
    title = f"t-SNE of {vectors or 'basic block vectors'}"
    if len(chosen) < count:
        title += f": {len(chosen):,} of {count:,} records"
    return Figure(title, "t-SNE 1", "t-SNE 2", "points", series)


def phases(paths: Sequence[Path], column: str = "") -> Figure:
    """Return an execution over time, in colours of the phases of `tokmill simpoint`.

    A point is an interval: its CPI where `NAME.intervals.csv` lies beside the trace, else the
    number of its phase. Vertical lines are the simulation points. Intervals without instructions
    are left out; of more than `MOST` a random part is drawn, which the title says.
    """
    refuse("phases", column=column)
    if len(paths) != 1 or not paths[0].is_file():
        raise UsageError(
            "the figure phases is of one file of basic block vectors",
            hint="`tokmill bbv profile` writes NAME.bb.gz",
        )
    stem = stem_of(paths[0])
    costs = stem.with_name(stem.name + SIDECARS["cpi"])
    trace = load(stem.name, paths[0], None, costs if costs.is_file() else None, quiet=True)
    chosen = simpoints(trace.vectors, trace.ids)
    height = chosen.labels if trace.cpi is None else trace.cpi
    filled = np.asarray(trace.vectors.sum(axis=1)).reshape(-1) > 0
    drawn = np.zeros(len(filled), bool)
    drawn[sampled(len(filled))] = True
    filled &= drawn
    labels = merge_rare(np.asarray([f"phase {one}" for one in chosen.labels[filled]]), PHASES)
    intervals, height = np.flatnonzero(filled).astype(float), height[filled]
    series = [
        Series(label, intervals[labels == label], height[labels == label], number)
        for number, label in enumerate(_ordered(labels, numbers=False))
    ]
    marks = [("", float(interval), PHASES - 1) for interval in chosen.intervals]
    unit = "phase" if trace.cpi is None else f"CPI, {trace.kind}"
    title = f"{stem.name}: {human_count(len(marks), 'simulation point')}"
    if not drawn.all():
        title += f"; {drawn.sum():,} of {len(drawn):,} intervals"
    return Figure(title, "interval", unit, "points", series, marks=marks)


def check_tsne(paths: Sequence[Path], column: str, vectors: str) -> Store | None:
    """Return the store that is drawn, None for a file of block vectors; refuse anything else."""
    if len(paths) != 1:
        raise UsageError(
            "the figure tsne is of one store",
            hint=f"name one; of more than {MOST:,} records some are drawn at random",
        )
    store = None if paths[0].is_file() else Store(paths[0])
    if store is None and (column or vectors):
        raise UsageError(
            "a file has no columns and no overlays",
            where=str(paths[0]),
            hint="`tokmill build bbv FILE -o STORE` makes a store of basic block vectors",
        )
    if store is not None and not vectors and not {"block", "count"} <= set(store.schema):
        raise UsageError(
            "nothing says which vectors",
            where=str(paths[0]),
            hint="--vectors OVERLAY or F.npy; a store of intervals needs none",
        )
    return store


def sampled(count: int) -> Array:
    """Return the records that are drawn, at most `MOST`, in their order."""
    return np.sort(np.random.default_rng(0).permutation(count)[:MOST])


def embedded(units: Array) -> Array:
    """Return places in two dimensions, (n, 2), of vectors of length 1, (n, width)."""
    manifold = plugins.require("sklearn.manifold")
    limits = plugins.require("threadpoolctl").threadpool_limits
    method = manifold.TSNE(
        2,
        perplexity=min(PERPLEXITY, (len(units) - 1) / 3),
        init="pca" if units.shape[1] > 1 else "random",
        random_state=0,
    )
    # Equal vectors have no principal components.
    if not np.ptp(units, axis=0).any():
        return np.zeros((len(units), 2))
    with limits(1):
        places: Array = method.fit_transform(units.astype(np.float32))
    return places


def keys_of(store: Store, records: Array, column: str) -> Array:
    """Return a label of each record, str, by one of its columns; at most `KEYS` + 1 differ."""
    of_column = store.schema.get(column)
    if of_column is None or of_column.per != "record" or of_column.width:
        usable = [name for name, c in store.schema.items() if c.per == "record" and not c.width]
        raise UsageError(
            f"{column!r} is not a column with a value per record",
            where=str(store.path),
            hint=nearest(column, usable),
        )
    if of_column.dtype != "utf8":
        return _levels(store.column(column)[records].astype(np.float64))
    words: list[str] = []
    for number, entry in enumerate(store.shards):
        words += store.shard(number).strings(column, 0, entry.records)
    labels = np.asarray(words, object)[records].astype(str)
    labels[labels == ""] = "(none)"
    return merge_rare(labels)


def merge_rare(labels: Array, most: int = KEYS) -> Array:
    names, times = np.unique(labels, return_counts=True)
    rare = names[np.argsort(-times, kind="stable")[most:]]
    if len(rare) > 1:
        labels = labels.astype(object)
        labels[np.isin(labels.astype(str), rare)] = f"{len(rare):,} others"
    return labels.astype(str)


def _levels(values: Array) -> Array:
    """Return the part of each number: "0.5 to 0.7"."""
    finite = values[np.isfinite(values)]
    distinct = np.unique(finite)
    labels = np.full(len(values), "", object)
    if len(distinct) <= LEVELS:
        for value, text in zip(distinct, _texts(distinct, 4), strict=True):
            labels[values == value] = text
    else:
        edges = np.unique(np.quantile(finite, np.linspace(0, 1, LEVELS + 1)))
        for (low, high), (first, last) in zip(
            pairwise(edges), pairwise(_texts(edges, 3)), strict=True
        ):
            labels[(values >= low) & (values <= high)] = f"{first} to {last}"
    labels[~np.isfinite(values)] = "(none)"
    return labels.astype(str)


def _texts(numbers: Array, digits: int) -> list[str]:
    """Return different numbers as different texts, with as few digits as that needs."""
    texts = [f"{number:z.{digits}g}" for number in numbers]
    return texts if digits >= 17 or len(set(texts)) == len(texts) else _texts(numbers, digits + 1)


def _ordered(labels: Array, *, numbers: bool) -> list[str]:
    """Return labels in order: numbers rising, words by how many records they have."""
    names, times = np.unique(labels, return_counts=True)
    if numbers:

        def value(name: str) -> float:
            return float("inf") if name == "(none)" else float(name.split()[0])

        return sorted(names.tolist(), key=value)
    order = sorted(
        zip(names.tolist(), times.tolist(), strict=True),
        key=lambda pair: (pair[0].endswith(" others"), -pair[1], pair[0]),
    )
    return [name for name, _ in order]
