"""The loader: order, ranks, errors, an end."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from toy import cycles, make_store

from tokmill.errors import UsageError
from tokmill.feed.feed import Batch, Feed
from tokmill.models.decoder import Decoder, DecoderConfig
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.tasks.task import to_tensors
from tokmill.train.loader import Loader, micro_batches

SIZES = {"token": 23}
CPU = torch.device("cpu")


def loaded(feed: Feed, task: NextToken, steps: range, *place: int, ahead: int = 2) -> Loader:
    """Micro-batches of at most three rows."""
    return Loader(feed, task, steps, *place, micro_tokens=24, device=CPU, ahead=ahead)


@pytest.fixture
def task() -> NextToken:
    model = Decoder(DecoderConfig(dim=4, layers=1, heads=2), SIZES)
    return NextToken(NextTokenConfig(length=8), model, SIZES)


@pytest.fixture
def feed(tmp_path: Path, task: NextToken) -> Feed:
    return Feed(task.rows(Store(make_store(tmp_path / "store", cycles(20)))), 8, seed=3)


def test_batches_come_in_order_as_tensors(feed: Feed, task: NextToken) -> None:
    with loaded(feed, task, range(5, 9)) as loader:
        for step in range(5, 9):
            parts, count = loader.next()
            assert [len(part.document) for part in parts] == [3, 3, 2]
            batch = task.prepare(feed.batch(step))
            expected = to_tensors(batch, CPU)
            for name in ("columns", "targets"):
                joined = torch.cat([getattr(part, name)["token"] for part in parts])
                assert torch.equal(joined, getattr(expected, name)["token"])
            assert torch.equal(torch.cat([part.position for part in parts]), expected.position)
            assert count == task.count(batch)


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
        loaded(feed, task, range(3), 0, 3) as loader,
        pytest.raises(UsageError, match="3 processes"),
    ):
        loader.next()


def test_leaving_early_ends_the_thread(feed: Feed, task: NextToken) -> None:
    before = threading.active_count()
    with loaded(feed, task, range(10**9), ahead=1) as loader:
        loader.next()
    assert threading.active_count() == before


@pytest.mark.parametrize(("tokens", "sizes"), [(1, [1] * 5), (16, [2, 2, 1]), (99, [5])])
def test_micro_batches(tokens: int, sizes: list[int]) -> None:
    document = np.arange(40).reshape(5, 8)
    batch = Batch({"token": document}, document, np.arange(5).astype(np.uint64))
    parts = list(micro_batches(batch, tokens))
    assert [len(part) for part in parts] == sizes
    assert np.array_equal(np.concatenate([p.columns["token"] for p in parts]), document)


def test_a_batch_becomes_tensors_without_another_copy(feed: Feed, task: NextToken) -> None:
    batch = task.prepare(feed.batch(0))
    part = next(iter(micro_batches(batch, 24)))
    made = to_tensors(part, CPU)
    for name in ("columns", "targets"):
        array = getattr(batch, name)["token"]
        assert getattr(made, name)["token"].data_ptr() == array.ctypes.data
