"""What every task promises: any engine and processes, exact resumes, evaluation, vectors."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import task_runs
from embedded import vectors_of
from entry_stores import lay
from processes import together, values
from task_cases import CASES, ROWS, STEPS, WITHOUT_STORES, make_stores, recipe, store_of
from task_runs import same
from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.cli import main
from tokmill.training.budget.memory import estimate
from tokmill.training.evaluate import evaluate
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import load_task
from toy import cycles, losses, make_store, weights

torch.set_num_threads(1)
NAMES = list(CASES)


def test_every_task_has_a_case() -> None:
    """A new line of the table has to be proved as these are."""
    assert CASES.keys() | WITHOUT_STORES == plugins.TASKS.keys()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stores(tmp_path_factory.mktemp("stores"))


def train_all(stores: Path, folder: Path, **run: Any) -> None:
    task_runs.train_all(NAMES, lambda name: recipe(stores, name, **run), folder)


def in_two(stores: Path, folder: Path) -> None:
    train_all(stores, folder / "two", engine="ddp", micro_tokens=50)


def with_engine(stores: Path, folder: Path, engine: str) -> None:
    train_all(stores, folder / engine, engine=engine, micro_tokens=50)


@pytest.fixture(scope="module")
def runs(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train_all(stores, folder / "one")
    values(together(2, in_two, stores, folder))
    return folder


@pytest.mark.parametrize("processes", ["one", "two"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_stopped_is_the_same_to_the_bit(
    name: str, processes: str, runs: Path
) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole, parts = (
            runs / processes / name / kind / f"checkpoints/step-{STEPS:08}" / file
            for kind in ("whole", "parts")
        )
        assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_any_processes_and_micro_batches_are_the_same_training(name: str, runs: Path) -> None:
    measured = losses(runs / "one" / name / "whole", "val_loss")
    assert set(measured) == {3, 6} and all(np.isfinite(value) for value in measured.values())
    more = {"masked": ["val_accuracy"], "sentence_pair": ["val_pair_accuracy", "val_loss_pair"]}
    more["classify"] = ["accuracy", "val_accuracy", "val_f1", "val_count_1"]
    more["contrastive"] = ["val_mrr", "val_recall_1", "val_pool"]
    more["signature"] = ["loss_cpi", "val_loss_consistency", "val_mrr", "val_cpi_error"]
    same(runs / "two" / name / "whole", runs / "one" / name / "whole", *more.get(name, ()))


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


@pytest.mark.parametrize("name", NAMES)
def test_eval_tells_what_the_training_told(name: str, runs: Path, stores: Path) -> None:
    run = runs / "one" / name / "whole"
    found = evaluate(run, stores / f"{store_of(name)}-val", device="cpu")
    compared = 0
    shares = ("accuracy", "pair_accuracy", "f1", "mrr", "recall_10")
    for metric in ("loss", "pseudo_perplexity", "perplexity", *shares):
        if logged := losses(run, f"val_{metric}"):
            assert found[metric] == pytest.approx(logged[STEPS], abs=1e-5)
            compared += 1
    assert compared >= 2
    if name != "next_token":
        assert found["rows"] == 13


@pytest.mark.parametrize("name", NAMES)
def test_a_run_opens_without_its_stores(name: str, runs: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run(name: str, stores: Path) -> None:
    value = recipe(stores, name, micro_tokens=64)
    found = estimate(from_dict(value))
    length, each = value["task"]["length"], ROWS.get(name, 1)
    assert found["batch"] == [8 * each, length]
    assert found["micro_batch"] == [64 // length // each * each, length]
    assert 4 * 4 * found["parameters"] < found["tensor_bytes"] < 1e7


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_does_not_depend_on_its_batch_mates(name: str, runs: Path, stores: Path) -> None:
    """Records are longer than a row, so they are read in segments too."""
    run, found = runs / "one" / name / "whole", []
    for tokens in (1, 10_000):
        keys = {"device": "cpu", "batch_tokens": tokens}
        found.append(vectors_of(run, stores / f"{store_of(name)}-val", **keys))
    assert found[0].shape == (13, 16) and np.ptp(found[0], axis=0).min() > 0
    assert np.allclose(found[0], found[1], atol=1e-5)


def command(*words: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return ended.value.code


@pytest.mark.parametrize("name", NAMES)
def test_commands_tell_what_they_can(
    name: str, runs: Path, stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs / "one" / name / "whole")
    if name != "next_token":
        assert command("sample", run, "--prompt", "x") == 1
        assert "only a run that predicts the next token" in capsys.readouterr().err
    assert command("eval", run, str(stores / f"{store_of(name)}-val"), "--device", "cpu") == 0
    assert "loss" in capsys.readouterr().out
    assert command("inspect", run) == 0
    assert ("tokmill sample" in capsys.readouterr().out) == (name == "next_token")
    assert command("compare", run) == 0
    assert "val_loss" in capsys.readouterr().out
    assert command("report", run, "-o", str(tmp_path / "page.html")) == 0
    capsys.readouterr()
    flags = [
        f"--set={table}.{key}={json.dumps(value)}"
        for table, keys in recipe(stores, name).items()
        for key, value in keys.items()
    ]
    assert command("train", "--dry-run", *flags, "-o", str(tmp_path / "run")) == 0
    assert f", {name}" in capsys.readouterr().out


@pytest.mark.parametrize("width", [-1, 0, 1 << 60])
def test_widths_of_a_run_are_not_trusted(width: int, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "one/signature/whole", tmp_path / "run")
    file = tmp_path / "run/schema.json"
    facts = json.loads(file.read_text())
    for key in ("vectors", "columns"):
        file.write_text(json.dumps({**facts, key: dict.fromkeys(facts["vectors"], width)}))
        with pytest.raises(TokmillError, match="cannot be read"):
            load_task(tmp_path / "run")


def test_stores_of_another_vocabulary_are_refused(runs: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", cycles(4))
    lay(other, "label", {"label": np.asarray([0, 1, 0, 1], np.uint32)})
    for name in NAMES:
        wrong = "no column 'block'" if name == "signature" else "vocabulary 'token' differs"
        with pytest.raises(TokmillError, match=wrong):
            evaluate(runs / "one" / name / "whole", other, device="cpu")
