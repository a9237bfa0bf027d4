"""Which engine and device a recipe gets, and one step by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tokmill.base.errors import UsageError
from tokmill.feed.feed import Feed
from tokmill.models.model import Inputs, Tensors
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.tasks.task import to_tensors
from tokmill.training.engines.devices.device import moved, pick_device
from tokmill.training.engines.engine import Engine, make_engine
from tokmill.training.engines.several import Ddp
from tokmill.training.launch import Place
from tokmill.training.recipe.config import OptimConfig, RunConfig
from toy import cycles, make_store

CPU = torch.device("cpu")
SIZES = {"token": 23}


@pytest.fixture
def task() -> NextToken:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(dim=8, layers=1, heads=2), Inputs(SIZES))
    return NextToken(NextTokenConfig(length=8), model, Inputs(SIZES))


@pytest.fixture
def batch(tmp_path: Path, task: NextToken) -> Tensors:
    feed = Feed(task.rows(Store(make_store(tmp_path / "store", cycles(20)))), 4)
    return to_tensors(task.prepare(feed.batch(0)), CPU)


def started(task: NextToken, **options: object) -> Engine:
    engine = make_engine(RunConfig(device="cpu", **options))  # type: ignore[arg-type]
    engine.prepare(task, OptimConfig(weight_decay=0.0, eps=0.0, clip=0.0))
    return engine


def test_one_step_is_adam_on_the_summed_gradient(task: NextToken, batch: Tensors) -> None:
    before = {name: weight.detach().clone() for name, weight in task.named_parameters()}
    task(batch)[0].backward()
    gradients = {name: weight.grad.clone() / 7 for name, weight in task.named_parameters()}
    task.zero_grad()
    with started(task) as engine:
        for last in (False, True):
            sums = engine.micro(batch, last, 1 / 14)
        norm = engine.step(0.01)
    assert sums.keys() == {"loss"} and engine.total([2.5]) == [2.5]
    assert norm == pytest.approx(math.hypot(*(float(g.norm()) for g in gradients.values())))
    for name, weight in task.named_parameters():
        # Adam's first step is the learning rate by the gradient's sign.
        moved_by = before[name] - weight.detach()
        clear = gradients[name].abs() > 1e-6
        torch.testing.assert_close(moved_by[clear], 0.01 * gradients[name][clear].sign())
        assert weight.grad is None


def test_a_gradient_that_is_not_finite_changes_nothing(task: NextToken, batch: Tensors) -> None:
    before = {name: weight.detach().clone() for name, weight in task.named_parameters()}
    engine = started(task)
    engine.micro(batch, True, math.inf)
    assert not math.isfinite(engine.step(0.01))
    assert all(torch.equal(before[name], weight) for name, weight in task.named_parameters())
    # They can still be looked at.
    assert all(weight.grad is not None for weight in task.parameters())


def test_evaluation_leaves_no_gradient_and_no_dropout(task: NextToken, batch: Tensors) -> None:
    task.model.dropout.p = 0.5
    engine = started(task)
    first, second = (engine.evaluate(batch)["loss"] for _ in range(2))
    assert first == second and not first.requires_grad
    assert all(weight.grad is None for weight in task.parameters())


def test_recomputation_gives_the_same_gradients(task: NextToken, batch: Tensors) -> None:
    task.model.dropout.p = 0.3
    found = []
    for recompute in (False, True):
        engine = started(task, recompute=recompute)
        assert task.model.recompute is recompute
        task.zero_grad()
        torch.manual_seed(5)
        engine.micro(batch, True, 1.0)
        found.append([weight.grad.clone() for weight in task.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_which_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name, kind in (("auto", Engine), ("single", Engine), ("ddp", Ddp)):
        with make_engine(RunConfig(device="cpu", engine=name)) as engine:  # type: ignore[arg-type]
            assert type(engine) is kind and (engine.rank, engine.world) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="single is one process, and 2 were started"):
        make_engine(RunConfig(device="cpu", engine="single"))


def test_each_process_gets_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick_device("auto") == torch.device("cuda:0")
    assert pick_device("cuda:3") == torch.device("cuda:3")
    assert pick_device("cpu", Place(1, 8, 1, 8)) == CPU
    assert pick_device("auto", Place(6, 8, 2, 4)) == torch.device("cuda:2")
    with pytest.raises(UsageError, match="8 processes need a GPU each, and torch sees 4") as found:
        pick_device("cuda", Place(0, 8, 0, 8))
    assert "--processes 4" in found.value.hint
    with pytest.raises(UsageError, match="cuda:1 is a single one"):
        pick_device("cuda:1", Place(0, 2, 0, 2))


def test_a_batch_on_the_cpu_stays_where_it_is(batch: Tensors) -> None:
    assert moved(batch, CPU) is batch
    # Any other device gets every tensor, and what is not a tensor as it is.
    meta = moved(batch, torch.device("meta"))
    assert meta.columns["token"].device.type == meta.document.device.type == "meta"
    assert meta.whole is batch.whole
    assert np.array_equal(meta.targets["token"].shape, batch.targets["token"].shape)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_compiled_blocks_give_the_same_gradients(task: NextToken, batch: Tensors) -> None:
    found = []
    for compiled in (False, True):
        engine = started(task, compile=compiled)
        assert task.model.compiled is compiled
        task.zero_grad()
        engine.micro(batch, True, 1.0)
        found.append([weight.grad.clone() for weight in task.parameters()])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-5)


def test_deepspeed_refuses_to_compile() -> None:
    with pytest.raises(UsageError, match="DeepSpeed replaces the blocks"):
        make_engine(RunConfig(device="cpu", engine="deepspeed", compile=True))
