"""Weighted k-means with restarts, and how many clusters there are by BIC, as SimPoint chooses."""

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokmill import plugins

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST = 30
"""SimPoint's usual largest number of clusters."""
RESTARTS = 5
ITERATIONS = 100
THRESHOLD = 0.9
"""Share of the range of BIC that is enough: restarts, iterations and this are SimPoint 3.2's."""
SEED = 493575226
"""The default of SimPoint 3.2's `-seedkm`."""
TINY = 0.1
SEARCHED = 10_000
"""Above this number of intervals, a random part decides how many clusters there are."""


@dataclass(frozen=True)
class Clusters:
    """A clustering of intervals; no cluster is empty."""

    labels: Ints
    """(intervals,) the cluster of each."""
    centres: Floats
    """(clusters, dimensions) weighted means."""

    def __len__(self) -> int:
        return len(self.centres)


def k_means(
    points: Floats,
    weights: Floats,
    k: int,
    *,
    seed: int = SEED,
    begin: Floats | None = None,
) -> tuple[Ints, Floats]:
    """Return labels and centres of the best of some k-means; the same in every run.

    Clusters are numbered in the order of their first interval. If fewer than `k` points differ,
    there are fewer clusters.

    Args:
        points: (intervals, dimensions).
        weights: (intervals,) above 0, such as counts of instructions.
        begin: (k, dimensions) centres to begin with, in place of random ones.
    """
    cluster = plugins.require("sklearn.cluster")
    limits = plugins.require("threadpoolctl").threadpool_limits
    k = min(k, different(points, k))
    means = cluster.KMeans(
        k,
        init="k-means++" if begin is None else begin,
        n_init=RESTARTS if begin is None else 1,
        max_iter=ITERATIONS,
        tol=0,
        algorithm="lloyd",
        random_state=seed % 2**32,
    )
    # With several threads the order of sums, and so the last bits of a centre, would be by chance.
    with limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", plugins.require("sklearn.exceptions").ConvergenceWarning)
        means.fit(points, sample_weight=weights / weights.mean())
    return in_order(np.asarray(means.labels_, np.int64), points, weights)


def in_order(labels: Ints, points: Floats, weights: Floats) -> tuple[Ints, Floats]:
    """Return labels numbered by first use, and the weighted mean of each cluster."""
    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    labels = number[labels]
    sums = [np.bincount(labels, weights * column) for column in points.T]
    return labels, np.stack(sums, axis=1) / np.bincount(labels, weights)[:, None]


def nearest(labels: Ints, distances: Floats, weights: Floats) -> Ints:
    """Return the interval of each cluster that is nearest to its centre, the first of equal ones.

    Intervals with less than `TINY` of the instructions that one of the cluster has in the mean (an
    instruction counting as one) are passed over: what little they execute is no steady behaviour.

    Args:
        labels: (intervals,) of clusters, all of which occur.
        distances: (intervals,) to the centre, or squares of them.
        weights: (intervals,) instructions, above 0.
    """
    usual = np.bincount(labels, weights**2) / np.bincount(labels, weights)
    small = weights < TINY * usual[labels]
    # The last key of `lexsort` counts first.
    order = np.lexsort((np.arange(len(labels)), distances, small, labels))
    return order[np.searchsorted(labels[order], np.arange(len(usual)))]


def different(points: Floats, enough: int) -> int:
    """Return how many points differ, or `enough` if that many do."""
    for count in (4 * enough, len(points)):
        result = len(np.unique(points[:count], axis=0))
        if result >= enough:
            return enough
    return result


def bic(points: Floats, weights: Floats, labels: Ints, centres: Floats) -> float:
    """Return the Bayesian information criterion of a clustering; higher is better.

    The likelihood of one spherical Gaussian a cluster, all of one variance (Pelleg and Moore, ICML
    2000), with intervals counted by weight. Its parameters: shares, centres, the variance.
    """
    count, dimensions = points.shape
    k = len(centres)
    shares = weights * (count / weights.sum())
    sizes = np.bincount(labels, shares, minlength=k)
    squares = float(shares @ ((points - centres[labels]) ** 2).sum(axis=1))
    mean = shares @ points / count
    spread = float(shares @ ((points - mean) ** 2).sum(axis=1))
    # Equal points: a variance of zero would have an endless likelihood.
    least = max(spread, 1e-12) * 1e-9
    variance = max(squares, least) / (dimensions * max(count - k, 1))
    likelihood = (
        float(sizes @ np.log(sizes / count))
        - count * dimensions / 2 * np.log(2 * np.pi * variance)
        - dimensions * (count - k) / 2
    )
    return float(likelihood - (k - 1 + k * dimensions + 1) / 2 * np.log(count))


def choose(scores: dict[int, float]) -> int:
    """Return the smallest number of clusters whose BIC is high enough.

    Enough is `THRESHOLD` of the way from the lowest to the highest of the scores.
    """
    low, high = min(scores.values()), max(scores.values())
    return min(k for k, score in scores.items() if score >= low + THRESHOLD * (high - low))


def find_clusters(
    points: Floats,
    weights: Floats,
    most: int = MOST,
    *,
    exactly: int = 0,
    seed: int = SEED,
) -> Clusters:
    """Cluster intervals, with as many clusters as BIC says, or `exactly` so many.

    Of more than `SEARCHED` intervals a random part decides the number and where all of them begin.

    Args:
        points: (intervals, dimensions), finite.
        weights: (intervals,) above 0.
    """
    few = np.arange(len(points))
    if len(points) > SEARCHED:
        few = np.sort(np.random.default_rng(seed).permutation(few)[:SEARCHED])
    part, of_part = points[few], weights[few]
    scores, clusterings = {}, {}
    # With a cluster for each interval there is no variance, which a BIC needs.
    most = exactly or min(most, max(1, len(part) - 1))
    most = min(most, different(part, most))
    for k in [most] if exactly else range(1, most + 1):
        clusterings[k] = k_means(part, of_part, k, seed=seed)
        scores[k] = bic(part, of_part, *clusterings[k])
    labels, centres = clusterings[choose(scores)]
    if len(few) < len(points):
        labels, centres = k_means(points, weights, len(centres), seed=seed, begin=centres)
    return Clusters(labels, centres)
