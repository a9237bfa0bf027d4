"""The commands of docs/schedules.md, policies.md and tuning.md work one after the other."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_models import small_model
from tokmill.mlir.modules import generators


def blocks(repository: Path, name: str) -> list[str]:
    page = (repository / "docs" / f"{name}.md").read_text("utf-8")
    return re.findall(r"```sh\n(.*?)```", page, re.DOTALL)


def run(commands: list[str], folder: Path) -> str:
    """Run commands one after the other; return what the last one prints."""
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command, comments=True)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_of_the_page_work(repository: Path, tmp_path: Path) -> None:
    commands = (
        blocks(repository, "schedules")[0]
        .replace("--evaluations 32", "--evaluations 12")
        .splitlines()
    )
    assert len(commands) == 2
    assert "000.mlir" in run(commands, tmp_path)


def write_module(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(generators.chain("matmul 8 8 8, relu"))


def test_models_become_stores_on_which_is_trained(repository: Path, tmp_path: Path) -> None:
    (block,) = [
        block for block in blocks(repository, "schedules") if "build mlir model.onnx" in block
    ]
    small_model(tmp_path / "model.onnx")
    write_module(tmp_path / "modules/a.mlir")
    few = block.replace("--schedules 100", "--schedules 3")
    commands = few.replace("-o run ", "-o run --set run.steps=2 ").splitlines()
    assert len(commands) == 3
    run(commands, tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size


@pytest.mark.long
def test_a_policy_is_trained_evaluated_and_drawn(repository: Path, tmp_path: Path) -> None:
    (block,) = [block for block in blocks(repository, "policies") if "--samples 15" in block]
    train, *rest = block.replace("--samples 15", "--samples 1").splitlines()
    assert len(rest) == 4
    few = " --steps 2 --set task.bench_count=2"
    sets = " --set 'task.modules=[\"relu 8\"]' --set 'task.held_out=[\"matmul 8 8 8\"]'"
    commands = [train.partition("#")[0] + few + sets, *rest[:2], *rest[2].split(" && "), rest[3]]
    run(commands, tmp_path)
    assert all((tmp_path / f"{name}.png").stat().st_size for name in ("speedup", "entropy"))
    # A schedule, its module, what was found, and the note of these files.
    assert len(list((tmp_path / "best").iterdir())) == 4
    assert (tmp_path / "page.html").stat().st_size


@pytest.mark.long
def test_an_encoder_becomes_a_policy(repository: Path, tmp_path: Path) -> None:
    (block,) = [block for block in blocks(repository, "policies") if "--from encoder" in block]
    train, learn = block.splitlines()
    few = " --set task.bench_count=2 --set 'task.modules=[\"relu 8\"]' --set 'task.held_out=[]'"
    write_module(tmp_path / "modules/a.mlir")
    commands = [
        "tokmill build mlir modules --schedules 3 -o store",
        train.partition("#")[0] + " --steps 2",
        learn + " --steps 1" + few,
    ]
    run(commands, tmp_path)
    assert (tmp_path / "policy" / "metrics.jsonl").stat().st_size


@pytest.mark.long
def test_models_are_tuned(repository: Path, tmp_path: Path) -> None:
    (model,) = [block for block in blocks(repository, "tuning") if "rl tune" in block]
    small_model(tmp_path / "resnet18.onnx")
    assert '"tried"' in run([model.strip() + " --json"], tmp_path)
    assert (tmp_path / "resnet18.model.irpa").exists()
