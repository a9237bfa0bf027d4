"""Maps of blocks to clusters: one file format, and traces whose blocks are rewritten by it.

A map is CSV. Its header is `id,cluster`, where blocks are called as a trace calls them, or
`record,cluster`, where they are records of a store of blocks. Clusters count from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.bbv.points.clusters import Ints, k_means
from tokmill.bbv.traces.block_vectors import BlockVectors
from tokmill.bbv.traces.interval_table import read_cells
from tokmill.store.schema import Array

KEYS = ("id", "record")
LARGEST = 2**53
"""Numbers of a map are below: larger ones are not exact in float64."""


@dataclass(frozen=True)
class BlockMap:
    """The cluster of each block."""

    key: str
    """What a block is called by: one of `KEYS`."""
    blocks: Ints
    """Rising."""
    clusters: Ints

    @property
    def size(self) -> int:
        """Number of clusters: the largest + 1."""
        return int(self.clusters.max()) + 1

    def of(self, blocks: Array) -> Ints:
        """Return the cluster of each block, -1 where the map has none."""
        rows = np.searchsorted(self.blocks, blocks).clip(max=len(self.blocks) - 1)
        return np.where(self.blocks[rows] == blocks, self.clusters[rows], -1)

    def text(self) -> Iterator[bytes]:
        """Yield the map as it is written."""
        yield f"{self.key},cluster\n".encode()
        for start in range(0, len(self.blocks), 1 << 16):
            part = slice(start, start + (1 << 16))
            pairs = zip(self.blocks[part].tolist(), self.clusters[part].tolist(), strict=True)
            yield "".join(f"{block},{cluster}\n" for block, cluster in pairs).encode()


def read_map(path: Path) -> BlockMap:
    """Read a map.

    Raises `TokmillError` for another header, what is no whole number from 0, and a block that
    stands twice.
    """
    names, cells = read_cells(path)
    if len(names) != 2 or names[0] not in KEYS or names[1] != "cluster":
        raise TokmillError(
            f"the columns are {', '.join(names)}",
            where=f"{path}:1",
            hint="the header of a map is `id,cluster` or `record,cluster`",
        )
    if (wrong := (cells != np.floor(cells)) | (cells < 0) | (cells >= LARGEST)).any():
        raise TokmillError(
            f"line {int(wrong.any(axis=1).argmax()) + 1} after the header has what is no number "
            "of a block or a cluster",
            where=str(path),
            hint="whole numbers from 0",
        )
    order = np.argsort(cells[:, 0], kind="stable")
    blocks, clusters = cells[order].astype(np.int64).T
    if (again := blocks[1:] == blocks[:-1]).any():
        raise TokmillError(
            f"block {int(blocks[again.argmax()])} stands twice",
            where=str(path),
            hint="a block is in one cluster",
        )
    return BlockMap(names[0], blocks, clusters)


def cluster_blocks(vectors: Array, count: int, *, seed: int = 0, restarts: int = 1) -> Ints:
    """Return the cluster of each block, by k-means on vectors of length 1: by their cosines.

    Vectors of zeros are a cluster of their own, the last. If fewer than `count` vectors differ,
    there are fewer clusters.

    Args:
        vectors: (blocks, width), finite.
        count: number of clusters, at least 1.
        seed: of the first centres.
        restarts: of k-means, with other centres; the best counts.
    """
    if not 1 <= count <= len(vectors):
        raise UsageError(
            f"{count:,} clusters of {len(vectors):,} blocks",
            hint="--num-clusters from 1 to the number of blocks",
        )
    large = np.abs(vectors).max(axis=1, initial=0)
    filled = np.flatnonzero(large > 0)
    found = np.zeros(len(vectors), np.int64)
    if len(filled):
        scaled = vectors[filled] / large[filled, None].astype(np.float64)
        scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
        of_zeros = len(filled) < len(vectors)
        k = max(1, count - of_zeros)
        found[filled], _ = k_means(
            scaled, np.ones(len(filled)), min(k, len(filled)), restarts=restarts, seed=seed
        )
        empty = large == 0
        found[empty] = found[filled].max() + 1 if count > 1 else 0
    return found


@dataclass
class Rewritten:
    """What became of the entries of a trace."""

    clusters: int
    entries: int = 0
    left: int = 0
    """Entries after blocks of a cluster were added up."""
    unmapped: int = 0
    """Entries whose block is in no cluster; they are one more block, after all clusters."""
    instructions: int = 0
    unmapped_instructions: int = 0


def rewrite(
    pieces: Iterator[BlockVectors], of: Callable[[Array], Ints], size: int
) -> Iterator[tuple[BlockVectors, Rewritten]]:
    """Yield the intervals of a trace with clusters in place of blocks, and what was done so far.

    The first id stays what it was: cluster 0 has the smallest id of the trace's numbering, 0 or 1.
    Counts of instructions are added up, so each interval keeps its sum.

    Args:
        pieces: of a trace.
        of: ids of blocks → their clusters, -1 for none.
        size: number of clusters.

    Raises `TokmillError` where the first id is found to be 0 only after some pieces.
    """
    done = Rewritten(size)
    base = None
    for piece in pieces:
        if base is not None and piece.id_base != base:
            # What was written already begins with 1.
            raise TokmillError(
                "the first block with the id 0 stands far down in the trace",
                hint="--id-base 0 says from the beginning that ids begin with 0",
            )
        base = piece.id_base
        clusters = of(piece.ids)
        lost = clusters < 0
        done.entries += piece.entries
        done.unmapped += int(lost.sum())
        done.unmapped_instructions += int(piece.counts[lost].sum())
        done.instructions += int(piece.counts.sum())
        new = _added(piece, np.where(lost, size, clusters))
        done.left += new.entries
        yield new, done


def _added(piece: BlockVectors, clusters: Ints) -> BlockVectors:
    """Return intervals with a column a cluster, rising; counts of a cluster are added."""
    row = np.repeat(np.arange(len(piece)), np.diff(piece.indptr))
    order = np.lexsort((clusters, row))
    row, cluster, counts = row[order], clusters[order], piece.counts[order]
    new = np.ones(len(row), bool)
    new[1:] = (row[1:] != row[:-1]) | (cluster[1:] != cluster[:-1])
    begins = np.flatnonzero(new)
    sums = np.add.reduceat(counts, begins) if len(begins) else counts
    ends = np.cumsum(np.bincount(row[begins], minlength=len(piece)))
    return replace(
        piece,
        indptr=np.concatenate([[0], ends]).astype(np.int64),
        ids=cluster[begins] + piece.id_base,
        counts=sums,
    )
