"""Best-fit packing, computed from the number of pieces of each length.

Best-fit decreasing takes the longest piece first. It puts a piece into the bin with the least free
space that is enough, else into an empty bin (Johnson 1973, "Near-Optimal Bin Packing Algorithms").
Pieces of the same length are interchangeable, and so are bins with the same free space. So the plan
handles groups of bins; its cost depends on the number of different lengths, not of pieces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from tokmill.errors import UsageError
from tokmill.store.schema import Array


@dataclass(frozen=True, slots=True)
class Patterns:
    """The content of the bins; all arrays int64.

    Pattern p stands for `repeats[p]` bins with the same content: the entries `offsets[p]` …
    `offsets[p + 1]` - 1, longest pieces first, of which entry e is `counts[e]` pieces of
    `lengths[e]` each.
    """

    repeats: Array
    offsets: Array
    lengths: Array
    counts: Array

    def used(self) -> Array:
        """Return for each entry how many pieces of its length earlier patterns use."""
        pieces = np.repeat(self.repeats, np.diff(self.offsets)) * self.counts
        order = np.argsort(self.lengths, kind="stable")
        before = np.cumsum(pieces[order]) - pieces[order]
        lengths = self.lengths[order]
        result = np.zeros(len(order), np.int64)
        result[order] = before - before[np.searchsorted(lengths, lengths)]
        return result


def best_fit(lengths: Array, counts: Array, capacity: int) -> Patterns:
    """Pack `counts[i]` pieces of `lengths[i]` each into bins of `capacity`: best-fit decreasing.

    Lengths must be different. The result has as many bins of each remaining space as packing piece
    by piece; only the choice among bins with equal space may differ. Raises `UsageError` for a
    piece that is too long for a bin.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise UsageError(
            f"pieces of {lengths.min()} to {lengths.max()} in bins of {capacity}",
            hint="a piece has 1 to `capacity` tokens: cut longer ones first",
        )
    # A node is a group of bins with the same content: that of the parent node, then `count` pieces
    # of `length` each. The root, number 0, stands for more empty bins than can be needed.
    bins, nodes = [int(counts.sum()) + 1], [(0, 0, 0)]
    rooms, with_room = [capacity], {capacity: [0]}
    for index in np.argsort(lengths)[::-1].tolist():
        length, left = int(lengths[index]), int(counts[index])
        while left:
            place = bisect_left(rooms, length)
            room = rooms[place]
            node = with_room[room][-1]
            # Best fit fills a bin as long as one more piece fits.
            most = room // length
            full, rest = divmod(left, most)
            if full >= bins[node]:
                full, rest = bins[node], 0
            left -= full * most + rest
            bins[node] -= full + (rest > 0)
            if not bins[node]:
                with_room[room].pop()
                if not with_room[room]:
                    del with_room[room], rooms[place]
            for group, count in ((full, most), (int(rest > 0), rest)):
                if group:
                    after = room - count * length
                    if after not in with_room:
                        with_room[after] = []
                        insort(rooms, after)
                    with_room[after].append(len(nodes))
                    nodes.append((node, length, count))
                    bins.append(group)
    return _patterns(np.asarray(bins[1:], np.int64), np.asarray(nodes[1:], np.int64))


def _patterns(bins: Array, nodes: Array) -> Patterns:
    """Return the nodes that still have bins, each with the pieces on its path from the root.

    `bins` (n,) and `nodes` (n, 3: parent, length, count) are those of the nodes 1 … n.
    """
    parent, length, count = nodes.reshape(-1, 3).T
    last = np.flatnonzero(bins)
    pattern, node = np.arange(len(last)), last
    steps = [(pattern, node)]
    while len(node):
        above = parent[node] - 1
        inside = above >= 0
        pattern, node = pattern[inside], above[inside]
        steps.append((pattern, node))
    pattern, node = (np.concatenate(part) for part in zip(*steps[::-1], strict=True))
    offsets = np.append(0, np.cumsum(np.bincount(pattern, minlength=len(last))))
    node = node[np.argsort(pattern, kind="stable")]
    return Patterns(bins[last], offsets, length[node], count[node])
