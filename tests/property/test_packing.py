"""Packing in closed form against the algorithm piece by piece, and an epoch against its pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import token_store
from tokmill.feed.order import shard_groups
from tokmill.feed.packed import Packed, Patterns, best_fit

Piece = tuple[int, int, int]
"""(record, start, stop)"""


def plain_best_fit(pieces: list[int], capacity: int) -> list[int]:
    """Return the room that is left in each bin: longest first, into the fullest that holds it."""
    rooms: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= piece]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= piece
        else:
            rooms.append(capacity - piece)
    return rooms


def bins_of(patterns: Patterns) -> list[list[int]]:
    """The pieces of each bin."""
    entries = np.repeat(patterns.lengths, patterns.counts)
    ends = np.append(0, np.cumsum(patterns.counts))[patterns.offsets[1:-1]]
    contents = [part.tolist() for part in np.split(entries, ends)] if len(patterns.repeats) else []
    return [
        content
        for content, repeats in zip(contents, patterns.repeats.tolist(), strict=True)
        for _ in range(repeats)
    ]


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], int]:
    """Many pieces of a few lengths, or a few of many."""
    capacity = draw(st.integers(1, 60))
    few = draw(st.lists(st.tuples(st.integers(1, capacity), st.integers(1, 40)), max_size=12))
    many = draw(st.lists(st.integers(1, capacity), max_size=60))
    return [length for length, count in few for _ in range(count)] + many, capacity


@settings(max_examples=300, deadline=None)
@given(packings())
def test_best_fit_against_the_plain_algorithm(packing: tuple[list[int], int]) -> None:
    pieces, capacity = packing
    lengths, counts = np.unique(np.asarray(pieces, np.int64), return_counts=True)
    shuffled = np.random.default_rng(0).permutation(len(lengths))
    patterns = best_fit(lengths[shuffled], counts[shuffled], capacity)
    bins = bins_of(patterns)
    assert sorted(piece for content in bins for piece in content) == sorted(pieces)
    rooms = [capacity - sum(content) for content in bins]
    assert sorted(rooms) == sorted(plain_best_fit(pieces, capacity))
    assert all(content == sorted(content, reverse=True) for content in bins)
    assert len({tuple(content) for content in bins}) == len(patterns.repeats)
    used = patterns.used()
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        entries = np.flatnonzero(patterns.lengths == length)
        owner = np.searchsorted(patterns.offsets, entries, side="right") - 1
        taken = patterns.repeats[owner] * patterns.counts[entries]
        assert used[entries].tolist() == (np.cumsum(taken) - taken).tolist()
        assert taken.sum() == count


def slow_pieces(record: int, tokens: int, length: int, overlap: int) -> list[Piece]:
    """Windows for as long as they are full, then what no window holds, with the shared tokens."""
    pieces, start = [], 0
    while start + length <= tokens:
        pieces.append((record, start, start + length))
        start += length - overlap
    last = pieces[-1][2] if pieces else 0
    return pieces + ([(record, start, tokens)] if last < tokens else [])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=5),
    st.integers(2, 14),
    st.integers(0, 1),
    st.integers(0, 3),
    st.integers(-3, 3),
    st.integers(0, 3),
)
def test_an_epoch_against_its_pieces(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[int]],
    length: int,
    overlap: int,
    k: int,
    seed: int,
    epoch: int,
) -> None:
    store = token_store(
        tmp_path_factory.mktemp("packed"), [[[7] * tokens for tokens in shard] for shard in shards]
    )
    rows = Packed(store, length, overlap=overlap, shards=k, seed=seed)
    spans = rows.spans(np.arange(len(rows)), epoch)
    assert np.diff(spans.row, prepend=0).min(initial=0) == 0
    rooms = length - np.bincount(spans.row, spans.stop - spans.start, len(rows)).astype(int)
    assert rooms.min(initial=0) >= 0
    expected: list[int] = []
    for row, before, start in zip(spans.row, np.append(-1, spans.row), spans.start, strict=False):
        # A number is left out before the rest of a document that is cut.
        expected.append(0 if row != before else expected[-1] + 1 + (start > 0))
    assert spans.document.tolist() == expected

    records = np.split(np.arange(store.records), np.cumsum([len(shard) for shard in shards])[:-1])
    lengths = [tokens for shard in shards for tokens in shard]
    found: dict[int, list[Piece]] = {row: [] for row in range(len(rows))}
    for row, *piece in zip(spans.row, spans.record, spans.start, spans.stop, strict=True):
        found[int(row)].append(tuple(map(int, piece)))
    first = 0
    for group, count in zip(shard_groups(len(shards), k, seed), rows.groups.tolist(), strict=True):
        cuts = [
            slow_pieces(record, lengths[record], length, overlap)
            for shard in group
            for record in records[shard].tolist()
        ]
        windows = [piece for pieces in cuts for piece in pieces if piece[2] - piece[1] == length]
        others = [piece for pieces in cuts for piece in pieces if piece[2] - piece[1] < length]
        mine = [found[row] for row in range(first, first + count)]
        assert sorted(sum(mine[: len(windows)], [])) == sorted(windows)
        assert sorted(sum(mine[len(windows) :], [])) == sorted(others)
        plain = plain_best_fit([stop - start for _, start, stop in others], length)
        assert sorted(rooms[first + len(windows) : first + count]) == sorted(plain)
        first += count
    assert first == len(rows)
