"""Clusters of intervals of several programs, the points that stand for them, and a second look.

One interval stands for a cluster, so an odd one makes every program wrong that is in the cluster.
Some points can therefore be checked: those whose CPI the other points would not have predicted, and
on which much of a program depends, get two more intervals of their cluster beside them. Where the
point is far from both, the median of the three stands for the cluster.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokmill.bbv.clusters import Floats, Ints, k_means, nearest
from tokmill.bbv.executions import Executions
from tokmill.errors import UsageError
from tokmill.progress import human_count

OF_THREE = 3
FAR = 1.25
"""A point is odd if it differs from both further intervals by more than this factor."""


PENALTIES = 10.0 ** np.arange(-2, 2.1, 0.5)
"""Penalties of ridge regression that are tried, times intervals and the variance of a column.

Smaller ones fit a sample better and go far astray where the program has what the sample lacks.
"""
FULL = 0.98
"""The most of an interval's own prediction that it may decide, when it is left out."""
FEWEST = 4
"""With fewer intervals nothing is regressed."""


class Clustered(NamedTuple):
    """Intervals in clusters, and the points that are simulated."""

    labels: Ints
    """(N,) the cluster of each interval."""
    points: Ints
    """(clusters,) the interval that stands for each."""
    simulated: Ints
    """(points,) those, and after them what they were checked with."""


def cluster_intervals(
    executions: Executions, signatures: Floats, count: int, seed: int, checks: int = 0
) -> Clustered:
    """Cluster intervals across programs, and choose `count` points, those of the checks among them.

    The CPI of an interval is looked at only if it is a point.

    Args:
        executions: N intervals of P programs.
        signatures: (N, width), finite.
        count: number of points.
        seed: of k-means.
        checks: number of points that are checked, each by two further ones.
    """
    clusters = count - (OF_THREE - 1) * checks
    if clusters < 1:
        raise UsageError(
            f"{human_count(checks, 'check')} need two points each, beside the one that is checked",
            hint=f"at most {(count - 1) // (OF_THREE - 1)} of {human_count(count, 'point')}",
        )
    shares, instructions = executions.shares(), executions.instructions
    labels, centres = k_means(signatures, shares, clusters, seed=seed)
    off = ((signatures - centres[labels]) ** 2).sum(axis=1)
    points = nearest(labels, off, instructions)
    if not checks or len(points) < FEWEST:
        return Clustered(labels, points, points)
    rounds = [points]
    for _ in range(OF_THREE - 1):
        off[rounds[-1]] = np.inf
        rounds.append(nearest(labels, off, instructions))
    asked = np.argsort(-odd(executions, signatures, labels, points), kind="stable")[:checks]
    three = np.stack(rounds, axis=1)[asked]
    logs = np.log(executions.cpi[three])
    # A cluster of one or two intervals has no third one: the point stands twice, and is not odd.
    alone = np.abs(logs[:, 1:] - logs[:, :1]).min(axis=1) > np.log(FAR)
    middle = np.argsort(logs, axis=1, kind="stable")[:, OF_THREE // 2]
    stands = points.copy()
    stands[asked] = np.where(alone, three[np.arange(len(asked)), middle], three[:, 0])
    return Clustered(labels, stands, np.concatenate([points, np.setdiff1d(three, points)]))


def odd(executions: Executions, signatures: Floats, labels: Ints, points: Ints) -> Floats:
    """Return by how much a program could be wrong because of each cluster's point, (clusters,).

    That is the share of its CPI that the cluster makes, times the error with which the logarithm of
    the point's CPI is predicted from the other points (ridge regression on signatures); of all
    programs the largest.
    """
    shares = executions.shares()
    scale = float((shares @ (signatures - shares @ signatures / shares.sum()) ** 2).mean())
    cpi = executions.cpi[points]
    errors = np.abs(left_out_errors(signatures[points], np.log(cpi), scale / shares.sum()))
    weights = weights_of(executions, labels, len(points))
    parts = weights * cpi
    found: Floats = (parts / parts.sum(axis=1, keepdims=True)).max(axis=0) * errors
    return found


def left_out_errors(chosen: Floats, values: Floats, scale: float) -> Floats:
    """Return the error of each value if it is predicted from the others, (n,).

    By ridge regression, with the penalty whose errors are the smallest. They are in closed form,
    from the leverages (Allen 1974, PRESS).

    Args:
        chosen: (n, columns) what is known of the intervals.
        values: (n,).
        scale: variance of a column, in the mean, over all intervals.
    """
    count = len(values)
    left, sizes, _ = np.linalg.svd(chosen - chosen.mean(axis=0), full_matrices=False)
    centred = values - values.mean()
    along = left.T @ centred
    best: Floats | None = None
    for penalty in PENALTIES * max(count * scale, 1e-300):
        kept = sizes**2 / (sizes**2 + penalty)
        leverage = np.minimum(left**2 @ kept + 1 / count, FULL)
        errors: Floats = (centred - left @ (kept * along)) / (1 - leverage)
        if best is None or errors @ errors < best @ best:
            best = errors
    assert best is not None
    return best


def weights_of(executions: Executions, labels: Ints, clusters: int) -> Floats:
    """Return the share of each program's instructions in each cluster, (programs, clusters)."""
    weights = np.zeros((len(executions.names), clusters))
    np.add.at(weights, (executions.program, labels), executions.shares())
    return weights
