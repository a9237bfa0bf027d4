"""Packed rows: every token once an epoch, whoever draws them."""

from pathlib import Path

import numpy as np
import pytest

from making import token_store
from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch, Feed
from tokmill.feed.packed import Packed
from tokmill.feed.rows import Rows
from tokmill.store.store import Store

LENGTH = 16


def numbered(path: Path, shards: list[list[int]]) -> Store:
    """Tokens are numbered through the store, from 1."""
    number = iter(range(1, 10**6))
    return token_store(
        path, [[[next(number) for _ in range(n)] for n in shard] for shard in shards]
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Five shards: empty documents, of one token, of a row and more, many of equal length."""
    rng = np.random.default_rng(5)
    shards = [[0, 1, LENGTH, LENGTH + 1, 3 * LENGTH, 100]]
    shards += [rng.integers(0, 40, 50).tolist() for _ in range(3)]
    return numbered(tmp_path_factory.mktemp("packed"), [*shards, [0, 0]])


KINDS: dict[str, dict[str, int]] = {
    "plain": {},
    "overlap": {"overlap": 1},
    "groups": {"shards": 2, "seed": 3},
    "both": {"overlap": 1, "shards": 2, "seed": 3},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def an_epoch(rows: Rows, epoch: int = 0) -> Batch:
    """All rows of an epoch in the order of their numbers."""
    feed = Feed(rows, len(rows), shuffle=False)
    return feed.batch(epoch)


def contents(rows: Rows, epoch: int) -> set[tuple[int, ...]]:
    """The records of each row."""
    spans = rows.spans(np.arange(len(rows)), epoch)
    ends = np.cumsum(np.bincount(spans.row))[:-1]
    return {tuple(part.tolist()) for part in np.split(spans.record, ends)}


@kinds
def test_shared_tokens_of_windows(store: Store, kind: str) -> None:
    """A window that goes on with a document begins with the last token of the window before."""
    rows = Packed(store, LENGTH, **KINDS[kind])
    tokens = an_epoch(rows).columns["token"]
    shared = rows.shared(np.arange(len(rows)))
    full = np.flatnonzero(shared)
    overlap = KINDS[kind].get("overlap", 0)
    assert set(shared.tolist()) == {0, overlap}
    assert np.isin(tokens[full, 0], tokens[:, -1]).all()
    # Of the documents of 17, 48 and 100 tokens and those of the random shards.
    lengths = np.diff(store.ends(), prepend=0)
    windows = np.maximum(0, (lengths - LENGTH) // (LENGTH - overlap) + 1)
    assert len(full) == (np.maximum(0, windows - 1).sum() if overlap else 0)


def test_epochs_and_seeds_pack_other_documents_together(store: Store) -> None:
    rows = Packed(store, LENGTH)
    seen = [contents(rows, epoch) for epoch in range(4)]
    seen.append(contents(Packed(store, LENGTH, seed=1), 0))
    for number, one in enumerate(seen):
        for other in seen[:number]:
            assert len(one & other) < 0.8 * len(one)
    assert contents(rows, 2) == seen[2]


def test_rows_that_cannot_be_packed(store: Store) -> None:
    for length, options, what in (
        (0, {}, "rows of 0 tokens"),
        (1, {"overlap": 1}, "rows of 1 tokens that share 1"),
        (8, {"overlap": 2}, "cannot share 2 tokens"),
        (8, {"overlap": -1}, "cannot share -1 tokens"),
        (8, {"shards": -1}, "-1 shards"),
    ):
        with pytest.raises(UsageError, match=what):
            Packed(store, length, **options)


def test_a_store_without_tokens_has_no_rows(tmp_path: Path) -> None:
    for number, shards in enumerate(([], [[0, 0]], [[0], []])):
        for k in (0, 1):
            rows = Packed(numbered(tmp_path / str(number), shards), 4, shards=k)
            assert len(rows) == rows.tokens == 0
            assert len(rows.spans(np.zeros(0, np.int64)).row) == 0
            assert rows.shared(np.zeros(0, np.int64)).tolist() == []
