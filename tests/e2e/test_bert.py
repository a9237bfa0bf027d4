"""From programs that are compiled here to a run that classifies them: the commands of the page."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tokmill.inference.embed import COLUMN
from tokmill.store.overlay import overlay_names
from tokmill.store.store import Store
from tokmill.training.runs.run import read_run
from tokmill.training.runs.trackers import read_metrics
from x86_programs import C_SOURCE, CPP_SOURCE, compiles

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert") / "programs"
    folder.mkdir()
    for level in LEVELS:
        compiles(folder, f"c-{level}", C_SOURCE, f"-{level}")
        compiles(folder, f"cpp-{level}", CPP_SOURCE, f"-{level}", by="g++")
    return folder


def commands(page: Path) -> list[str]:
    """The commands of the first block, comments left out."""
    block = re.search(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert block
    lines = block[1].replace("\\\n", " ").splitlines()
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


def tokmill(command: str, folder: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "tokmill"
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stderr}"
    return done.stdout + done.stderr


def write_labels(store: Path) -> None:
    """Number the programs by whether they were optimised."""
    names = [record["program"] for record in Store(store)]
    label = np.asarray([not name.endswith("O0") for name in names], np.uint32)
    np.savez(store.parent / f"{store.name}.npz", label=label)


@pytest.mark.long
def test_the_commands_of_the_page(programs: Path, repository: Path) -> None:
    folder, told = programs.parent, {}
    for command in commands(repository / "docs/bert.md"):
        if "build overlay" in command:
            write_labels(folder / shlex.split(command)[3])
        told[command] = tokmill(command, folder)
    dry, evaluated = (
        next(out for command, out in told.items() if word in command)
        for word in ("--dry-run", "eval run")
    )
    assert "epochs of" in dry and "s per step" in dry and "sentence_pair" in dry
    assert "pair_accuracy" in evaluated and "accuracy_asm" in evaluated
    assert "hidden token" in evaluated
    began = next(out for command, out in told.items() if "--from run" in command)
    assert "begin anew: output.linear.bias, output.linear.weight" in began
    tuned = next(out for command, out in told.items() if "eval tuned" in command)
    assert "f1_macro" in tuned and "count_1" in tuned
    config, facts = read_run(folder / "tuned")
    assert facts.classes == {"label": ("0", "1")} and config.model.dim == 128
    losses = [
        entry["loss"] for entry in read_metrics(folder / "run/metrics.jsonl") if "loss" in entry
    ]
    assert losses[-1] < losses[0]
    (name,) = [name for name in overlay_names(folder / "val") if name.startswith("mean-")]
    assert Store(folder / "val", [name]).schema[COLUMN].width == 128
