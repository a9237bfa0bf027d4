"""The loop as a whole: it learns, accumulates, stops, continues, and refuses."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
from making import change_sealed
from tokmill.base.errors import Interrupted, TokmillError
from tokmill.training.runs.trackers import read_metrics
from tokmill.training.session import Session
from toy import cycles, losses, make_store, recipe, stop_after, weights


def test_it_learns_and_keeps_what_a_run_is(store: Path, val: Path, tmp_path: Path) -> None:
    options = {"data": {"val": str(val)}, "run": {"eval_every": 20, "checkpoint_every": 20}}
    run = tokmill.train(recipe(store, 60), tmp_path / "run", options=options, quiet=True)
    loss = losses(run.path)
    assert loss[1] == pytest.approx(math.log(23), abs=0.2)
    assert loss[60] < 0.4 * loss[1]
    assert list(losses(run.path, "val_loss")) == [20, 40, 60]
    assert run.metrics["val_loss"] < 0.4 * loss[1]
    assert run.metrics["val_bits_per_byte"] == pytest.approx(
        run.metrics["val_loss"] / math.log(2) / 2
    )
    needed = {"step", "loss", "lr", "grad_norm", "targets", "tokens_per_second", "seconds"}
    needed |= {"seconds_left", "mfu"}
    assert needed <= read_metrics(run.path / "metrics.jsonl")[0].keys()
    found = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*.*"))
    assert found == [
        ".lock",
        "best/config.json",
        "best/model.safetensors",
        *(
            f"checkpoints/step-000000{step}/{name}"
            for step in (40, 60)
            for name in (
                "model.safetensors",
                "optimizer.safetensors",
                "rng-00000.json",
                "state.json",
            )
        ),
        "metrics.jsonl",
        "model/config.json",
        "model/model.safetensors",
        "recipe.json",
        "schema.json",
        "sessions.jsonl",
        "vocab/token.json",
    ]
    saved = json.loads((run.path / "recipe.json").read_text())
    assert saved["model"]["kind"] == "decoder" and saved["optim"]["betas"] == [0.9, 0.95]
    task = run.task()
    assert not task.training
    assert all(torch.equal(p, weights(run.path)[n]) for n, p in task.named_parameters())


@pytest.mark.parametrize("attempt", [1, 2])
def test_resume_is_exact_to_the_last_bit(
    attempt: int, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dropout, so that random states matter; small micro-batches, so that sums do.
    options = {
        "model": {"dropout": 0.2},
        "run": {"micro_tokens": 48, "seed": attempt, "eval_every": 3, "eval_rows": 16},
        "data": {"seed": attempt, "val": str(store)},
        "task": {"rows": "stream" if attempt == 2 else "windows"},
    }
    whole = tokmill.train(recipe(store), tmp_path / "whole", options=options, quiet=True)
    with monkeypatch.context() as patch:
        stop_after(8, patch)
        with pytest.raises(Interrupted, match="at step 8 of 20"):
            tokmill.train(recipe(store), tmp_path / "parts", options=options, quiet=True)
    torch.manual_seed(99)
    random.seed(99)
    parts = tokmill.train(None, tmp_path / "parts", quiet=True)
    last = "checkpoints/step-00000020"
    for name in ("model.safetensors", "optimizer.safetensors", "rng-00000.json"):
        left, right = (run.path / last / name for run in (whole, parts))
        assert left.read_bytes() == right.read_bytes(), name
    for name in ("loss", "grad_norm", "lr", "targets", "val_loss"):
        assert losses(whole.path, name) == losses(parts.path, name)


def test_a_killed_run_forgets_the_steps_after_its_checkpoint(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = recipe(store, 12, run={"checkpoint_every": 4})
    whole = tokmill.train(plain, tmp_path / "whole", quiet=True)

    def die(self: Session) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Session, "log_step", _after(10, Session.log_step, die))
        with pytest.raises(MemoryError):
            tokmill.train(plain, tmp_path / "parts", quiet=True)
    with open(tmp_path / "parts/metrics.jsonl", "a") as lines:
        lines.write('{"step": 10, "lo')
    (tmp_path / "parts/checkpoints/.tmp-step-00000009").mkdir()
    parts = tokmill.train(plain, tmp_path / "parts", quiet=True)
    assert losses(whole.path) == losses(parts.path)
    assert len(read_metrics(parts.path / "metrics.jsonl")) == 12
    names = sorted(path.name for path in (parts.path / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000012"]
    left, right = weights(whole.path), weights(parts.path)
    assert all(torch.equal(left[name], right[name]) for name in left)


def _after(step: int, plain: Any, other: Any) -> Any:
    def method(self: Session) -> None:
        (other if self.state.step == step else plain)(self)

    return method


def test_a_taken_folder_is_refused(store: Path, tmp_path: Path) -> None:
    """Also if it holds a run that another recipe made."""
    first = tokmill.train(recipe(store, 1), tmp_path / "run", quiet=True)
    with pytest.raises(TokmillError, match="batch") as caught:
        tokmill.train(recipe(store, 1, data={"batch": 3}), tmp_path / "run", quiet=True)
    assert "--from" in caught.value.hint
    assert tokmill.train(recipe(store, 1), tmp_path / "run", quiet=True).step == first.step
    (tmp_path / "other").mkdir()
    (tmp_path / "other/letter.txt").touch()
    with pytest.raises(TokmillError, match="other files and no run"):
        tokmill.train(recipe(store, 1), tmp_path / "other", quiet=True)


def test_a_refused_start_leaves_no_folder(tmp_path: Path) -> None:
    bare = make_store(tmp_path / "store", cycles(2), complete=False)
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(TokmillError, match="not complete"):
            tokmill.train(recipe(bare), tmp_path / name, quiet=True)
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / "there").iterdir())


def test_a_run_that_stopped_before_its_first_step_goes_on(store: Path, tmp_path: Path) -> None:
    value = recipe(store, 9, run={"max_time": "0s"})
    with pytest.raises(Interrupted):
        tokmill.train(value, tmp_path / "run", quiet=True)
    assert (tmp_path / "run/recipe.json").exists()
    options = {"optim": {"clip": 0.5}}
    with pytest.raises(TokmillError, match="optim.clip"):
        tokmill.train(value, tmp_path / "run", options=options, quiet=True)
    options = {"run": {"max_time": ""}}
    done = tokmill.train(value, tmp_path / "run", options=options, quiet=True)
    assert done.step == 9


def test_another_recipe_is_refused_but_for_what_decides_nothing(
    store: Path, tmp_path: Path
) -> None:
    tokmill.train(recipe(store, 2), tmp_path / "run", quiet=True)
    with pytest.raises(
        TokmillError, match=r"optim\.lr: 0\.01 → 0\.5; run\.steps: 2 → 3\n"
    ) as caught:
        changed = recipe(store, 3, optim={"lr": 0.5})
        tokmill.train(changed, tmp_path / "run", quiet=True)
    assert "learning rate" in caught.value.hint
    free = recipe(store, 2, run={"log_every": 7, "max_time": "1h", "keep": 9})
    tokmill.train(free, tmp_path / "run", quiet=True)
    assert json.loads((tmp_path / "run/recipe.json").read_text())["run"]["keep"] == 9


def test_other_stores_are_refused(store: Path, tmp_path: Path) -> None:
    tokmill.train(recipe(store, 1), tmp_path / "run", quiet=True)
    other = make_store(tmp_path / "other", cycles(9, seed=5))
    with pytest.raises(TokmillError, match="fingerprint"):
        tokmill.train(recipe(other, 1), tmp_path / "run", quiet=True)
    foreign = make_store(tmp_path / "foreign", cycles(9), vocabulary=b"another")
    for again in (
        {"recipe": recipe(foreign, 1), "out": tmp_path / "run"},
        {"recipe": recipe(store, 1, data={"val": str(foreign)}), "out": tmp_path / "new"},
    ):
        with pytest.raises(TokmillError, match="the vocabulary 'token' differs: the run has 23"):
            tokmill.train(**again, quiet=True)
    # What was refused left no run behind.
    assert not (tmp_path / "new/recipe.json").exists()
    partial = make_store(tmp_path / "partial", cycles(9), complete=False)
    with pytest.raises(TokmillError, match="not complete"):
        tokmill.train(recipe(partial, 1), tmp_path / "partly", quiet=True)
    tokmill.train(recipe(partial, 1, data={"partial": True}), tmp_path / "partly", quiet=True)


def test_keys_that_are_newer_than_a_run_have_their_defaults(store: Path, tmp_path: Path) -> None:
    tokmill.train(recipe(store, 2), tmp_path / "run", quiet=True)
    path = tmp_path / "run/recipe.json"
    written = json.loads(path.read_text())
    del written["task"]["pull"], written["optim"]["eps"]
    path.write_text(json.dumps(written))
    tokmill.train(recipe(store, 2), tmp_path / "run", quiet=True)
    options = {"task": {"pull": 0.1}}
    with pytest.raises(TokmillError, match=r"task\.pull: 0\.0 → 0\.1"):
        tokmill.train(recipe(store, 2), tmp_path / "run", options=options, quiet=True)


def test_damaged_ids_are_named(tmp_path: Path) -> None:
    documents = cycles(20)
    documents[7][3] = 200
    damaged = make_store(tmp_path / "damaged", documents, size=256)
    # The shard holds an id that the vocabulary of the manifest does not have.
    manifest = json.loads((damaged / "manifest.json").read_text())
    manifest["vocabularies"]["token"]["size"] = 23
    change_sealed(damaged / "manifest.json", vocabularies=manifest["vocabularies"])
    with pytest.raises(TokmillError, match="'token' holds the id 200, but its ids are 0 to") as it:
        tokmill.train(recipe(damaged, 20), tmp_path / "run", quiet=True)
    assert it.value.exit_code == 1 and it.value.where == str(damaged)
    assert "tokmill store validate" in it.value.hint
    assert "STORE" not in it.value.hint and str(damaged) in it.value.hint


def test_bare_ids_are_learned_too(tmp_path: Path) -> None:
    bare = make_store(tmp_path / "bare", cycles(20))
    changes = {"vocabularies": {}, "schema": {"token": {"dtype": "u1"}}, "source": "bin"}
    change_sealed(bare / "manifest.json", **changes)
    run = tokmill.train(recipe(bare, 1), tmp_path / "run", quiet=True)
    assert run.task().sizes == {"token": 23}
    with pytest.raises(TokmillError, match="has no tokenizer") as caught:
        tokmill.sample(run.path, "x")
    assert caught.value.exit_code == 1 and "--ids 1,2,3" in caught.value.hint
    wider = make_store(tmp_path / "wider", cycles(9, size=40), size=40)
    with pytest.raises(TokmillError, match="the run knows 0 to 22"):
        val = {"data": {"val": str(wider)}}
        tokmill.train(recipe(bare, 1), tmp_path / "new", options=val, quiet=True)
