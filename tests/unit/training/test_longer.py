"""More steps for a run that has begun or ended, and new runs from the weights of old ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
from tokmill.base.errors import Interrupted, TokmillError
from tokmill.training.runs.run import load_task, unfinished_at
from tokmill.training.runs.weights import step_of, weights_at
from tokmill.training.session import Session
from toy import losses, recipe, stop_after, weights

CONSTANT: dict[str, Any] = {"model": {"dropout": 0.1}, "optim": {"schedule": "constant"}}
WSD: dict[str, Any] = {"optim": {"schedule": "wsd", "decay": 0.5}}


def same(left: Path, right: Path) -> bool:
    ours, theirs = weights(left), weights(right)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_finished_constant_run_goes_on(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokmill.train(recipe(store, 12), tmp_path / "whole", options=CONSTANT, quiet=True)
    tokmill.train(recipe(store, 6), tmp_path / "run", options=CONSTANT, quiet=True)
    assert unfinished_at(tmp_path / "run") is None
    more = {"run": {"steps": 12}}
    with monkeypatch.context() as patch:
        stop_after(8, patch)
        with pytest.raises(Interrupted):
            tokmill.train(None, tmp_path / "run", options=more, quiet=True)
    # The weights of step 6 are the final ones no more.
    assert not (tmp_path / "run/model").exists()
    assert unfinished_at(tmp_path / "run") == (8, 12)
    assert step_of(weights_at(tmp_path / "run").parent) == 8
    parts = tokmill.train(None, tmp_path / "run", quiet=True)
    assert parts.step == 12 and same(whole.path, parts.path)
    assert losses(whole.path) == losses(parts.path)


def test_a_kill_between_two_ends_leaves_weights(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokmill.train(recipe(store, 3), tmp_path / "run", options=CONSTANT, quiet=True)

    def die(self: Session, total: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", die)
        with pytest.raises(MemoryError):
            options = {"run": {"steps": 5}}
            tokmill.train(None, tmp_path / "run", options=options, quiet=True)
    assert step_of(weights_at(tmp_path / "run").parent) == 3
    assert load_task(tmp_path / "run")


def test_wsd_goes_on_until_it_falls(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokmill.train(recipe(store, 20), tmp_path / "whole", options=WSD, quiet=True)
    for step, name in ((7, "before"), (8, "after")):
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            stop_after(step, patch)
            tokmill.train(recipe(store, 12), tmp_path / name, options=WSD, quiet=True)
    options = {"run": {"steps": 20}}
    parts = tokmill.train(None, tmp_path / "before", options=options, quiet=True)
    assert same(whole.path, parts.path)
    with pytest.raises(TokmillError, match=r"run\.steps: 12 → 20") as caught:
        tokmill.train(None, tmp_path / "after", options=options, quiet=True)
    assert "the 8 steps that are done" in caught.value.hint
    assert f"--from {tmp_path / 'after'}" in caught.value.hint


def test_a_constant_run_may_end_in_a_fall(store: Path, tmp_path: Path) -> None:
    plain = recipe(store, 6, optim={"schedule": "constant", "decay": 0.4})
    tokmill.train(plain, tmp_path / "run", quiet=True)
    fall = {"optim": {"schedule": "wsd"}, "run": {"steps": 10}}
    ended = tokmill.train(None, tmp_path / "run", options=fall, quiet=True)
    whole = tokmill.train(plain, tmp_path / "whole", options=fall, quiet=True)
    assert same(whole.path, ended.path)
    assert losses(ended.path, "lr")[10] < losses(ended.path, "lr")[7]


def test_cosine_bends_with_the_steps(store: Path, tmp_path: Path) -> None:
    tokmill.train(recipe(store, 8), tmp_path / "run", quiet=True)
    before = (tmp_path / "run/model/model.safetensors").read_bytes()
    with pytest.raises(TokmillError, match=r"run\.steps: 8 → 9"):
        tokmill.train(recipe(store, 9), tmp_path / "run", quiet=True)
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == before
    # What decides more than the learning rate is refused, whatever the schedule.
    changed = recipe(store, 8, optim={"clip": 0.5})
    with pytest.raises(TokmillError, match=r"optim\.clip: 1\.0 → 0\.5") as caught:
        tokmill.train(changed, tmp_path / "run", quiet=True)
    assert "decide the weights" in caught.value.hint


def test_a_run_begins_with_the_weights_of_another(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokmill.train(recipe(store, 30), tmp_path / "first", quiet=True)
    start = {"run": {"start": str(first.path), "steps": 8}}
    second = tokmill.train(recipe(store), tmp_path / "second", options=start, quiet=True)
    assert losses(second.path)[1] < 0.6 * losses(first.path)[1]
    assert json.loads((second.path / "recipe.json").read_text())["run"]["start"] == str(first.path)

    # A run that was killed before its first checkpoint begins there again, another goes on.
    def die(self: Session) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Session, "log_step", die)
        with pytest.raises(MemoryError):
            tokmill.train(recipe(store), tmp_path / "third", options=start, quiet=True)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(4, patch)
        tokmill.train(None, tmp_path / "third", quiet=True)
    third = tokmill.train(None, tmp_path / "third", quiet=True)
    assert same(second.path, third.path)
    with pytest.raises(TokmillError, match=r"run\.start: '.*' → ''"):
        options = {"run": {"start": ""}}
        tokmill.train(None, tmp_path / "third", options=options, quiet=True)


def test_weights_without_a_checkpoint_cannot_go_on(store: Path, tmp_path: Path) -> None:
    tokmill.train(recipe(store, 2), tmp_path / "run", options=CONSTANT, quiet=True)
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(TokmillError, match="holds weights and no checkpoint") as caught:
        tokmill.train(None, tmp_path / "run", quiet=True)
    assert "--from" in caught.value.hint
