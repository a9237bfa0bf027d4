"""Steps of a task that compares entries: one loss and gradient, however the step is cut."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokmill
import toy
from compare_task import PLACE
from processes import together, values
from task_runs import end_group
from tokmill import plugins
from tokmill.models.model import Inputs, Tensors
from tokmill.tasks.task import Task
from tokmill.training.engines.compared_step import compare_step, order_of
from tokmill.training.engines.engine import Engine
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import make_task
from toy import cycles, losses, make_store, weights

torch.set_num_threads(1)
ENGINES = ["deepspeed-2", "deepspeed-3"] if find_spec("deepspeed") else []
"""Beside ddp, of which tests/conformance/test_tasks.py has tasks that compare, and resumes."""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins.TASKS, "neighbours", PLACE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(4)
    cut = [document[: random.integers(2, 30)] for document in cycles(96, 60)]
    return make_store(tmp_path_factory.mktemp("stores") / "train", cut)


def recipe(store: Path, engine: str = "single", steps: int = 6, **run: Any) -> dict[str, Any]:
    kind, _, stage = engine.partition("-")
    made = toy.recipe(
        store, steps, task={"kind": "neighbours", "length": 32}, run={"engine": kind, **run}
    )
    if stage:
        made["engine"] = {"deepspeed": {"zero_optimization": {"stage": int(stage)}}}
    return made


@pytest.fixture(scope="module")
def single(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run that all others are compared with: a micro-batch a step."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plugins.TASKS, "neighbours", PLACE)
        tokmill.train(recipe(store), folder / "single", quiet=True)
        yield folder


def same_training(left: Path, right: Path) -> None:
    for name in ("loss", "grad_norm", "targets", "first"):
        assert losses(left, name) == pytest.approx(losses(right, name), rel=1e-6, abs=2e-6), name
    kept = weights(right)
    for name, tensor in weights(left).items():
        torch.testing.assert_close(tensor, kept[name], atol=1e-5, rtol=1e-5)


def test_it_learns(single: Path) -> None:
    found = losses(single / "single")
    assert found[6] < found[1]
    assert losses(single / "single", "targets")[6] == 6 * 8


@pytest.mark.parametrize("micro_tokens", [1, 64])
def test_any_micro_batches_are_the_same_step(
    micro_tokens: int, single: Path, store: Path, tmp_path: Path
) -> None:
    tokmill.train(recipe(store, micro_tokens=micro_tokens), tmp_path / "run", quiet=True)
    same_training(tmp_path / "run", single / "single")


def in_two(store: Path, folder: Path) -> None:
    """Train on all engines in one of two processes."""
    plugins.TASKS["neighbours"] = PLACE
    for engine in ENGINES:
        tokmill.train(recipe(store, engine, micro_tokens=48), folder / engine, quiet=True)
        end_group()


@pytest.fixture(scope="module")
def runs(store: Path, single: Path) -> Path:
    values(together(2, in_two, store, single))
    return single


@pytest.mark.parametrize("engine", ENGINES)
def test_any_processes_are_the_same_step(engine: str, runs: Path) -> None:
    same_training(runs / engine, runs / "single")


def prepared(dropout: float) -> tuple[Engine, Task]:
    value = {"task": {"kind": "neighbours"}, "run": {"device": "cpu"}}
    value["model"] = {"dim": 16, "layers": 2, "heads": 2, "dropout": dropout}
    config = from_dict(value)
    task = make_task(config, Inputs({"token": 9}))
    engine = Engine(config.run)
    engine.prepare(task, config.optim)
    return engine, task


def batch(rows: int, seed: int) -> Tensors:
    ids = torch.randint(9, (rows, 16), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(16).expand(rows, 16)
    entry = torch.arange(rows)
    return Tensors({"token": ids}, ids * 0, places, whole=True, entry=entry)


def gradients(task: Task) -> dict[str, torch.Tensor]:
    return {
        name: weight.grad for name, weight in task.named_parameters() if weight.grad is not None
    }


def test_the_second_pass_drops_what_the_first_did() -> None:
    """Its gradient is that of one pass with a loss of its own."""
    found = []
    for own in (False, True):
        engine, task = prepared(dropout=0.3)
        torch.manual_seed(5)
        if own:
            loss, _ = task.train()(batch(6, 1))
            (loss * 0.5).backward()
        else:
            sums = compare_step(engine, task, [batch(6, 1)], 0.5)
            loss = sums["loss"]
        found.append((loss.item(), gradients(task), torch.get_rng_state()))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    assert found[0][1].keys() == found[1][1].keys()
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, found[1][1][name], atol=1e-6, rtol=1e-5)
    assert torch.equal(found[0][2], found[1][2])


def test_rows_without_an_entry_teach_nothing() -> None:
    """They fill up a step where another process has more."""
    found = []
    for more in (0, 1):
        engine, task = prepared(dropout=0.0)
        parts = [batch(6, 1), *[task.idle(batch(6, 1))] * more]
        sums = compare_step(engine, task, parts, 1.0)
        found.append((float(sums["loss"]), gradients(task)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, found[1][1][name], atol=1e-6, rtol=1e-5)


def test_the_order_of_a_step_is_that_of_its_entries() -> None:
    """Whatever the order of micro-batches; rows of an entry stay as they are."""
    one, other = torch.tensor([2, 2, 0, 0, -1]), torch.tensor([1, 0, 0])
    order, entry = order_of([one, other])
    assert order.tolist() == [2, 3, 0, 1, 6, 7, 5]
    assert entry.tolist() == [0, 0, 1, 1, 2, 2, 3]


def test_acting_gives_results_without_a_gradient() -> None:
    engine, task = prepared(dropout=0.5)
    told = [engine.act(batch(4, 2))["vectors"] for _ in range(2)]
    assert torch.equal(*told) and not told[0].requires_grad and not task.training
    assert not torch.equal(*(engine.act(batch(4, 2), train=True)["vectors"] for _ in range(2)))
    assert [len(part) for part in engine.gather(told[0])] == [4]
