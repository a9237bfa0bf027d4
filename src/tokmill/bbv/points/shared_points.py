"""Simulation points that several programs share: intervals are clustered across programs.

As SemanticBBV (arXiv 2512.10231) uses signatures: intervals of different programs that behave
in the same way have near signatures, so one of them is simulated for all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tokmill.bbv.points import simpoint
from tokmill.bbv.points.clusters import Floats, Ints, k_means, nearest
from tokmill.bbv.points.executions import Executions


class Row(NamedTuple):
    """A program of the table; errors are shares of its CPI."""

    program: str
    intervals: int
    cpi: float
    shared: float
    """Error of the shared points."""
    held_out: float
    """Error where points and clusters are of the other programs alone."""
    simpoint: float
    """Error of SimPoint on the program alone, with as many points for it alone."""
    constant: float
    """Error of the mean CPI of the other programs."""


class Shared(NamedTuple):
    """Shared points of programs."""

    points: Ints
    """(points,) intervals that are simulated: rows of the executions."""
    weights: Floats
    """(programs, points) share of a program's instructions that each point stands for."""
    rows: list[Row]
    speed_up: float
    """Instructions of all programs over those of the points."""
    speed_up_alone: float
    """The same with as many points for each program alone (SimPoint)."""


def shared_points(
    executions: Executions,
    signatures: Floats,
    count: int,
    *,
    seed: int = 0,
    advance: Callable[[float], Any] = lambda amount: None,
) -> Shared:
    """Choose points for all programs together, and compare with points for each alone."""
    shares = executions.shares()
    labels, points = cluster_intervals(executions, signatures, count, seed)
    weights = weights_of(executions, labels, len(points))
    truths = np.bincount(executions.program, shares * executions.cpi)
    rows, alone = [], 0.0
    for program, name in enumerate(executions.names):
        inside = executions.program == program
        truth = float(truths[program])
        other_truths = np.delete(truths, program)
        constant = float(other_truths.mean()) if len(other_truths) else float("nan")
        cpi = executions.cpi[inside]
        own = _alone(executions, inside, count)
        alone += float(executions.instructions[inside][own.intervals].sum())
        rows.append(
            Row(
                name,
                int(inside.sum()),
                truth,
                float(weights[program] @ executions.cpi[points]) / truth - 1,
                _from_other_programs(executions, signatures, inside, count, seed) / truth - 1,
                float(own.weights @ cpi[own.intervals]) / truth - 1,
                constant / truth - 1,
            )
        )
        advance(1)
    everything = float(executions.instructions.sum())
    speed_up = everything / float(executions.instructions[points].sum())
    return Shared(points, weights, rows, speed_up, everything / alone)


def cluster_intervals(
    executions: Executions, signatures: Floats, count: int, seed: int
) -> tuple[Ints, Ints]:
    """Cluster intervals across programs; return the cluster of each (N,), and a point for each.

    `signatures`: (N, width), finite; `seed` is that of k-means.
    """
    labels, centres = k_means(signatures, executions.shares(), count, seed=seed)
    off = ((signatures - centres[labels]) ** 2).sum(axis=1)
    return labels, nearest(labels, off, executions.instructions)


def weights_of(executions: Executions, labels: Ints, clusters: int) -> Floats:
    weights = np.zeros((len(executions.names), clusters))
    np.add.at(weights, (executions.program, labels), executions.shares())
    return weights


def _from_other_programs(
    executions: Executions, signatures: Floats, inside: Any, count: int, seed: int
) -> float:
    """Return the CPI that points of other programs give; NaN if there are none."""
    if inside.all():
        return float("nan")
    _, points = cluster_intervals(executions.some(~inside), signatures[~inside], count, seed)
    points = np.flatnonzero(~inside)[points]
    own, shares = signatures[inside], executions.shares()[inside]
    squares = (signatures[points] ** 2).sum(axis=1) - 2 * own @ signatures[points].T
    return float(shares @ executions.cpi[points[squares.argmin(axis=1)]])


def _alone(executions: Executions, inside: Any, count: int) -> simpoint.SimPoints:
    vectors = executions.vectors[inside]
    rates = executions.rates[inside] if executions.rates.shape[1] else None
    return simpoint.simpoints(
        vectors,
        np.arange(vectors.shape[1]),
        memory=rates,
        dimensions=simpoint.DIMENSIONS,
        exactly=min(count, vectors.shape[0]),
    )
