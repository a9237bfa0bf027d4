"""The average of the weights in several real processes: that of one, and exact where it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
import toy
from processes import together, values
from tokmill.base.errors import Interrupted
from tokmill.training.engines.optimisers.average import AVERAGE
from tokmill.training.engines.tensors import read_tensors
from tokmill.training.launch import place
from toy import losses, stop_after, weights

ENGINES = ["ddp", "fsdp2"]
LAST = "checkpoints/step-00000010"
EXACT = ("model.safetensors", "optimizer.safetensors", AVERAGE, "rng-00000.json", "rng-00001.json")


def recipe(store: Path, val: Path, engine: str) -> dict[str, Any]:
    """With three micro-batches a step in each of two processes, and evaluations between steps."""
    run = {"micro_tokens": 32, "eval_every": 3, "eval_rows": 5, "engine": engine}
    data = {"batch": 12, "val": str(val)}
    return toy.recipe(store, 10, data=data, run=run, optim={"ema": 0.8})


def train(value: dict[str, Any], out: Path, stop_at: int = 0) -> int:
    """Train or go on in this process, one of several; the last one gets a signal after a step."""
    with pytest.MonkeyPatch.context() as patch:
        if place().rank == place().world - 1:
            stop_after(stop_at, patch)
        return tokmill.train(value, out, resume=True, quiet=True).step


@pytest.fixture(scope="module")
def single(store: Path, val: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("runs") / "single"
    return tokmill.train(recipe(store, val, "single"), out, quiet=True).path


def same_training(left: Path, right: Path) -> None:
    for name in ("loss", "val_loss", "val_loss_ema"):
        assert losses(left, name) == pytest.approx(losses(right, name), abs=1e-6), name
    mine, other = weights(left, "average"), weights(right, "average")
    assert mine.keys() == other.keys() == weights(left).keys()
    for name, tensor in other.items():
        assert mine[name].dtype == torch.float32
        torch.testing.assert_close(mine[name], tensor, atol=1e-5, rtol=1e-5)
    # What is final is what the last checkpoint holds.
    kept = read_tensors(left / LAST / AVERAGE)
    assert all(torch.equal(tensor, mine[name]) for name, tensor in kept.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_that_of_one_process_and_exact_on_resume(
    engine: str, single: Path, store: Path, val: Path, tmp_path: Path
) -> None:
    value = recipe(store, val, engine)
    assert values(together(2, train, value, tmp_path / "whole")) == [10, 10]
    same_training(tmp_path / "whole", single)
    for end in together(2, train, value, tmp_path / "parts", 6):
        assert isinstance(end.error, Interrupted | SystemExit)
    assert values(together(2, train, value, tmp_path / "parts")) == [10, 10]
    for name in EXACT:
        left, right = (tmp_path / run / LAST / name for run in ("whole", "parts"))
        assert left.read_bytes() == right.read_bytes(), name
    assert losses(tmp_path / "whole", "val_loss_ema") == losses(tmp_path / "parts", "val_loss_ema")


@pytest.mark.parametrize("engine", ENGINES)
def test_one_process_becomes_two(
    engine: str, single: Path, store: Path, val: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(6, patch)
        tokmill.train(recipe(store, val, "single"), tmp_path / "run", quiet=True)
    value = recipe(store, val, engine)
    before = read_tensors(tmp_path / "run/checkpoints/step-00000006" / AVERAGE)
    found = values(together(2, loaded, value, tmp_path / "run"))[0]
    # What two hold together is to the bit what one wrote.
    assert found.keys() == before.keys()
    assert all(torch.equal(torch.tensor(found[name]), before[name]) for name in found)
    assert values(together(2, train, value, tmp_path / "run")) == [10, 10]
    same_training(tmp_path / "run", single)


def loaded(value: dict[str, Any], out: Path) -> dict[str, Any]:
    """The whole average as it is when a run has gone on, and has done no step yet."""
    from tokmill.training.session import Session

    found: dict[str, Any] = {}

    def look(self: Session) -> None:
        with self.engine.averaged():
            found.update({name: one.tolist() for name, one in self.engine.weights().items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", look)
        tokmill.train(value, out, resume=True, quiet=True)
    return found if place().rank == 0 else {}
