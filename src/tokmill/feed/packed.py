"""Rows of whole documents side by side: every token once an epoch, almost no padding.

The rows are computed by best-fit packing from the number of pieces of each length. Best-fit
decreasing takes the longest piece first. It puts a piece into the bin with the least free space
that is enough, else into an empty bin (Johnson 1973, "Near-Optimal Bin Packing Algorithms").
Pieces of the same length are interchangeable, and so are bins with the same free space. So the plan
handles groups of bins; its cost depends on the number of different lengths, not of pieces.
"""

import contextlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.base.files import make_folder, remove
from tokmill.feed.order import kept, key, permute, shard_groups
from tokmill.feed.rows import Rows
from tokmill.store.gather import Spans
from tokmill.store.schema import Array, ranges
from tokmill.store.shards.shard import SUFFIX, Shard, write_tensors
from tokmill.store.store import Store


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
    spaces, nodes_of = [capacity], {capacity: [0]}
    for index in np.argsort(lengths)[::-1].tolist():
        length, left = int(lengths[index]), int(counts[index])
        while left:
            place = bisect_left(spaces, length)
            space = spaces[place]
            node = nodes_of[space][-1]
            # Best fit fills a bin as long as one more piece fits.
            most = space // length
            full, rest = divmod(left, most)
            if full >= bins[node]:
                full, rest = bins[node], 0
            left -= full * most + rest
            bins[node] -= full + (rest > 0)
            if not bins[node]:
                nodes_of[space].pop()
                if not nodes_of[space]:
                    del nodes_of[space], spaces[place]
            for group, count in ((full, most), (int(rest > 0), rest)):
                if group:
                    after = space - count * length
                    if after not in nodes_of:
                        nodes_of[after] = []
                        insort(spaces, after)
                    nodes_of[after].append(len(nodes))
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


@dataclass(frozen=True, slots=True)
class Pieces:
    """The documents of a store, by group, then by length of the rest, then by number of windows.

    `documents`: records of the store, uint32 if that suffices, else uint64. The others are int64.
    `rest`, `windows`, `count` have a value per class, in the same order: tokens of the rest (0: no
    rest), full windows of a document, number of documents. `classes`: the first class of each
    group, and the number of classes (groups + 1). `packs`: rows that the rests of each group fill.
    """

    documents: Array
    rest: Array
    windows: Array
    count: Array
    classes: Array
    packs: Array


def cut(lengths: Array, length: int, overlap: int) -> tuple[Array, Array]:
    """Return the number of full windows of documents, and the tokens of the rests (both int64).

    Window i begins at token i · (length - overlap), and the rest where the next window would begin.
    The first `overlap` tokens of a rest are those of the last window; a rest without other tokens
    is dropped.
    """
    step = length - overlap
    windows = np.zeros(len(lengths), np.int64)
    long = lengths >= length
    windows[long] = (lengths[long] - length) // step + 1
    rest = lengths - windows * step
    rest[long & (rest == overlap)] = 0
    return windows, rest


def pieces_of(store: Store, length: int, overlap: int, shards: int, seed: int) -> Pieces:
    """Return the pieces of a store, in groups of `shards` shards (0: all), drawn by `seed`.

    They are read from `cache/`, or computed and kept there if the folder can be written.
    """
    folder = store.path / "cache"
    prefix = f"pieces-{store.fingerprint[:16]}-"
    path = folder / f"{prefix}{length}-{overlap}-{shards}-{seed if shards else 0}{SUFFIX}"
    pieces = _read(path, store.records)
    if pieces is None:
        groups = shard_groups(len(store.shards), shards, seed)
        pieces = _make(store, length, overlap, groups)
        with contextlib.suppress(MachineError):
            make_folder(folder)
            for other in folder.glob("pieces-*"):
                # Of an earlier state of the store.
                if not other.name.startswith(prefix):
                    remove(other)
            _write(path, pieces)
            pieces = _read(path, store.records) or pieces
    return pieces


def rests(rest: Array, count: Array) -> tuple[Array, Array, Array]:
    """Return the rests of a group for `best_fit`: (lengths, number of each, first of each); int64.

    `first`: place among the group's documents of the first one with a rest of this length.
    """
    lengths, first_class = np.unique(rest, return_index=True)
    pieces = np.add.reduceat(count, first_class)
    first = np.cumsum(pieces) - pieces
    real = lengths > 0
    return lengths[real], pieces[real], first[real]


AT_ONCE = 1 << 18
"""Documents that are sorted at a time."""


def _make(store: Store, length: int, overlap: int, groups: list[Array]) -> Pieces:
    """Sort the documents of each group by class, and count the rows that their rests fill."""
    documents = np.zeros(store.records, np.uint32 if store.records <= 1 << 32 else np.uint64)
    classes: list[Array] = []
    packs: list[int] = []
    done = 0
    for shards in groups:
        counted = [np.zeros((2, 0), np.int64)]
        for _, some in _codes(store, shards, length, overlap):
            counted.append(np.stack(np.unique(some, return_counts=True)))
        every, counts = np.concatenate(counted, axis=1)
        codes, number = np.unique(every, return_inverse=True)
        count = np.zeros(len(codes), np.int64)
        np.add.at(count, number, counts)
        place = done + np.cumsum(count) - count
        for first, some in _codes(store, shards, length, overlap):
            of = np.searchsorted(codes, some)
            # numpy sorts numbers of 16 bits by radix.
            order = np.argsort(of.astype(np.min_scalar_type(len(codes))), kind="stable")
            added = np.bincount(of, minlength=len(codes))
            documents[ranges(place, added)] = first + order
            place += added
        done += int(count.sum())
        classes.append(np.stack([codes >> 32, codes & (1 << 32) - 1, count]))
        packed = best_fit(*rests(classes[-1][0], count)[:2], length)
        packs.append(int(packed.repeats.sum()))
    ends = np.cumsum([0, *(part.shape[1] for part in classes)])
    rest, windows, count = np.concatenate(classes, axis=1)
    return Pieces(documents, rest, windows, count, ends, np.asarray(packs, np.int64))


def _codes(store: Store, shards: Array, length: int, overlap: int) -> Iterator[tuple[int, Array]]:
    """Yield (first record, classes of some documents): the rest, and windows in the low half."""
    begins = _begins(np.asarray([entry.records for entry in store.shards], np.int64))
    for shard in shards.tolist():
        offsets = store.shard(shard)["offsets"]
        for start in range(0, len(offsets) - 1, AT_ONCE):
            lengths = np.diff(offsets[start : start + AT_ONCE + 1].astype(np.int64))
            windows, rest = cut(lengths, length, overlap)
            yield int(begins[shard]) + start, rest << 32 | windows


def _read(path: Path, records: int) -> Pieces | None:
    """Return the pieces in a file, mapped; None if it is missing or damaged."""
    try:
        file = Shard(path)
        pieces = Pieces(*(file[field.name] for field in fields(Pieces)))
    except TokmillError:
        return None
    whole = len(pieces.documents) == pieces.count.sum() == records
    return pieces if whole else None


def _write(path: Path, pieces: Pieces) -> None:
    columns = {field.name: getattr(pieces, field.name) for field in fields(Pieces)}
    write_tensors(
        path,
        {name: (f"{a.dtype.kind}{a.dtype.itemsize}", [len(a)], [a]) for name, a in columns.items()},
    )


PLANS = 8
"""Plans of groups that are cached; a batch needs one or two."""


@dataclass(frozen=True, slots=True)
class Packs:
    """The plan of a group, and where its pieces come from; all arrays int64.

    `begins`: the first pack of each pattern, and the number of packs. The others have a value for
    each entry of the patterns. `used`: pieces of its length in earlier patterns; `pieces`: pieces
    of its length; `first`: place of the first such piece among the documents of the store.
    """

    patterns: Patterns
    begins: Array
    used: Array
    pieces: Array
    first: Array


class Packed(Rows):
    """Documents packed into rows of `length` tokens by best fit; nothing is discarded.

    A document shorter than a row is a piece. A longer document gives full windows, each of them a
    row, and a rest, which is a piece. Two consecutive windows (and the rest) share `overlap`
    tokens, 0 or 1. With rows of T + 1 tokens and an overlap of 1, every token except a document's
    first is a target exactly once. Empty documents are in no row.

    `shards`: this many shards of the store make a group, drawn by `seed`, and each group is packed
    by itself; 0: one group of all. Rows are numbered group by group, in a group windows first. The
    plan is the same in every epoch; seed and epoch permute the pieces of equal length. Raises
    `UsageError` for impossible numbers.
    """

    def __init__(
        self, store: Store, length: int, *, overlap: int = 0, shards: int = 0, seed: int = 0
    ) -> None:
        if overlap not in (0, 1):
            raise UsageError(
                f"packed rows cannot share {overlap} tokens",
                hint="0, or 1 where the next token is learned",
            )
        if length <= overlap:
            raise UsageError(
                f"rows of {length} tokens that share {overlap} cannot be packed",
                hint=f"rows of at least {overlap + 1} tokens",
            )
        self.store, self.length, self.seed = store, length, seed
        self.tokens = store.tokens
        self.overlap, self.step = overlap, length - overlap
        self.pieces = pieces_of(store, length, overlap, shards, seed)
        # By class: the place of its first document, and the number of its first window.
        self._document_begins = _begins(self.pieces.count)
        self._window_begins = _begins(self.pieces.count * self.pieces.windows)
        # By group: the number of its first window, its windows, its first row.
        self._group_window = self._window_begins[self.pieces.classes]
        self._group_windows = np.diff(self._group_window)
        self.groups = self._group_windows + self.pieces.packs
        self._row_begins = _begins(self.groups)
        self._packs = kept(self._make_packs, PLANS)

    def __len__(self) -> int:
        return int(self._row_begins[-1])

    def spans(self, rows: Array, epoch: int = 0) -> Spans:
        group, number, is_window = self._find(rows)
        at = np.flatnonzero(is_window)
        place, window = self._window(number[at])
        start = window * self.step
        parts = [
            np.stack([at, self._records(place), np.zeros_like(at), start, start + self.length])
        ]
        for one in np.unique(group[~is_window]).tolist():
            at = np.flatnonzero((group == one) & ~is_window)
            parts.append(self._pack_spans(at, number[at], one, epoch))
        spans = np.concatenate(parts, axis=1)
        return Spans(*spans.take(np.argsort(spans[0], kind="stable"), axis=1))

    def shared(self, rows: Array) -> Array:
        """Return how many tokens at the beginning of each row an earlier row has too.

        Only windows that continue a document share tokens. A rest may stand anywhere in its row;
        the number of its document says that its first token is not a target.
        """
        _, number, is_window = self._find(rows)
        shared = np.zeros(len(number), np.int64)
        _, window = self._window(number[is_window])
        shared[is_window] = np.where(window > 0, self.overlap, 0)
        return shared

    def _find(self, rows: Array) -> tuple[Array, Array, Array]:
        """Return (group, number of the window in the store or of the pack in the group, is it a
        window?).
        """
        rows = np.asarray(rows, np.int64)
        group = np.searchsorted(self._row_begins, rows, side="right") - 1
        number = rows - self._row_begins[group]
        is_window = number < self._group_windows[group]
        first = np.where(is_window, self._group_window[group], -self._group_windows[group])
        return group, number + first, is_window

    def _window(self, number: Array) -> tuple[Array, Array]:
        """Return (place of the document, number of the window in it) for windows of the store."""
        of = np.searchsorted(self._window_begins, number, side="right") - 1
        document, window = np.divmod(number - self._window_begins[of], self.pieces.windows[of])
        return self._document_begins[of] + document, window

    def _records(self, place: Array) -> Array:
        return self.pieces.documents[place].astype(np.int64)

    def _pack_spans(self, at: Array, pack: Array, group: int, epoch: int) -> Array:
        """Return the spans (5, n), as the fields of `Spans`, of packs of a group for rows `at`."""
        packs = self._packs(group)
        patterns = packs.patterns
        pattern = np.searchsorted(packs.begins, pack, side="right") - 1
        entries = patterns.offsets[pattern]
        owner, number = _spread(patterns.offsets[pattern + 1] - entries)
        entry = entries[owner] + number
        count = patterns.counts[entry]
        used = packs.used[entry] + (pack - packs.begins[pattern])[owner] * count
        of_entry, number = _spread(count)
        piece, owner, entry = used[of_entry] + number, owner[of_entry], entry[of_entry]
        rest = patterns.lengths[entry]
        draw = key(self.seed, epoch, group, rest.astype(np.uint64))
        place = packs.first[entry] + permute(piece, packs.pieces[entry], draw)
        of_class = np.searchsorted(self._document_begins, place, side="right") - 1
        start = self.pieces.windows[of_class] * self.step
        begin = np.searchsorted(owner, owner)
        # A rest does not begin its document, so that a number is left out before it.
        later = np.cumsum((start > 0) & (begin < np.arange(len(owner))))
        document = np.arange(len(owner)) - begin + later - later[begin]
        return np.stack([at[owner], self._records(place), document, start, start + rest])

    def _make_packs(self, group: int) -> Packs:
        first_class, end = self.pieces.classes[group : group + 2].tolist()
        own = slice(first_class, end)
        lengths, pieces, first = rests(self.pieces.rest[own], self.pieces.count[own])
        patterns = best_fit(lengths, pieces, self.length)
        of = np.searchsorted(lengths, patterns.lengths)
        first = first[of] + self._document_begins[first_class]
        return Packs(patterns, _begins(patterns.repeats), patterns.used(), pieces[of], first)


def _begins(counts: Array) -> Array:
    """Return where each of several runs begins, and the end of the last one (n + 1)."""
    return np.append(0, np.cumsum(counts))


def _spread(counts: Array) -> tuple[Array, Array]:
    """Return (owner, number within the owner) for `counts[i]` things of each owner i."""
    return np.repeat(np.arange(len(counts)), counts), ranges(0, counts)
