"""A task of each kind, trained: in parts, in two processes, resumed, evaluated, opened again."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import task_runs
import tokmill
import toy
from entry_stores import labelled, lay, tuples_of
from processes import together, values
from task_runs import same
from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.cli import main
from tokmill.training.budget.estimate import estimate
from tokmill.training.evaluate import evaluate
from tokmill.training.recipe.check_recipe import from_dict
from tokmill.training.runs.run import load_task
from toy import losses, weights
from toy_tasks import NAMES, TASKS, Label

torch.set_num_threads(1)
OVERLAYS = {
    "label": ["label"],
    "soft": ["label"],
    "pair": ["entries", "others", "labels"],
    "triplet": ["entries"],
    "group": ["groups", "labels"],
    "set": ["groups", "labels"],
}
STEPS = 6


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, part in TASKS.items():
        monkeypatch.setitem(plugins.TASKS, name, part)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stores")
    functions = labelled(root / "functions")
    label = np.eye(4, dtype=np.float32)[tokmill.Store(functions, ["label"]).column("label")]
    noise = np.random.default_rng(1).normal(size=label.shape) / 4
    lay(functions, "vectors", {"vector": (label + noise).astype(np.float32)})
    tuples_of(root / "tuples", functions)
    # 13 are no whole batches for two processes.
    tuples_of(root / "val", functions, 13, seed=5)
    labelled(root / "functions-val", 13, seed=5)
    return root


def recipe(stores: Path, name: str, **run: Any) -> dict[str, Any]:
    single = name in ("label", "soft")
    train, val = ("functions", "functions-val") if single else ("tuples", "val")
    kind = {"kind": "encoder", "context": 32} if name in ("pair", "set") else {}
    return toy.recipe(
        stores / train,
        STEPS,
        data={"val": str(stores / val), "overlays": OVERLAYS[name], "batch": 8},
        model=kind,
        optim={"lr": 3e-3 if kind else 1e-2},
        task={"kind": name, "length": 16},
        run={"eval_every": 3, "eval_rows": 0, **run},
    )


def train_all(stores: Path, folder: Path, **run: Any) -> None:
    """Train every task, whole and stopped in the middle."""
    plugins.TASKS.update(TASKS)
    task_runs.train_all(NAMES, lambda name: recipe(stores, name, **run), folder)


def in_two(stores: Path, folder: Path) -> None:
    train_all(stores, folder / "two", engine="ddp", micro_tokens=50)


def with_engine(stores: Path, folder: Path, engine: str) -> None:
    train_all(stores, folder / engine, engine=engine, micro_tokens=50)


@pytest.fixture(scope="module")
def runs(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    before = dict(plugins.TASKS)
    try:
        train_all(stores, folder / "one")
        values(together(2, in_two, stores, folder))
    finally:
        plugins.TASKS.clear()
        plugins.TASKS.update(before)
    return folder


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pair"])
def test_it_learns(name: str, runs: Path) -> None:
    found = losses(runs / "one" / name / "whole")
    assert (found[5] + found[STEPS]) / 2 < found[1], found


def test_pairs_are_learned(stores: Path, tmp_path: Path) -> None:
    """Neither span alone says whether both are alike, so it takes longer."""
    value = recipe(stores, "pair", steps=60, eval_every=0)
    tokmill.train(value, tmp_path / "run", quiet=True)
    found = [*losses(tmp_path / "run").values()]
    assert sum(found[-6:]) < 0.5 * sum(found[:6]), found


@pytest.mark.parametrize("processes", ["one", "two"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_stopped_is_the_same_to_the_bit(
    name: str, processes: str, runs: Path
) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole, parts = (
            runs / processes / name / kind / "checkpoints/step-00000006" / file
            for kind in ("whole", "parts")
        )
        assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_any_processes_and_micro_batches_are_the_same_training(name: str, runs: Path) -> None:
    more = {"triplet": ("val_mrr", "val_pool"), "soft": ()}
    same(
        runs / "two" / name / "whole",
        runs / "one" / name / "whole",
        *more.get(name, ("val_recall", "val_evaluated")),
    )


@pytest.mark.long
@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs the extra deepspeed")
@pytest.mark.parametrize("engine", ["deepspeed"])
def test_every_engine_is_the_same_training(
    engine: str, runs: Path, stores: Path, tmp_path: Path
) -> None:
    values(together(2, with_engine, stores, tmp_path, engine))
    for name in NAMES:
        for kind in ("whole", "parts"):
            same(tmp_path / engine / name / kind, runs / "one" / name / "whole")


def test_an_evaluation_sees_every_entry_once(runs: Path) -> None:
    for processes in ("one", "two"):
        pool = losses(runs / processes / "triplet/whole", "val_pool")
        assert set(pool.values()) == {26.0}
        seen = losses(runs / processes / "label/whole", "val_evaluated")
        assert set(seen.values()) == {13.0}


@pytest.mark.parametrize("name", NAMES)
def test_eval_tells_what_the_training_told(name: str, runs: Path, stores: Path) -> None:
    run = runs / "one" / name / "whole"
    value = recipe(stores, name)
    found = evaluate(run, value["data"]["val"], device="cpu")
    for metric in ("loss", "mrr", "recall"):
        if logged := losses(run, f"val_{metric}"):
            assert found[metric] == pytest.approx(logged[STEPS], abs=1e-6)
    assert found["rows"] == 13
    with pytest.raises(UsageError, match="predicts no tokens"):
        evaluate(run, value["data"]["val"], device="cpu", by="bytes")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_opens_without_its_stores(
    name: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs / "one" / name / "whole", tmp_path / "run")
    recipe_file = tmp_path / "run/recipe.json"
    value = json.loads(recipe_file.read_text())
    value["data"] |= {"train": "/nowhere", "val": ""}
    recipe_file.write_text(json.dumps(value))
    task = load_task(tmp_path / "run")
    kept = weights(runs / "one" / name / "whole")
    assert {n: t.shape for n, t in task.state_dict().items()} == {
        n: t.shape for n, t in kept.items()
    }
    # Roles are those of the vocabulary of the tokens' store, and its file is kept.
    if task.reads.ids:
        assert task.reads.role("token", "eot") == toy.EOT
        with pytest.raises(UsageError, match="no 'mask' token"):
            task.reads.role("token", "mask")
        assert (tmp_path / "run/vocab/token.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run(name: str, stores: Path) -> None:
    found = estimate(from_dict(recipe(stores, name, micro_tokens=64)))
    each = {"triplet": 3, "group": 4}.get(name, 1)
    assert found["batch"] == [8 * each, 16]
    assert found["micro_batch"][0] == max(each, 4 // each * each)
    assert 4 * 4 * found["parameters"] < found["tensor_bytes"] < 1e7


def command(*words: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return ended.value.code


@pytest.mark.parametrize("name", NAMES)
def test_commands_tell_what_they_can(
    name: str, runs: Path, stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs / "one" / name / "whole")
    assert command("sample", run, "--prompt", "x") == 1
    assert "only a run that predicts the next token" in capsys.readouterr().err
    assert command("eval", run, recipe(stores, name)["data"]["val"], "--device", "cpu") == 0
    shown = capsys.readouterr().out
    assert "loss" in shown and ("mrr" in shown) == (name == "triplet")
    assert command("inspect", run) == 0
    assert "tokmill sample" not in capsys.readouterr().out


def test_a_referred_store_that_changed_ends_a_resume(
    runs: Path, stores: Path, tmp_path: Path
) -> None:
    shutil.copytree(stores, tmp_path / "stores")
    shutil.copytree(runs / "one/triplet/parts", tmp_path / "run")
    shutil.rmtree(tmp_path / "stores/functions")
    labelled(tmp_path / "stores/functions", seed=9)
    value = recipe(tmp_path / "stores", "triplet")
    with pytest.raises(TokmillError, match="refers to"):
        tokmill.train(value, tmp_path / "run", resume=True, quiet=True)


def test_what_depends_on_numbers_has_no_dry_run(
    stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not said to take more memory than there is."""
    forward = Label.forward

    def choosing(self: Label, batch: Any) -> Any:
        assert batch.targets["label"].tolist()
        return forward(self, batch)

    monkeypatch.setattr(Label, "forward", choosing)
    with pytest.raises(TokmillError, match="depends on the values of a batch"):
        estimate(from_dict(recipe(stores, "label")))


@pytest.mark.parametrize("width", [-1, 0, 1 << 60])
def test_widths_of_a_run_are_not_trusted(width: int, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "one/set/whole", tmp_path / "run")
    file = tmp_path / "run/schema.json"
    facts = json.loads(file.read_text())
    assert facts["vectors"] == {"vector": 4}
    for key in ("vectors", "columns"):
        file.write_text(json.dumps({**facts, key: {"vector": width}}))
        with pytest.raises(TokmillError, match="cannot be read"):
            load_task(tmp_path / "run")
