"""The loader: order, ranks, errors, an end."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from toy import cycles, make_store

from tokmill.errors import UsageError
from tokmill.feed.feed import Batch, Feed
from tokmill.models.decoder import Decoder, DecoderConfig
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.train.loader import Loader, micro_batches

SIZES = {"token": 23}


@pytest.fixture
def task() -> NextToken:
    model = Decoder(DecoderConfig(dim=4, layers=1, heads=2), SIZES)
    return NextToken(NextTokenConfig(length=8), model, SIZES)


@pytest.fixture
def feed(tmp_path: Path, task: NextToken) -> Feed:
    return Feed(task.rows(Store(make_store(tmp_path / "store", cycles(20)))), 8, seed=3)


def test_batches_come_in_order_and_are_prepared(feed: Feed, task: NextToken) -> None:
    with Loader(feed, task, range(5, 9)) as loader:
        for step in range(5, 9):
            batch, count = loader.next()
            expected = task.prepare(feed.batch(step))
            assert np.array_equal(batch.columns["token"], expected.columns["token"])
            assert np.array_equal(batch.targets["token"], expected.targets["token"])
            assert count == task.count(expected)


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_processes_draws_the_same_rows(
    feed: Feed, task: NextToken, world: int
) -> None:
    for step in (0, 1, 7, 40):
        whole = task.prepare(feed.batch(step))
        parts = [task.prepare(feed.batch(step, rank, world)) for rank in range(world)]
        for name in ("columns", "targets"):
            joined = np.concatenate([getattr(part, name)["token"] for part in parts])
            assert np.array_equal(joined, getattr(whole, name)["token"])
        assert np.array_equal(np.concatenate([part.key for part in parts]), whole.key)
        assert sum(map(task.count, parts)) == task.count(whole)


def test_an_error_of_the_thread_comes_out(feed: Feed, task: NextToken) -> None:
    with (
        Loader(feed, task, range(3), 0, 3) as loader,
        pytest.raises(UsageError, match="3 processes"),
    ):
        loader.next()


def test_leaving_early_ends_the_thread(feed: Feed, task: NextToken) -> None:
    before = threading.active_count()
    with Loader(feed, task, range(10**9), ahead=1) as loader:
        loader.next()
    assert threading.active_count() == before


@pytest.mark.parametrize(("tokens", "sizes"), [(1, [1] * 5), (16, [2, 2, 1]), (99, [5])])
def test_micro_batches(tokens: int, sizes: list[int]) -> None:
    document = np.arange(40).reshape(5, 8)
    batch = Batch({"token": document}, document, np.arange(5).astype(np.uint64))
    parts = list(micro_batches(batch, tokens))
    assert [len(part) for part in parts] == sizes
    assert np.array_equal(np.concatenate([p.columns["token"] for p in parts]), document)
