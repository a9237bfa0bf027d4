"""Cells of near records: a tree of two-means splits, so that neighbours are found without O(n²).

A node is split across the line between two centres, which are found in a sample of its records.
Each side keeps at least a quarter of the records, so the tree has a depth of O(log n), whatever the
vectors are. The cost is O(n · width) a level.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokmill.builds.mining.random_draws import drawn, salt_of
from tokmill.builds.mining.vector_table import rounded
from tokmill.store.schema import Array

CELLS = np.dtype([("record", "<i8"), ("cell", "<i8")])
SAMPLE = 1024
"""Records among which the centres of a split are found."""
ROUNDS = 6
BLOCK = 1 << 14
"""Records that are projected at a time."""

Units = Callable[[Array], Array]
"""Record numbers → their rounded vectors (`vectors.rounded`)."""


def cells_of(units: Units, records: Array, most: int, seed: int) -> Array:
    """Return records in cells of at most `most` near ones, as rows of `CELLS`, cell after cell."""
    order = np.array(records, np.int64)
    ends = np.zeros(len(order), bool)
    open_ = [(0, len(order))]
    while open_:
        start, stop = open_.pop()
        if stop - start <= most:
            ends[start:stop][-1:] = True
            continue
        here, cut = split(units, order[start:stop], salt_of("cell", seed, start, stop))
        order[start:stop] = here
        open_ += [(start, start + cut), (start + cut, stop)]
    found = np.zeros(len(order), CELLS)
    found["record"] = order
    found["cell"] = np.cumsum(ends) - ends
    return found


def split(units: Units, records: Array, salt: np.uint64) -> tuple[Array, int]:
    """Return records in the order of a projection, and how many are on its first side."""
    chosen = np.argsort(drawn(salt, records), kind="stable")[:SAMPLE]
    sample = units(records[chosen])
    one = sample[0]
    two = sample[np.argmin(sample @ one)]
    for _ in range(ROUNDS):
        side = sample @ (one - two) >= 0
        if side.all() or not side.any():
            break
        one, two = (
            rounded(sample[chosen].astype(np.int64).sum(axis=0)[None])[0]
            for chosen in (side, ~side)
        )
    line = one - two
    blocks = range(0, len(records), BLOCK)
    place = np.concatenate([units(records[at : at + BLOCK]) @ line for at in blocks])
    order = np.lexsort((records, place))
    least = max(1, len(records) // 4)
    cut = int(np.clip(np.count_nonzero(place < 0), least, len(records) - least))
    return records[order], cut
