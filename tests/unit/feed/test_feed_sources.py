"""Feeds of several stores, and what a feed refuses."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import token_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.feed.feed import Batch, Feed
from tokmill.feed.order import BLOCK, key, permute
from tokmill.feed.packed import Packed
from tokmill.feed.rows import Stream, Whole, Windows
from tokmill.store.store import Store

KINDS = {
    "windows": lambda store: Windows(store, 8),
    "record": lambda store: Windows(store, 8, across=False),
    "grouped": lambda store: Windows(store, 8, 5, shards=2, seed=1),
    "whole": lambda store: Whole(store, 8, shards=1, seed=1),
    "stream": lambda store: Stream(store, 8, seed=2),
    "packed": lambda store: Packed(store, 8, overlap=1),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    """Tokens say their store: 0 … 9,999, 10,000 … 19,999, 20,000 and more."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("feed")
    made = []
    for number, records in enumerate((60, 12, 25)):
        token = number * 10_000
        shards: list[list[list[int]]] = [[], [], []]
        for record in range(records):
            length = int(rng.integers(1, 30))
            shards[record % 3].append(list(range(token, token + length)))
            token += length
        made.append(token_store(folder / str(number), shards))
    return made


def equal(one: Batch, other: Batch) -> None:
    assert one.columns.keys() == other.columns.keys()
    for name, values in one.columns.items():
        assert values.dtype == other.columns[name].dtype
        assert np.array_equal(values, other.columns[name])
    for name in ("document", "key", "shared", "entry"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def join(parts: list[Batch]) -> Batch:
    return Batch(
        {"token": np.concatenate([part.columns["token"] for part in parts])},
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("document", "key")),
        shared=np.concatenate([part.shared for part in parts]),
    )


@pytest.fixture(params=[*KINDS, *(f"mixed {kind}" for kind in KINDS)])
def make_feed(request: pytest.FixtureRequest, stores: list[Store]) -> Any:
    several, _, kind = request.param.rpartition(" ")

    def make(batch_size: int, **keys: Any) -> Feed:
        if several:
            rows = [KINDS[kind](Store(store.path)) for store in stores]
            return Feed(rows, batch_size, weights=[1, 2, 0.5], **keys)
        return Feed(KINDS[kind](Store(stores[0].path)), batch_size, **keys)

    return make


def test_any_world_draws_the_same_rows(make_feed: Any) -> None:
    for wrong in ((-1, 0, 1), (0, 2, 2), (0, -1, 2), (0, 0, 0), (0, 0, -1)):
        with pytest.raises(UsageError, match="there is no step"):
            make_feed(16).batch(*wrong)
    feed = make_feed(16, seed=3)
    for step in (0, 1, 9, 1000, 10**9):
        for world in (2, 8):
            equal(join([feed.batch(step, rank, world) for rank in range(world)]), feed.batch(step))


def test_a_step_is_enough_to_go_on(make_feed: Any) -> None:
    """A fresh feed makes the batch of any step, in any order, as the first one did."""
    feed = make_feed(6, seed=3)
    first = [feed.batch(step) for step in range(40)]
    for step in (39, 0, 17, 38):
        equal(make_feed(6, seed=3).batch(step), first[step])
    for step in reversed(range(40)):
        equal(feed.batch(step), first[step])


def test_threads_do_not_meet(make_feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor when each lets go of the shards that another one reads."""
    monkeypatch.setattr("tokmill.store.store.most_maps", lambda: 2)
    feed = make_feed(8, seed=1)
    wanted = [make_feed(8, seed=1).batch(step) for step in range(0, 60, 3)]
    steps = [*range(0, 60, 3)] * 8
    with ThreadPoolExecutor(4) as pool:
        for step, batch in zip(steps, pool.map(feed.batch, steps), strict=True):
            equal(batch, wanted[step // 3])


def test_a_batch_over_two_blocks(tmp_path: Path) -> None:
    store = token_store(tmp_path, [[list(range(BLOCK + 100))]])
    batch = Feed(Windows(store, 1), BLOCK // 2 + 30, seed=2).batch(1)
    row = permute(np.arange(BLOCK + 100), BLOCK + 100, 2, 0)[BLOCK // 2 + 30 : BLOCK + 60]
    assert batch.columns["token"][:, 0].tolist() == row.tolist()
    assert batch.key.tolist() == key(2, 0, row).tolist()


def test_only_the_shards_of_a_group_are_touched(tmp_path: Path) -> None:
    """Whatever the seed, a stretch of an epoch reads two shards and no others."""
    store = token_store(tmp_path, [[[shard] * 8] * 10 for shard in range(6)])
    feed = Feed(Windows(store, 8, shards=2, seed=7), 20, seed=1)
    drawn = [set(feed.batch(step).columns["token"].ravel().tolist()) for step in range(9)]
    assert all(len(shards) == 2 for shards in drawn)
    for epoch in range(3):
        groups = drawn[3 * epoch : 3 * epoch + 3]
        assert set.union(*groups) == set(range(6))
        assert set(map(frozenset, groups)) == set(map(frozenset, drawn[:3]))


def source_of(batch: Batch) -> np.ndarray[Any, Any]:
    return np.asarray(batch.columns["token"][:, 0], np.int64) // 10_000


def test_tokens_of_each_store_are_its_share_at_every_step(stores: list[Store]) -> None:
    rows = [Whole(store, 8) for store in stores]
    weights = [0.2, 0.5, 0.3]
    feed = Feed(rows, 16, weights=weights, seed=5)
    mean = [one.tokens / len(one) for one in rows]
    share = np.asarray([weight / one for weight, one in zip(weights, mean, strict=True)])
    share /= share.sum()
    drawn, tokens = np.zeros(3), np.zeros(3)
    for step in range(300):
        batch = feed.batch(step)
        source = source_of(batch)
        assert source.tolist() == feed.rows_of(step)[2].tolist()
        drawn += np.bincount(source, minlength=3)
        held = np.count_nonzero(batch.document >= 0, axis=1)
        tokens += np.bincount(source, weights=held, minlength=3)
        assert np.abs(drawn - 16 * (step + 1) * share).max() < 3
    assert np.abs(tokens / tokens.sum() - weights).max() < 0.01


def test_without_weights_an_epoch_is_every_row_of_every_store_once(stores: list[Store]) -> None:
    rows = [Windows(store, 8) for store in stores]
    count = sum(map(len, rows))
    feed = Feed(rows, count, seed=5)
    assert len(feed) == 1
    for step in range(3):
        epoch, row, source = feed.rows_of(step)
        # Where the turns fall at the seam, a row of the next epoch may come before this one's last.
        for number, one in enumerate(rows):
            mine = epoch[source == number] * len(one) + row[source == number]
            assert abs(len(mine) - len(one)) <= 2
            assert len(set(mine.tolist())) == len(mine)


def test_equal_rows_of_two_stores_are_not_drawn_alike(stores: list[Store]) -> None:
    rows = Windows(stores[0], 8)
    feed = Feed([rows, rows], 2 * len(rows), seed=4)
    epoch, row, source = feed.rows_of(0)
    assert row[source == 0].tolist() != row[source == 1].tolist()
    batch = feed.batch(0)
    assert len(set(batch.key.tolist())) == len(batch)
    # One store alone, in a list or not, has the keys that it always had.
    alone = Feed([rows], 4, seed=4).batch(0)
    equal(alone, Feed(rows, 4, seed=4).batch(0))
    assert alone.key.tolist() == key(4, 0, permute(np.arange(4), len(rows), 4, 0)).tolist()


def test_dtypes_of_stores_may_differ(tmp_path: Path) -> None:
    from making import rec, write_store
    from tokmill.store.schema import Column

    small = write_store(tmp_path / "u1", {"token": Column("u1")}, [[rec([1, 2, 3, 4])]])
    large = write_store(tmp_path / "u4", {"token": Column("u4")}, [[rec([1 << 20] * 4)]])
    for stores in ([small, large], [large, small]):
        batch = Feed([Windows(store, 2) for store in stores], 4).batch(0)
        assert batch.columns["token"].dtype == np.dtype("<u4")
        found = sorted(map(tuple, batch.columns["token"].tolist()))
        assert found == [(1, 2), (3, 4), (1 << 20, 1 << 20), (1 << 20, 1 << 20)]


def damage(store: Store) -> None:
    """Raise the bytes of the last token above all ids."""
    entry = store.shards[0]
    path = store.path / "shards" / f"{entry.name}.safetensors"
    data = bytearray(path.read_bytes())
    array = store.shard(0)["token"]
    place = bytes(data).rindex(array.tobytes()) + array.nbytes
    data[place - 2 : place] = b"\xff\xff"
    path.write_bytes(data)


def test_ids_out_of_range_name_their_store(tmp_path: Path) -> None:
    sound, spoiled = (token_store(tmp_path / name, [[[1, 2, 3, 4]]]) for name in "ab")
    damage(spoiled)
    spoiled = Store(spoiled.path)
    for rows in ([Windows(sound, 2), Windows(spoiled, 2)], Windows(spoiled, 2)):
        with pytest.raises(TokmillError, match="id 65535, but its ids are 0 to 4") as caught:
            Feed(rows, 4).batch(0)
        assert caught.value.where == str(spoiled.path)
        assert "store validate" in caught.value.hint


def test_rows_in_words(stores: list[Store]) -> None:
    alone = Feed(Windows(stores[0], 8), 10, shuffle=False)
    assert alone.describe(*alone.rows_of(0)) == "epoch 0, rows 0, 1, 2, 3, 4, 5, 6, 7, …"
    feed = Feed([Windows(store, 8) for store in stores[:2]], 6, weights=[1, 1], shuffle=False)
    words = feed.describe(*feed.rows_of(0)).split("; ")
    assert {text.rpartition(" of ")[2] for text in words} == {str(s.path) for s in stores[:2]}
    assert all(text.startswith("epoch 0, rows 0, 1") for text in words)


def test_feeds_that_cannot_be(stores: list[Store]) -> None:
    rows = Windows(stores[0], 8)
    with pytest.raises(UsageError, match="of 9 and of 8 tokens") as caught:
        Feed([rows, Windows(stores[1], 9)], 4)
    assert caught.value.where == str(stores[1].path)
    with pytest.raises(UsageError, match="there are none"):
        Feed([], 4)
    with pytest.raises(UsageError, match="no column 'tokem'") as caught:
        Feed(rows, 4, columns=["tokem"])
    assert "did you mean 'token'" in caught.value.hint
    with pytest.raises(UsageError, match="2 weights"):
        Feed(rows, 4, weights=[1, 1])
    for step, rank, world in ((-1, 0, 1), (0, 2, 2), (0, -1, 2), (0, 0, 0)):
        with pytest.raises(UsageError, match="no step"):
            Feed(rows, 4).batch(step, rank, world)
    for length in (-1, 0):
        with pytest.raises(TokmillError, match="have no window of"):
            Stream(stores[0], length)
