"""What tasks that act in an environment promise: exact resumes, opening alone, commands."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import made_times
import tokmill
from task_cases import WITHOUT_STORES
from tokmill import plugins
from tokmill.base.errors import Interrupted, UsageError
from tokmill.cli import main
from tokmill.mlir.measure import Measurements
from tokmill.training.budget.memory import estimate
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import load_task
from toy import losses, stop_after, weights

torch.set_num_threads(1)
STEPS = 4
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    f"schedules-{kind}": lambda folder, kind=kind: made_times.recipe(
        folder / "cache", kind, steps=STEPS
    )
    for kind in plugins.EMBEDDINGS
}
"""Name → a recipe, whose caches lie in a folder. A new task needs a line here."""


def test_every_task_has_a_case() -> None:
    tasks = {from_dict(recipe(Path("folder"))).task.kind for recipe in CASES.values()}
    assert tasks == WITHOUT_STORES
    assert made_times.SMALL.keys() == plugins.EMBEDDINGS.keys()
    for name in tasks:
        loop = plugins.load(plugins.LOOPS, plugins.load(plugins.TASKS, name).loop)
        assert not loop.reads_stores and loop.unit
    assert plugins.LOOPS.keys() == {"rows"} | {
        plugins.load(plugins.TASKS, name).loop for name in tasks
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurements, "_measure", made_times.made)
        for name, recipe in CASES.items():
            (folder / name).mkdir()
            value = recipe(folder / name)
            tokmill.train(value, folder / name / "whole", quiet=True)
            with pytest.MonkeyPatch.context() as inner, pytest.raises(Interrupted):
                stop_after(2, inner)
                tokmill.train(value, folder / name / "parts", quiet=True)
            tokmill.train(None, folder / name / "parts", quiet=True)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_stopped_is_the_same_to_the_bit(name: str, runs: Path) -> None:
    for file in ("model.safetensors", "optimizer.safetensors", "task-00000.safetensors"):
        whole, parts = (
            runs / name / kind / f"checkpoints/step-{STEPS:08}" / file
            for kind in ("whole", "parts")
        )
        assert whole.read_bytes() == parts.read_bytes()
    assert losses(runs / name / "whole") == losses(runs / name / "parts")


@pytest.mark.parametrize("name", CASES)
def test_a_run_opens_alone(name: str, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / name / "whole", tmp_path / "run")
    kept = weights(runs / name / "whole")
    assert all(
        torch.equal(value, kept[key])
        for key, value in load_task(tmp_path / "run").state_dict().items()
    )


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_and_other_commands(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = estimate(from_dict(CASES[name](tmp_path)))
    assert found["stores"] == [] and 12 * found["parameters"] < found["tensor_bytes"] < 1e8
    run = str(runs / name / "whole")
    for words in (
        ["inspect", run],
        ["compare", run],
        ["report", run, "-o", f"{tmp_path}/page.html"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0, words
    for words in (["sample", run, "--prompt", "x"], ["eval", run, run]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code in (1, 2) and "hint:" in capsys.readouterr().err


@pytest.mark.parametrize("name", CASES)
def test_stores_and_epochs_are_refused(name: str, tmp_path: Path) -> None:
    value = CASES[name](tmp_path)
    for table, keys in (("data", {"train": str(tmp_path)}), ("run", {"epochs": 1.0})):
        with pytest.raises((UsageError, tokmill.base.errors.TokmillError)):
            tokmill.train(
                value | {table: value.get(table, {}) | keys}, tmp_path / "run", quiet=True
            )
