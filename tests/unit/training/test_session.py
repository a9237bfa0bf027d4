"""A session without a store: what its task keeps, updates that fail, and recipes for it."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import made_times
import tokmill
from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir.measure import Measurements
from tokmill.rl.ppo_loop import ScheduleLoop
from tokmill.rl.schedule_task import Schedules
from tokmill.training.recipe.resolve import resolve
from toy import cycles, make_store, weights

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurements, "_measure", made_times.made)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured") / "cache"


@pytest.fixture(scope="module")
def whole(cache: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurements, "_measure", made_times.made)
        value = made_times.recipe(cache)
        yield tokmill.train(value, cache.parent / "whole", quiet=True).path


def test_what_a_task_keeps_is_bound_like_the_rest(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run/checkpoints/step-00000006/task-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(TokmillError, match="is damaged"):
        tokmill.train(None, tmp_path / "run", quiet=True)
    file.unlink()
    with pytest.raises(TokmillError, match="it is missing"):
        tokmill.train(None, tmp_path / "run", quiet=True)


@pytest.mark.parametrize(("update", "kept"), [(1, ["step-00000003"]), (2, [])])
def test_an_update_that_is_not_finite_leaves_the_step_before(
    update: int, kept: list[str], whole: Path, cache: Path, tmp_path: Path
) -> None:
    """In the first update of a step; after it there is no checkpoint of the middle."""
    forward, learn, seen = Schedules.forward, ScheduleLoop.learn, [0, 0]

    def counted(self: Any, session: Any, total: int) -> Any:
        seen[:] = session.state.step, 0
        return learn(self, session, total)

    def spoiled(self: Schedules, batch: Any) -> Any:
        loss, sums = forward(self, batch)
        seen[1] += 1
        return (loss * math.nan, sums) if seen == [3, update] else (loss, sums)

    value = made_times.recipe(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScheduleLoop, "learn", counted)
        patch.setattr(Schedules, "forward", spoiled)
        with pytest.raises(TokmillError, match="step 4: the loss or its gradient"):
            tokmill.train(value, tmp_path / "run", quiet=True)
    found = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in found.glob("*")) == kept
    tokmill.train(None, tmp_path / "run", quiet=True)
    left, right = weights(tmp_path / "run"), weights(whole)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_recipe_without_a_store(cache: Path, tmp_path: Path) -> None:
    config = resolve(None, tmp_path / "run", made_times.recipe(cache))
    assert config.data.stores == ("",)
    for value in ({}, {"task": {"kind": "next_token"}}, {"model": {"dim": 16}}):
        with pytest.raises(UsageError, match="store"):
            resolve(value, tmp_path / "run", {})
    store = make_store(tmp_path / "store", cycles(4))
    with pytest.raises(UsageError, match="learns from no store") as caught:
        resolve(made_times.recipe(cache), tmp_path / "run", {"data": {"train": str(store)}})
    assert "data.train" in caught.value.hint
