"""SimPoint: a few intervals of a program that stand for all of it (Sherwood et al., ASPLOS 2002).

Intervals with similar block vectors behave similarly. They are clustered; the interval nearest to
the centre of each cluster is its simulation point, weighted by the instructions of the cluster.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.bbv.points import clusters
from tokmill.bbv.points.clusters import Floats, Ints
from tokmill.builds.mining.interval_vectors import BITS, WHOLE, projection_rows, shares_of

Matrix = Any
"""A scipy CSR matrix: scipy ships no types."""
DIMENSIONS = 15
"""SimPoint's default."""
PROJECTION_SEED = 2042712918
"""The default of SimPoint 3.2's `-seedproj`."""
WIDEST = 240
"""The most dimensions that are tried."""
WORTH = 0.1
"""Twice the dimensions are kept if they take at least this share of the error away."""


@dataclass(frozen=True)
class SimPoints:
    """Simulation points of one program."""

    intervals: Ints
    """(points,) the interval of each, in rising order of clusters."""
    weights: Floats
    """(points,) share of the program's instructions in its cluster; sums to 1."""
    labels: Ints
    """(intervals,) the number of the point that stands for each; -1 without instructions."""
    dimensions: int
    unexplained: float
    """Share of the variance of the whole vectors (not projected) inside of clusters."""


def simpoints(
    vectors: Matrix,
    ids: Any,
    *,
    memory: Floats | None = None,
    dimensions: int = 0,
    most: int = clusters.MOST,
    exactly: int = 0,
    seed: int = clusters.SEED,
) -> SimPoints:
    """Choose the simulation points of a program; the same in every run.

    An interval without instructions is not a point, nor is one with far fewer than its cluster's
    others (`clusters.nearest`).

    Args:
        vectors: (intervals, blocks) CSR, counts of instructions.
        ids: (blocks,) ids of the columns.
        memory: (intervals, rates) further numbers of each interval, such as miss rates.
        dimensions: of the projection; 0: 15, doubled as long as that takes a tenth of the
            unexplained variance away.
        most, exactly, seed: as of `clusters.find_clusters`.
    """
    weights = instructions(vectors)
    ran, labels = np.flatnonzero(weights > 0), np.full(len(weights), -1)
    if len(ran) < len(weights):
        # BIC counts intervals: those without instructions would make it prefer more clusters.
        vectors, weights = vectors[ran], weights[ran]
        memory = None if memory is None else memory[ran]
    tried = dimensions or DIMENSIONS
    while True:
        points = features(vectors, ids, tried, memory)
        clustering = clusters.find_clusters(points, weights, most, exactly=exactly, seed=seed)
        error = unexplained(vectors, weights, clustering.labels)
        if dimensions or tried >= WIDEST or len(clustering) < 2:
            break
        wider = features(vectors, ids, 2 * tried, memory)
        wider_labels, _ = clusters.k_means(wider, weights, len(clustering), seed=seed)
        if unexplained(vectors, weights, wider_labels) > (1 - WORTH) * error:
            break
        tried *= 2
    distances = np.sqrt(((points - clustering.centres[clustering.labels]) ** 2).sum(axis=1))
    labels[ran] = clustering.labels
    return SimPoints(
        ran[clusters.nearest(clustering.labels, distances, weights)],
        np.bincount(clustering.labels, weights) / weights.sum(),
        labels,
        tried,
        error,
    )


def instructions(vectors: Matrix) -> Floats:
    weights = np.asarray(vectors.sum(axis=1), dtype=np.float64).reshape(-1)
    if not weights.sum() > 0:
        raise TokmillError(
            "no interval has instructions",
            hint="a line of block vectors begins with T: `T:1:20 :2:5`",
        )
    return weights


def features(vectors: Matrix, ids: Any, dimensions: int, memory: Floats | None) -> Floats:
    """Return what is clustered: projected vectors, beside them the memory vectors.

    Both get the same total variance, so that neither decides alone. Rates that never change are
    left out. Shape (intervals, dimensions + rates).
    """
    points = project(vectors, ids, dimensions)
    if memory is None:
        return points
    weights = instructions(vectors)
    weights = weights / weights.sum()
    own = points - weights @ points
    rates = memory - weights @ memory
    spread = np.sqrt(weights @ rates**2)
    changing = spread > 1e-12 * np.abs(memory).max(axis=0, initial=1e-300)
    rates = rates[:, changing] / spread[changing]
    size = np.sqrt(float((weights @ own**2).sum()))
    # Sums of equal rows differ in their last bits.
    if not rates.shape[1] or size <= 1e-9 * np.sqrt(float((points**2).sum(axis=1).max())):
        return np.hstack([points, rates])
    return np.hstack([points, rates * (size / np.sqrt(rates.shape[1]))])


def unexplained(vectors: Matrix, weights: Floats, labels: Ints) -> float:
    """Return the share of the variance of whole normalised vectors that lies inside of clusters.

    0: all intervals of a cluster are equal; 1: clusters say nothing. It needs no dense vectors:
    the variance is the mean square less the square of the mean.
    """
    sparse = plugins.require("scipy.sparse")
    total = weights.sum()
    # weight × (vector / its sum) = the vector itself, as a weight is its vector's sum.
    squares = float(np.asarray(vectors.multiply(vectors).sum(axis=1)).reshape(-1) @ (1 / weights))
    sizes = np.bincount(labels, weights)
    members = sparse.csr_matrix(
        (np.ones(len(labels)), (labels, np.arange(len(labels)))), (len(sizes), len(labels))
    )
    sums = members @ vectors
    of_clusters = np.asarray(sums.multiply(sums).sum(axis=1)).reshape(-1)
    share = (of_clusters / sizes).sum()
    whole = np.asarray(vectors.sum(axis=0), dtype=np.float64).reshape(-1)
    spread = squares - float(whole @ whole) / total
    return float(max(0.0, (squares - share) / spread)) if spread > 1e-12 * squares else 0.0


def project(vectors: Matrix, ids: npt.ArrayLike, dimensions: int) -> Floats:
    """Return normalised vectors in a few dimensions, (intervals, dimensions) float64.

    A row is divided by its sum, so intervals of different lengths can be compared. A row without
    entries stays at zero.

    Args:
        vectors: (intervals, blocks) CSR, counts of instructions; not negative.
        ids: (blocks,) the id of each column, any 64-bit numbers.
    """
    totals = np.asarray(vectors.sum(axis=1), dtype=np.float64).reshape(-1)
    data = shares_of(vectors.data, np.repeat(totals, np.diff(vectors.indptr)))
    parts = data, vectors.indices, vectors.indptr
    shares = plugins.require("scipy.sparse").csr_matrix(parts, vectors.shape)
    sums = np.asarray(shares @ projection_rows(np.asarray(ids), dimensions, PROJECTION_SEED))
    return sums.astype(np.float64) / float(WHOLE << BITS)
