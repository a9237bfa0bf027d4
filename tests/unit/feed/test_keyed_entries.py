"""Entries of records with equal keys."""

from pathlib import Path

import numpy as np
import pytest

from entry_stores import lay
from tokmill.base.errors import UsageError
from tokmill.feed.entries import KeyedEntries
from tokmill.store.store import Store
from toy import make_store

KEYS = np.asarray([5, 2, 5, 9, 2, 5, 5, 7, 7, 5])
PARTS = np.asarray([0, 0, 0, 0, 0, 1, 0, 0, 0, 0])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Record i has i tokens; each is 1 + i."""
    path = make_store(tmp_path / "store", [np.full(i, 1 + i, np.int64) for i in range(len(KEYS))])
    lay(path, "keys", {"name": KEYS.astype(np.uint32), "part": PARTS.astype(np.uint32)})
    return Store(path, ["keys"])


def test_entries_are_the_records_of_each_key(store: Store) -> None:
    rows = KeyedEntries(store, 6, ["name", "part"], size=5)
    # The record 0 is empty, 5 is another part, and 3 is alone.
    assert len(rows) == 3 and rows.alone == 3
    assert rows.sizes(np.arange(3)).tolist() == [2, 3, 2]
    spans = rows.spans(np.asarray([2, 0, 1]))
    groups = np.split(spans.record, [2, 4])
    assert [sorted(group.tolist()) for group in groups] == [[7, 8], [1, 4], [2, 6, 9]]
    assert (spans.stop == np.minimum(spans.record, 6)).all() and not spans.start.any()
    assert rows.tokens == 1 + 4 + 2 + 6 + 6 + 6 + 6


def test_records_are_drawn_anew_each_epoch(store: Store) -> None:
    rows = KeyedEntries(store, 16, ["name"])
    drawn = {tuple(sorted(rows.spans(np.asarray([1]), epoch).record)) for epoch in range(40)}
    # Of 5: 2, 5, 6, 9 (0 is empty), two at a time.
    assert len(drawn) == 6
    again = KeyedEntries(store, 16, ["name"], seed=1)
    assert any(
        again.spans(np.asarray([1]), e).record.tolist()
        != rows.spans(np.asarray([1]), e).record.tolist()
        for e in range(8)
    )


def test_keys_that_make_no_entries_are_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="no two records are equal in name, bytes"):
        KeyedEntries(store, 8, ["name", "bytes"])
    with pytest.raises(UsageError, match="no column 'nmae'"):
        KeyedEntries(store, 8, ["nmae"])
    with pytest.raises(UsageError, match="cannot be made"):
        KeyedEntries(store, 8, ["name"], size=1)
