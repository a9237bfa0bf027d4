"""The loader: order, ranks, errors, an end."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch, Feed
from tokmill.models.model import Inputs, Model
from tokmill.models.rwkv.rwkv7 import RWKV7, RWKV7Config
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.tasks.task import to_tensors
from tokmill.training.data import STEP, Loader, evened, micro_batches, to_micro
from tokmill.training.engines.engine import Engine
from tokmill.training.recipe.config import OptimConfig, RunConfig
from toy import cycles, make_store

SIZES = {"token": 23}
CPU = torch.device("cpu")


def loaded(feed: Feed, task: NextToken, steps: range, *place: int, ahead: int = 2) -> Loader:
    """Micro-batches of at most three rows."""
    return Loader(feed, task, steps, *place, micro_tokens=24, device=CPU, ahead=ahead)


@pytest.fixture
def task() -> NextToken:
    model = Decoder(DecoderConfig(dim=4, layers=1, heads=2), Inputs(SIZES))
    return NextToken(NextTokenConfig(length=8), model, Inputs(SIZES))


@pytest.fixture
def feed(tmp_path: Path, task: NextToken) -> Feed:
    return Feed(task.rows(Store(make_store(tmp_path / "store", cycles(20)))), 8, seed=3)


def test_batches_come_in_order_as_tensors(feed: Feed, task: NextToken) -> None:
    with loaded(feed, task, range(5, 9)) as loader:
        for step in range(5, 9):
            parts, count = loader.next()
            assert [part.entries.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]
            made = [part.tensors for part in parts]
            batch = task.prepare(feed.batch(step))
            expected = to_tensors(batch, CPU)
            for name in ("columns", "targets"):
                joined = torch.cat([getattr(part, name)["token"] for part in made])
                assert torch.equal(joined, getattr(expected, name)["token"])
            assert torch.equal(torch.cat([part.position for part in made]), expected.position)
            assert count == task.count(batch)


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
    assert np.concatenate([part.entry for part in parts]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("tokens", [1, 40, 100, 10_000])
def test_micro_batches_take_whole_entries(tokens: int) -> None:
    """The longest entries first; one is in one part, whatever its size."""
    random = np.random.default_rng(2)
    sizes = random.integers(1, 5, 20)
    entry = np.repeat(np.arange(20), sizes)
    lengths = random.integers(1, 41, len(entry))
    document = np.where(np.arange(40) < lengths[:, None], 0, -1).astype(np.int32)
    ids = np.arange(len(entry))[:, None] * 100 + np.arange(40)
    targets = {"row": np.arange(len(entry)), "share": random.random((len(entry), 40))}
    keys = np.arange(len(entry)).astype(np.uint64)
    batch = Batch({"token": ids}, document, keys, targets=targets, entry=entry)
    parts = list(micro_batches(batch, tokens))
    assert sorted(np.concatenate([part.targets["row"] for part in parts])) == list(range(len(ids)))
    seen: list[int] = []
    longest = []
    for part in parts:
        rows, length = part.targets["row"], part.document.shape[1]
        assert np.array_equal(part.columns["token"], ids[rows, :length])
        assert np.array_equal(part.targets["share"], targets["share"][rows, :length])
        assert np.array_equal(part.entry, entry[rows])
        whole = list(dict.fromkeys(part.entry.tolist()))
        assert np.array_equal(rows, np.concatenate([np.flatnonzero(entry == e) for e in whole]))
        assert len(whole) == 1 or part.document.size <= tokens
        assert (batch.document[rows, length:] < 0).all()
        seen += whole
        longest.append(length)
    assert sorted(seen) == list(range(20))
    assert longest == sorted(longest, reverse=True)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Documents of 1 to 80 tokens."""
    random = np.random.default_rng(5)
    documents = [random.integers(1, 23, n) for n in random.integers(1, 81, 60)]
    return Store(make_store(tmp_path_factory.mktemp("stores") / "mixed", documents))


def whole_rows(model: Model, **keys: Any) -> NextToken:
    return NextToken(NextTokenConfig(length=70, rows="whole", **keys), model, Inputs(SIZES))


@pytest.mark.parametrize("tokens", [1, 130, 400, 10_000])
def test_rows_are_trimmed_to_what_stands_in_them(mixed: Store, tokens: int) -> None:
    task = whole_rows(Decoder(DecoderConfig(dim=4, layers=1, heads=2), Inputs(SIZES)))
    batch = task.prepare(Feed(task.rows(mixed), 32).batch(0))
    parts = list(micro_batches(batch, tokens))
    assert sorted(np.concatenate([part.entry for part in parts])) == list(range(32))
    lengths = []
    for part in parts:
        rows = part.entry
        size, length = part.document.shape
        assert size == 1 or size * length <= tokens
        longest = (batch.document[rows] >= 0).sum(1).max()
        assert longest <= length <= min(70, longest + STEP)
        for name in ("columns", "targets"):
            array = getattr(batch, name)["token"]
            assert np.array_equal(getattr(part, name)["token"], array[rows, :length])
        # Nothing that is read or learned is cut off.
        assert (batch.document[rows, length:] < 0).all()
        assert (batch.targets["token"][rows, length:] < 0).all()
        lengths.append(length)
    assert lengths == sorted(lengths, reverse=True)
    computed = sum(part.document.size for part in parts)
    assert computed <= (0.8 if tokens <= 400 else 1.0) * batch.document.size


@pytest.mark.parametrize(
    "model",
    [
        Decoder(DecoderConfig(dim=8, layers=2, heads=2), Inputs(SIZES)),
        RWKV7(RWKV7Config(dim=8, layers=2, head_dim=4), Inputs(SIZES)),
    ],
)
def test_trimming_changes_neither_loss_nor_gradient(mixed: Store, model: Model) -> None:
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    task = whole_rows(model, tied=False)
    feed = Feed(task.rows(mixed), 16, seed=4)
    found = []
    with Loader(feed, task, range(1), micro_tokens=300, device=CPU) as loader:
        trimmed, count = loader.next()
    whole = [to_micro(task.prepare(feed.batch(0)), CPU)]
    for parts in (whole, trimmed):
        engine = Engine(RunConfig(device="cpu"))
        engine.prepare(task, OptimConfig())
        # One more, as where another process has more.
        parts = evened(task, parts, len(parts) + 1)
        sums = [engine.micro(part.tensors, False, 1 / count) for part in parts]
        assert sums[-1]["loss"] == 0
        loss = sum(one["loss"].item() for one in sums) / count
        found.append((loss, [p.grad for p in engine.parameters]))
        engine.optimizer.zero_grad()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for left, right in zip(found[0][1], found[1][1], strict=True):
        assert left is not None and right is not None and left.abs().max() > 0
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
