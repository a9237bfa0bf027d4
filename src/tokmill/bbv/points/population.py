"""What is known of all intervals of a program before any of them is simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.bbv.points import simpoint
from tokmill.bbv.points.clusters import Floats, Ints
from tokmill.bbv.points.simpoint import Matrix
from tokmill.bbv.traces.block_vectors import BlockVectors
from tokmill.builds.mining.intervals import check_intervals
from tokmill.store.checks.hashes import mix
from tokmill.store.store import Store


@dataclass(frozen=True, eq=False)
class Population:
    """The intervals of one program that have instructions."""

    intervals: Ints
    """(N,) their numbers in the program, rising."""
    shares: Floats
    """(N,) of the program's instructions, above 0; sum to 1."""
    features: Floats
    """(N, dimensions) projected block vectors, beside them memory vectors."""

    def __len__(self) -> int:
        return len(self.intervals)


def block_vectors(store: Store) -> BlockVectors:
    """Return the block vectors of the intervals in a store.

    A block is its record in the store of blocks, or its id. If blocks are called by the ids of
    several traces, it is a hash of its id and its trace: no two traces have a block in common.

    Raises `UsageError` for a store of something else.
    """
    check_intervals(store)
    shards = [store.shard(number) for number in range(len(store.shards))]
    blocks = [np.zeros(0, np.int64), *(shard["block"].astype(np.int64) for shard in shards)]
    counts = [np.zeros(0, np.uint64), *(shard["count"].astype(np.uint64) for shard in shards)]
    indptr, ids = np.append(0, store.ends()).astype(np.int64), np.concatenate(blocks)
    least, largest = store.manifest.ranges.get("trace", (0, 0))
    if least != largest:
        ids ^= np.repeat(mix(store.column("trace")).view(np.int64), np.diff(indptr))
    return BlockVectors(indptr, ids, np.concatenate(counts))


def as_matrix(vectors: BlockVectors) -> tuple[Matrix, Ints]:
    """Return block vectors as a CSR matrix of float64, and the block of each column."""
    sparse = plugins.require("scipy.sparse")
    blocks, columns = np.unique(vectors.ids, return_inverse=True)
    shape = len(vectors), max(len(blocks), 1)
    index = np.int32 if vectors.entries < 2**31 else np.int64
    matrix = sparse.csr_matrix(
        (vectors.counts.astype(np.float64), columns.astype(index), vectors.indptr.astype(index)),
        shape,
    )
    return matrix, blocks if len(blocks) else np.zeros(1, np.int64)


def population(
    vectors: Matrix,
    ids: Any,
    memory: dict[str, Floats] | None = None,
    *,
    dimensions: int = 0,
) -> Population:
    """Return what is known of a program's intervals.

    Args:
        vectors: (intervals, blocks) CSR, counts of instructions.
        ids: (blocks,) ids of the columns.
        memory: name → (intervals,) rates of each interval.
        dimensions: of the random projection; 0: 15.
    """
    weights = simpoint.instructions(vectors)
    filled = np.flatnonzero(weights > 0)
    rates = rates_of(memory)
    rates = None if rates is None else rates[filled]
    wide = dimensions or simpoint.DIMENSIONS
    features = simpoint.features(vectors[filled], ids, wide, rates)
    return Population(filled, weights[filled] / weights.sum(), features)


def rates_of(memory: dict[str, Floats] | None) -> Floats | None:
    """Return memory vectors, (intervals, rates), of their columns; None if there are none."""
    if not memory:
        return None
    rates = np.stack(list(memory.values()), axis=1)
    if not np.isfinite(rates).all():
        raise UsageError("a rate is not finite", hint="every interval needs every rate")
    return rates
