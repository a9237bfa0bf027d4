"""A step that is not finite is named, costs no weights, and can be tried again."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokmill
from processes import together
from tokmill.base.errors import TokmillError
from tokmill.feed.feed import Feed
from tokmill.models.model import Inputs
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken
from tokmill.training.data import Loader, make_feed, open_stores
from tokmill.training.launch import place
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import make_task
from toy import SIZE, cycles, losses, make_store, recipe, weights

Forward = tuple[Tensor, dict[str, Tensor]]


def spoil(monkeypatch: pytest.MonkeyPatch, call: int, spoiled: Callable[..., Forward]) -> None:
    """Let one of the forward passes return something else."""
    forward, calls = NextToken.forward, [0]

    def other(self: NextToken, batch: Any) -> Forward:
        loss, sums = forward(self, batch)
        calls[0] += 1
        return spoiled(loss, sums) if calls[0] == call else (loss, sums)

    monkeypatch.setattr(NextToken, "forward", other)


def test_the_micro_batch_and_its_rows_are_named(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 8 rows of 16 positions in parts of 3: the sixth forward is the last part of step 2.
    plain = recipe(store, 9, run={"micro_tokens": 48}, data={"seed": 7})
    with monkeypatch.context() as patch:
        spoil(patch, 6, lambda loss, sums: (loss * math.nan, {"loss": sums["loss"] * math.nan}))
        with pytest.raises(TokmillError) as caught:
            tokmill.train(plain, tmp_path / "run", quiet=True)
    task = tokmill.train(recipe(store, 1), tmp_path / "other", quiet=True).task()
    _, rows, _ = Feed(task.rows(Store(store), 7), 8, seed=7).rows_of(1)
    named = re.fullmatch(
        r"step 2: the loss is not finite \(micro-batch 3 of 3, epoch 0, rows (.*)\)",
        caught.value.what,
    )
    assert named and named[1] == ", ".join(map(str, rows[6:]))
    assert caught.value.where == str(tmp_path / "run") and "optim.lr" in caught.value.hint
    # Metrics count the same: the step before is the last of which they tell.
    assert list(losses(tmp_path / "run")) == [1]


def test_a_gradient_that_is_not_finite_is_told_from_a_loss(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The value is right, and its derivative infinite.
    spoil(monkeypatch, 3, lambda loss, sums: (loss + (loss - loss.detach()).sqrt(), sums))
    with pytest.raises(TokmillError) as caught:
        tokmill.train(recipe(store, 9), tmp_path / "run", quiet=True)
    assert re.match(
        r"step 3: every loss is finite, but the gradient's norm is (nan|inf), through that of "
        r"model\.fields\S+ and \d+ more \(epoch 0, rows \d+, ",
        caught.value.what,
    )


def test_nothing_is_lost_and_the_step_can_be_tried_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dropout, so that the state of the random numbers matters.
    plain = recipe(store, 9, model={"dropout": 0.2}, run={"checkpoint_every": 3})
    with monkeypatch.context() as patch:
        spoil(patch, 6, lambda loss, sums: (loss * math.nan, sums))
        with pytest.raises(TokmillError, match="step 6: "):
            tokmill.train(plain, tmp_path / "parts", quiet=True)
    found = sorted(path.name for path in (tmp_path / "parts/checkpoints").iterdir())
    assert found == ["step-00000003", "step-00000005"]
    parts = tokmill.train(None, tmp_path / "parts", quiet=True)
    whole = tokmill.train(plain, tmp_path / "whole", quiet=True)
    assert losses(parts.path) == losses(whole.path)
    left, right = weights(parts.path), weights(whole.path)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_of_several_stores_the_right_one_is_named(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_store(tmp_path / "other", cycles(40, seed=8))
    both = recipe(store, 3, data={"train": [str(store), str(other)], "batch": 2})
    spoil(monkeypatch, 1, lambda loss, sums: (loss, {"loss": sums["loss"] * math.inf}))
    with pytest.raises(TokmillError, match=r"step 1: .*\(epoch 0, rows .* of /.*") as caught:
        tokmill.train(both, tmp_path / "run", quiet=True)
    assert str(store) in caught.value.what


def train_spoiled(value: dict[str, Any], out: Path) -> None:
    """Train as one of several processes; the last one has a bad second micro-batch in step 2."""
    with pytest.MonkeyPatch.context() as patch:
        if place().rank == place().world - 1:
            # The first forward pass is a rehearsal.
            spoil(patch, 5, lambda loss, sums: (loss * math.nan, {"loss": sums["loss"] * math.nan}))
        tokmill.train(value, out, quiet=True)


def test_the_process_is_named(store: Path, tmp_path: Path) -> None:
    plain = recipe(store, 3, run={"micro_tokens": 32, "best": False}, data={"seed": 3})
    ends = together(2, train_spoiled, plain, tmp_path / "run")
    told = [str(end.error) for end in ends if isinstance(end.error, TokmillError)]
    assert len(told) == 1, ends
    task = tokmill.train(recipe(store, 1), tmp_path / "other", quiet=True).task()
    _, rows, _ = Feed(task.rows(Store(store), 3), 8, seed=3).rows_of(1, 1, 2)
    named = f"(process 1, micro-batch 2 of 2, epoch 0, rows {rows[2]}, {rows[3]})"
    assert f"step 2: the loss is not finite {named}" in told[0]
    assert (tmp_path / "run/checkpoints/step-00000001/rng-00001.json").exists()


def test_rows_that_were_ordered_by_length_are_named(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = [document[: 2 + 29 * n % 30] for n, document in enumerate(cycles(120))]
    mixed = make_store(tmp_path / "mixed", cut)
    keys: dict[str, Any] = {"run": {"micro_tokens": 64}, "task": {"rows": "whole", "length": 32}}
    plain = recipe(mixed, 9, data={"seed": 8}, **keys)
    config = from_dict(plain)
    task = make_task(config, Inputs({"token": SIZE}))
    feed = make_feed(config, task, open_stores(config.data))
    with Loader(feed, task, range(1), micro_tokens=64, device=torch.device("cpu")) as loader:
        parts, _ = loader.next()
    spoil(monkeypatch, 2, lambda loss, sums: (loss * math.nan, {"loss": sums["loss"] * math.nan}))
    with pytest.raises(TokmillError) as caught:
        tokmill.train(plain, tmp_path / "run", quiet=True)
    rows = feed.rows_of(0)[1][sorted(parts[1].entries)]
    named = f"(micro-batch 2 of {len(parts)}, epoch 0, rows {', '.join(map(str, rows))})"
    assert f"step 1: the loss is not finite {named}" in caught.value.what
    # They are not those that come next in the batch.
    assert parts[1].entries[0] != len(parts[0].entries)
