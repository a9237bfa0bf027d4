"""A session without a store: a task that acts in an environment trains, stops, goes on."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
from grid_task import CELLS, LOOP, TASK, Grid
from processes import together, values
from tokmill import plugins
from tokmill.base.errors import Interrupted, TokmillError, UsageError
from tokmill.training.budget.estimate import estimate
from tokmill.training.engines.tensors import read_tensors
from tokmill.training.recipe.resolve import resolve
from tokmill.training.runs.run import load_task
from toy import cycles, losses, make_store, stop_after, weights

torch.set_num_threads(1)
STEPS = 20
LAST = f"checkpoints/step-{STEPS:08d}"
FILES = ("model.safetensors", "optimizer.safetensors", "rng-00000.json", "task-00000.safetensors")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    learn()


def learn() -> None:
    """Put the toy into the tables of this process."""
    plugins.TASKS["grid"], plugins.LOOPS["grid"] = TASK, LOOP


@pytest.fixture(autouse=True, scope="module")
def forgotten() -> Any:
    yield
    del plugins.TASKS["grid"], plugins.LOOPS["grid"]


def recipe(**run: Any) -> dict[str, Any]:
    return {
        "task": {"kind": "grid"},
        "model": {"dim": 16, "layers": 1, "heads": 2},
        "optim": {"lr": 1e-2, "warmup": 2},
        "run": {
            "steps": STEPS, "device": "cpu", "eval_every": 5, "log_every": 1,
            "checkpoint_every": 0, "peak_flops": 1e12, **run,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    learn()
    return tokmill.train(recipe(), tmp_path_factory.mktemp("runs") / "whole", quiet=True).path


def test_it_learns_to_reach_the_last_cell(whole: Path) -> None:
    found = losses(whole, "val_loss")
    assert list(found) == [5, 10, 15, 20] and found[20] == CELLS - 1
    rewards = losses(whole, "reward")
    assert rewards[20] > rewards[1]
    assert losses(whole, "targets")[20] == 20 * 8 * 6
    assert (whole / "best/model.safetensors").exists()
    task = load_task(whole)
    assert isinstance(task, Grid) and task.reads.made == {"cell": CELLS}


def test_it_goes_on_to_the_bit(whole: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(7, patch)
        tokmill.train(recipe(), tmp_path / "run", quiet=True)
    extra = read_tensors(tmp_path / "run/checkpoints/step-00000007/task-00000.safetensors")
    assert extra["at"].shape == (8,) and extra["at"].any()
    tokmill.train(None, tmp_path / "run", quiet=True)
    for name in FILES:
        assert (tmp_path / "run" / LAST / name).read_bytes() == (whole / LAST / name).read_bytes()
    assert losses(tmp_path / "run") == losses(whole)


def test_what_a_task_keeps_is_bound_like_the_rest(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run" / LAST / "task-00000.safetensors"
    state = json.loads((file.parent / "state.json").read_text())
    assert file.name in state["files"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(TokmillError, match="is damaged"):
        tokmill.train(None, tmp_path / "run", quiet=True)
    file.unlink()
    with pytest.raises(TokmillError, match="it is missing"):
        tokmill.train(None, tmp_path / "run", quiet=True)


def test_an_update_that_is_not_finite_leaves_the_step_before(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first update of a step; after it there is no checkpoint of the middle."""
    forward, calls = Grid.forward, [0]

    def spoiled(self: Grid, batch: Any) -> Any:
        loss, sums = forward(self, batch)
        calls[0] += 1
        return (loss * math.nan, sums) if calls[0] == at else (loss, sums)

    for at, kept in ((7, ["step-00000003"]), (8, [])):
        calls[0] = 0
        out = tmp_path / str(at)
        with monkeypatch.context() as patch:
            patch.setattr(Grid, "forward", spoiled)
            with pytest.raises(TokmillError, match="step 4: the gradient's norm is nan"):
                tokmill.train(recipe(), out, quiet=True)
        found = out / "checkpoints"
        assert sorted(path.name for path in found.glob("*")) == kept
        tokmill.train(None, out, quiet=True)
        left, right = weights(out), weights(whole)
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_recipe_without_a_store(tmp_path: Path) -> None:
    config = resolve(None, tmp_path / "run", {"task": {"kind": "grid"}})
    assert config.data.stores == ("",) and config.task.walkers == 8
    for value in ({}, {"task": {"kind": "next_token"}}, {"model": {"dim": 16}}):
        with pytest.raises(UsageError, match="store"):
            resolve(value, tmp_path / "run", {})
    store = make_store(tmp_path / "store", cycles(4))
    with pytest.raises(UsageError, match="learns from no store") as caught:
        resolve(recipe(), tmp_path / "run", {"data": {"train": str(store)}})
    assert "data.train" in caught.value.hint


def test_a_dry_run_says_what_there_is(tmp_path: Path) -> None:
    config = resolve(recipe(), tmp_path / "run", {})
    plan = estimate(config)
    assert plan["batch"] == [8, 1] and plan["stores"] == [] and plan["columns"] == {"cell": CELLS}
    assert plan["memory_bytes"] > 0


def in_two(folder: Path) -> list[int]:
    """Train whole and in parts in one of two processes; return where the walkers are."""
    learn()
    value = recipe()
    tokmill.train(value, folder / "whole", quiet=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises((Interrupted, SystemExit)):
        stop_after(7, patch)
        tokmill.train(value, folder / "parts", quiet=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    tokmill.train(value, folder / "parts", quiet=True)
    return []


def test_two_processes_walk_on_their_own(tmp_path: Path) -> None:
    values(together(2, in_two, tmp_path))
    for name in (*FILES, "task-00001.safetensors", "rng-00001.json"):
        files = [tmp_path / run / LAST / name for run in ("whole", "parts")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    walks = [read_tensors(tmp_path / "whole" / LAST / f"task-0000{n}.safetensors") for n in (0, 1)]
    assert not torch.equal(walks[0]["at"], walks[1]["at"])
    # In another number of processes each begins anew.
    shutil.rmtree(tmp_path / "parts" / LAST)
    shutil.rmtree(tmp_path / "parts/model")
    tokmill.train(recipe(), tmp_path / "parts", quiet=True)
    assert losses(tmp_path / "parts", "val_loss")[20] == CELLS - 1
