"""The feed: a pure function of the step that any number of processes share."""

from pathlib import Path

import numpy as np
import pytest

from making import token_store
from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch, Feed
from tokmill.feed.order import key
from tokmill.feed.rows import Rows, Stream, Whole, Windows
from tokmill.store.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 40, (4, 12)).tolist()
    number = iter(range(1, 10**6))
    shards = [[[next(number) for _ in range(n)] for n in shard] for shard in lengths]
    return token_store(tmp_path_factory.mktemp("feed"), shards)


def rows_of(store: Store, kind: str) -> Rows:
    if kind == "stream":
        return Stream(store, 16, seed=3)
    if kind == "whole":
        return Whole(store, 16)
    shards = 3 if kind == "grouped" else 0
    return Windows(store, 16, across=kind != "record", shards=shards, seed=6)


def join(batches: list[Batch]) -> tuple[list[list[int]], list[list[int]], list[int]]:
    return (
        [row for batch in batches for row in batch.columns["token"].tolist()],
        [row for batch in batches for row in batch.document.tolist()],
        [k for batch in batches for k in batch.key.tolist()],
    )


KINDS = ["across", "record", "stream", "grouped", "whole"]


@pytest.mark.parametrize("kind", ["across", "record", "grouped", "whole"])
def test_an_epoch_is_every_row_once(store: Store, kind: str) -> None:
    rows = rows_of(store, kind)
    for batch_size in (1, 3, len(rows), len(rows) + 5):
        feed = Feed(rows, batch_size, seed=9)
        steps = -(-3 * len(rows) // batch_size)
        found = np.concatenate([np.stack(feed.rows_of(step), 1) for step in range(steps)])
        for epoch in range(3):
            mine = found[epoch * len(rows) : (epoch + 1) * len(rows)]
            assert set(mine[:, 0].tolist()) == {epoch}
            assert sorted(mine[:, 1].tolist()) == list(range(len(rows)))


def test_an_epoch_of_windows_is_every_token_once(store: Store) -> None:
    rows = rows_of(store, "across")
    feed = Feed(rows, 1, seed=2)
    batches = [feed.batch(step) for step in range(len(feed))]
    tokens = [t for b in batches for t in b.columns["token"][b.document >= 0].tolist()]
    assert sorted(tokens) == list(range(1, store.tokens + 1))
    assert all((b.columns["token"][b.document < 0] == 0).all() for b in batches)


def test_streams_are_drawn_anew_each_epoch(store: Store) -> None:
    rows = rows_of(store, "stream")
    feed = Feed(rows, len(rows), shuffle=False)
    assert join([feed.batch(0)]) != join([feed.batch(1)])


def test_a_batch_over_two_epochs(store: Store) -> None:
    """Its rows come from both, each with its own key and, of a stream, its own place."""
    rows = rows_of(store, "stream")
    count = len(rows)
    feed = Feed(rows, count - 1, seed=4, shuffle=False)
    batch = feed.batch(1)
    epoch, row, _ = feed.rows_of(1)
    assert (epoch[0], epoch[1]) == (0, 1)
    single = Feed(rows, 1, seed=4, shuffle=False)
    alone = [single.batch(int(e) * count + int(r)) for e, r in zip(epoch, row, strict=True)]
    assert join([batch]) == join(alone)
    wanted = [int(key(4, int(e), int(r))[0]) for e, r in zip(epoch, row, strict=True)]
    assert batch.key.tolist() == wanted


def test_a_batch_in_parts(store: Store) -> None:
    batch = Feed(rows_of(store, "across"), 8).batch(0)
    parts = [batch.rows(slice(start, start + 3)) for start in range(0, 8, 3)]
    assert [len(part) for part in parts] == [3, 3, 2]
    assert join(parts) == join([batch])


def test_batches_that_cannot_be_made(store: Store) -> None:
    rows = rows_of(store, "across")
    with pytest.raises(UsageError, match="cannot be split over 3") as caught:
        Feed(rows, 8).batch(0, 0, 3)
    assert "6 and 9" in caught.value.hint
    with pytest.raises(UsageError, match="cannot be made"):
        Feed(rows, 0)


def test_only_the_wanted_columns(tmp_path: Path) -> None:
    from making import rec, write_store
    from tokmill.store.schema import Column

    schema = {"token": Column("u1"), "depth": Column("u1")}
    store = write_store(tmp_path, schema, [[rec([1, 2], depth=[3, 4])]])
    rows = Windows(store, 2)
    assert list(Feed(rows, 1, columns=["depth"]).batch(0).columns) == ["depth"]
    assert list(Feed(rows, 1).batch(0).columns) == ["token", "depth"]
