"""Which weights a run has: the best, the last, those of a step; and a kill while they change."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokmill
from tokmill.base.errors import Interrupted, MachineError, TokmillError
from tokmill.inference.embed import embed_store
from tokmill.report.comparison.compare_runs import compare
from tokmill.report.comparison.run_summaries import read_run
from tokmill.training.engines.tensors import read_tensors, write_tensors
from tokmill.training.evaluate import evaluate
from tokmill.training.runs import run as runs
from tokmill.training.runs import weights as module
from tokmill.training.runs.run import load_task
from tokmill.training.runs.weights import step_of, weights_at
from toy import EOT, cycles, losses, make_store, recipe, stop_after, weights

# With the documents of `val` the best weights are not the last ones.
WORSENING: dict[str, Any] = {
    "optim": {"lr": 2e-2, "warmup": 4, "schedule": "constant"},
    "run": {"eval_every": 4, "checkpoint_every": 7, "keep": 3},
}


@pytest.fixture(scope="module")
def val(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of which half are shuffled: the surer a model is of what comes next, the worse.

    The loss on it falls to step 12 and then rises, by .1 and more from one evaluation to the next:
    no rounding of another processor changes which one is the lowest.
    """
    order = np.random.default_rng(5)
    documents = cycles(30, seed=1)
    documents[::2] = [np.append(order.permutation(one[:-1]), EOT) for one in documents[::2]]
    return make_store(tmp_path_factory.mktemp("stores") / "shuffled", documents)


@pytest.fixture(scope="module")
def run(store: Path, val: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {**WORSENING, "data": {"val": str(val)}}
    out = tmp_path_factory.mktemp("runs") / "run"
    return tokmill.train(recipe(store, 24), out, options=options, quiet=True).path


def test_best_is_the_step_with_the_lowest_validation_loss(run: Path, val: Path) -> None:
    found = losses(run, "val_loss")
    best = min(found, key=found.__getitem__)
    assert best not in (4, 24), "the test needs a run that worsens"
    said = json.loads((run / "best/config.json").read_text())
    assert (said["step"], said["loss"]) == (best, found[best])
    assert said["model"]["dim"] == 16 and said["columns"] == {"token": 23}
    state = json.loads((run / "checkpoints/step-00000024/state.json").read_text())
    assert (state["best_step"], state["best_loss"]) == (best, found[best])
    assert step_of(run / "best") == best and step_of(run / "model") == 24


@pytest.mark.parametrize("change", ["val", "eval_rows"])
def test_the_best_of_other_validation_rows_is_forgotten(
    change: str, store: Path, val: Path, tmp_path: Path
) -> None:
    easy = {**WORSENING, "data": {"val": str(store)}}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(12, patch)
        tokmill.train(recipe(store, 24), tmp_path / "run", options=easy, quiet=True)
    hard = {"val": {"data": {"val": str(val)}}, "eval_rows": {"run": {"eval_rows": 1}}}[change]
    options = {name: {**easy[name], **hard.get(name, {})} for name in easy}
    out = tokmill.train(recipe(store, 24), tmp_path / "run", options=options, quiet=True)
    found = {step: loss for step, loss in losses(out.path, "val_loss").items() if step > 12}
    best = min(found, key=found.__getitem__)
    assert step_of(out.path / "best") == best > 12
    state = json.loads((out.path / "checkpoints/step-00000024/state.json").read_text())
    assert (state["best_step"], state["best_loss"]) == (best, found[best])
    summary = read_run(out.path)
    assert summary.best == {"val_loss": found[best], "step": best, "weights_kept": True}
    assert dict(summary.points("val_loss")) == found
    assert compare([out.path], at="best").groups[0].mean == found[best]
    # What was the same before goes on.
    again = tokmill.train(None, out.path, options={"run": {"steps": 28}}, quiet=True)
    assert read_run(again.path).points("val_loss")[0][0] == 16


def go_on(run: Path, store: Path, val: Path, until: int, steps: int = 28) -> None:
    """Train until a step, with this validation store."""
    options = {**WORSENING, "data": {"val": str(val)}}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(until, patch)
        tokmill.train(recipe(store, steps), run, options=options, quiet=True)


@pytest.mark.parametrize("between", [18, 21])
def test_the_best_on_the_first_rows_comes_back(
    between: int, store: Path, val: Path, tmp_path: Path
) -> None:
    """Other rows were a slip of the pen; or weights that are the best on them were written."""
    run = tmp_path / "run"
    go_on(run, store, val, 17)
    before = losses(run, "val_loss")
    best = min(before, key=before.__getitem__)
    assert best == step_of(run / "best") == 12
    go_on(run, store, store, between)
    evaluated = between > 20
    assert [step for step, _ in read_run(run).points("val_loss")] == (
        [20] if evaluated else [4, 8, 12, 16]
    )
    go_on(run, store, val, 26)
    summary = read_run(run)
    steps = [4, 8, 12, 16, 24] if evaluated else [4, 8, 12, 16, 20, 24]
    assert [step for step, _ in summary.points("val_loss")] == steps
    assert summary.best == {"val_loss": before[12], "step": 12, "weights_kept": not evaluated}
    assert step_of(run / "best") == (24 if evaluated else 12)


def test_rows_of_sessions_that_do_not_say_theirs_are_others(
    store: Path, val: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    go_on(run, store, store, 17)
    file = run / "sessions.jsonl"
    file.write_text(json.dumps({"step": 0, "processes": 1}) + "\n")
    assert [step for step, _ in read_run(run).points("val_loss")] == [4, 8, 12, 16]
    go_on(run, store, val, 26)
    assert [step for step, _ in read_run(run).points("val_loss")] == [20, 24]
    assert step_of(run / "best") >= 20


def test_the_weights_are_those_of_the_step(run: Path, store: Path, tmp_path: Path) -> None:
    best = step_of(run / "best")
    # The same run, stopped there.
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(best, patch)
        tokmill.train(recipe(store, 24), tmp_path / "run", options=WORSENING, quiet=True)
    assert all(
        torch.equal(tensor, load_task(tmp_path / "run", "last").state_dict()[name])
        for name, tensor in load_task(run, "best").state_dict().items()
    )


def test_weights_by_name(run: Path) -> None:
    file = "model.safetensors"
    assert weights_at(run) == weights_at(run, "last") == run / "model" / file
    best = weights_at(run, str(step_of(run / "best")))
    assert weights_at(run, "best") == best == run / "best" / file
    assert weights_at(run, "21") == run / "checkpoints/step-00000021" / file
    for at, named in (("7", "of step 7"), ("first", "called first"), ("9999", "of step 9999")):
        with pytest.raises(TokmillError) as caught:
            weights_at(run, at)
        assert caught.value.what == f"the run has no weights {named}"
        steps = sorted([14, 21, 24, step_of(run / "best")])
        assert caught.value.hint == f"there are: {', '.join(map(str, steps))}, best, last"


def test_weights_that_a_training_replaces_while_they_are_read(
    run: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that is reported is that of the weights; what is gone is replaced by the newest."""
    mine = shutil.copytree(run, tmp_path / "run")
    load, steps = runs.load_from, [24, 21, 14]

    def removed(task: Any, file: Path) -> None:
        shutil.rmtree(file.parent)
        if file.parent.name == "model":
            shutil.rmtree(mine / "checkpoints/step-00000024")
        if len(steps) == 3 and file.parent.name.endswith("14"):
            shutil.copytree(run / "checkpoints/step-00000014", file.parent)
        load(task, file)

    monkeypatch.setattr(runs, "load_from", removed)
    task = load_task(mine)
    assert task.step == 14
    wanted = read_tensors(run / "checkpoints/step-00000014/model.safetensors")
    assert all(torch.equal(value, wanted[name]) for name, value in task.state_dict().items())
    with pytest.raises(TokmillError, match="no weights of step 21"):
        load_task(mine, "21")


def test_the_step_of_an_evaluation_is_that_of_its_weights(
    run: Path, val: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that goes on replaces the best weights while they are measured."""
    mine = shutil.copytree(run, tmp_path / "run")

    def then_replaced(*arguments: Any) -> Any:
        task = load_task(*arguments)
        shutil.copy(mine / "model/model.safetensors", mine / "best/model.safetensors")
        return task

    before = step_of(mine / "best")
    monkeypatch.setattr("tokmill.training.evaluate.load_task", then_replaced)
    assert evaluate(mine, val, at="best", device="cpu")["step"] == before
    assert step_of(mine / "best") == 24 != before
    monkeypatch.setattr("tokmill.inference.embed.load_task", then_replaced)
    shutil.copy(run / "best/model.safetensors", mine / "best/model.safetensors")
    with pytest.raises(MachineError, match="has replaced the weights"):
        embed_store(mine, val, at="best", device="cpu")


@pytest.mark.parametrize("metadata", [{}, {"step": "x"}, {"step": "-1"}, {"step": "9" * 5000}])
def test_weights_that_do_not_say_their_step(
    metadata: dict[str, str], run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    write_tensors(tmp_path / "run/model/model.safetensors", weights(run), metadata)
    for call in (weights_at, load_task):
        with pytest.raises(TokmillError, match="do not say of which step") as caught:
            call(tmp_path / "run")
        assert "model.safetensors" in caught.value.where and caught.value.hint


def test_a_run_without_a_validation_store_has_no_best(store: Path, tmp_path: Path) -> None:
    plain = tokmill.train(recipe(store, 2), tmp_path / "run", quiet=True).path
    assert not (plain / "best").exists()
    with pytest.raises(TokmillError, match="no weights called best"):
        weights_at(plain, "best")
    (tmp_path / "empty").mkdir()
    for at in ("", "best", "3"):
        with pytest.raises(TokmillError, match="no weights yet"):
            weights_at(tmp_path / "empty", at)


def test_best_can_be_turned_off(store: Path, val: Path, tmp_path: Path) -> None:
    plain = recipe(store, 2, data={"val": str(val)}, run={"best": False})
    assert not (tokmill.train(plain, tmp_path / "run", quiet=True).path / "best").exists()


@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_kill_while_best_is_written_leaves_whole_weights(
    call: int, run: Path, store: Path, val: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**WORSENING, "data": {"val": str(val)}}
    calls = [0]

    def dying(real: Any) -> Any:
        def write(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > call:
                raise MemoryError
            return real(*arguments, **options)

        return write

    # Weights, config.json of step 4; then those of step 8.
    with monkeypatch.context() as patch:
        for name in ("write_tensors", "write_file"):
            patch.setattr(module, name, dying(getattr(module, name)))
        with pytest.raises(MemoryError):
            tokmill.train(recipe(store, 24), tmp_path / "run", options=options, quiet=True)
    if call == 0:
        assert not (tmp_path / "run/best/model.safetensors").exists()
    else:
        assert step_of(weights_at(tmp_path / "run", "best").parent) == {1: 4, 3: 8}[call]
        load_task(tmp_path / "run", "best")
    again = tokmill.train(recipe(store, 24), tmp_path / "run", options=options, quiet=True)
    for name, tensor in weights(run, "best").items():
        assert torch.equal(tensor, weights(again.path, "best")[name])
    assert (run / "best/config.json").read_bytes() == (again.path / "best/config.json").read_bytes()
