"""Rows against slow twins: windows over the ribbon and over each record, and streams."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokmill
from making import token_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.feed.feed import Feed
from tokmill.feed.order import key, shard_groups
from tokmill.feed.rows import Rows, Stream, Windows
from tokmill.store.store import Store

LENGTHS = st.lists(st.lists(st.integers(0, 7), max_size=5), min_size=1, max_size=3)


def store_of(path: Path, lengths: list[list[int]]) -> tuple[Store, list[list[int]]]:
    """Tokens are numbered through the store, from 1."""
    number = 0
    shards = []
    for shard in lengths:
        records = []
        for length in shard:
            records.append(list(range(number + 1, number + length + 1)))
            number += length
        shards.append(records)
    return token_store(path, shards), [record for shard in shards for record in shard]


Row = list[tuple[int, int]]
"""(token, document) at each place."""


def rows_of(rows: Rows, epoch: int = 0) -> list[Row]:
    """All rows, filled from the store."""
    size, length = len(rows), rows.length
    document = np.full((size, length), -1, np.int32)
    columns: dict[str, Any] = {}
    rows.store.fill(rows.spans(np.arange(size), epoch), length, columns, document, size)
    if not columns:
        return []
    return [
        [(t, d) for t, d in zip(tokens, documents, strict=True) if d >= 0]
        for tokens, documents in zip(columns["token"].tolist(), document.tolist(), strict=True)
    ]


def slow_row(ribbon: list[tuple[int, int]]) -> Row:
    """Documents are numbered within the row."""
    seen: list[int] = []
    for _, record in ribbon:
        if record not in seen:
            seen.append(record)
    return [(token, seen.index(record)) for token, record in ribbon]


def slow_windows(records: list[list[int]], length: int, step: int, across: bool) -> list[Row]:
    return [row for row, _ in slow_shared(records, length, step, across)]


def slow_shared(
    records: list[list[int]], length: int, step: int, across: bool
) -> list[tuple[Row, int]]:
    """Windows, and how many of their first tokens the one before has held."""
    ribbon = [(token, i) for i, record in enumerate(records) for token in record]
    parts = [ribbon] if across else [[t for t in ribbon if t[1] == i] for i in range(len(records))]
    rows = []
    for part in parts:
        start, before = 0, -length
        while start < len(part):
            row = part[start : start + length]
            rows.append(
                (slow_row(row), len(set(row) & set(part[max(0, before) : before + length])))
            )
            if start + length >= len(part):
                break
            start, before = start + step, start
    return rows


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 12), st.booleans(), st.integers(0, 3))
def test_shared_tokens_and_all_tokens_against_the_slow_twin(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    length: int,
    step: int,
    across: bool,
    shards: int,
) -> None:
    store, records = store_of(tmp_path_factory.mktemp("rows"), lengths)
    rows = Windows(store, length, step, across=across, shards=shards, seed=1)
    wanted = slow_shared(records, length, step, across)
    shared = {row[0]: count for row, count in wanted}
    found = [row[0] for row in rows_of(rows)]
    assert rows.shared(np.arange(len(rows))).tolist() == [shared[first] for first in found]
    assert rows.tokens == len({token for row, _ in wanted for token, _ in row})


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 12), st.booleans(), st.integers(0, 4))
def test_windows_in_groups_of_shards(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    length: int,
    step: int,
    across: bool,
    shards: int,
) -> None:
    """A window belongs to the shard of its first token; tokens tell their shard."""
    store, records = store_of(tmp_path_factory.mktemp("rows"), lengths)
    rows = Windows(store, length, step, across=across, shards=shards, seed=4)
    ends = np.cumsum([sum(shard) for shard in lengths])
    in_store = slow_windows(records, length, step, across)
    shard_of = [int(np.searchsorted(ends, row[0][0], side="left")) for row in in_store]
    groups = [
        [
            row
            for shard in group
            for row, own in zip(in_store, shard_of, strict=True)
            if own == shard
        ]
        for group in shard_groups(len(lengths), shards, 4)
    ]
    assert rows.groups.tolist() == [len(group) for group in groups]
    assert rows.groups.dtype == np.int64
    assert rows_of(rows) == [row for group in groups for row in group]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_stream_against_the_slow_twin(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    length: int,
    seed: int,
    epoch: int,
) -> None:
    store, records = store_of(tmp_path_factory.mktemp("rows"), lengths)
    if store.tokens < length:
        with pytest.raises(TokmillError, match="have no window of"):
            Stream(store, length, seed)
        return
    rows = Stream(store, length, seed)
    ribbon = [(token, i) for i, record in enumerate(records) for token in record]
    wanted = []
    for row in range(store.tokens // length):
        start = int(key(seed, epoch, row)[0]) % (store.tokens - length + 1)
        wanted.append(slow_row(ribbon[start : start + length]))
    assert len(rows) == len(wanted)
    assert rows_of(rows, epoch) == wanted
    assert rows.tokens == sum(map(len, wanted))
    assert rows.groups.tolist() == [len(wanted)]
    assert rows.shared(np.arange(len(rows))).tolist() == [0] * len(wanted)


@pytest.mark.parametrize(("length", "step"), [(0, 1), (1, 0), (-1, 1)])
def test_windows_that_cannot_be_cut(tmp_path: Path, length: int, step: int) -> None:
    store, _ = store_of(tmp_path, [[3]])
    with pytest.raises(TokmillError, match="cannot be cut"):
        Windows(store, length, step)


def test_a_store_without_tokens_has_no_rows(tmp_path: Path) -> None:
    store, _ = store_of(tmp_path, [[0, 0]])
    for across in (True, False):
        rows = Windows(store, 4, across=across)
        assert len(rows) == 0
        with pytest.raises(TokmillError, match="no rows"):
            Feed(rows, 2)


def test_a_feed_of_a_store_says_what_to_write(tmp_path: Path) -> None:
    store, _ = store_of(tmp_path, [[3]])
    wrong: Any
    for wrong in (store, str(store.path), None):
        with pytest.raises(UsageError, match="a feed takes rows") as caught:
            Feed(wrong, 16)
        assert caught.value.hint == "tokmill.Feed(tokmill.Windows(store, 128), batch_size=16)"
    assert len(Feed(tokmill.Windows(store, 2), batch_size=1)) == 2
