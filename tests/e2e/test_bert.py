"""From programs that are compiled here to a run that classifies them: the commands of the page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bag_of_tokens
from entry_stores import lay
from making import quick_build
from tokmill import train
from tokmill.base.recipe import find, read_toml
from tokmill.feed.halves import Halves
from tokmill.inference.embed import COLUMN
from tokmill.store.overlay import overlay_names
from tokmill.store.store import Store
from tokmill.training.evaluate import evaluate
from tokmill.training.runs.run import read_run
from tokmill.training.runs.trackers import read_metrics
from tokmill.x86.graphs.lifting import lift_files
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
    assert "epochs of" in dry and "s a step" in dry and "sentence_pair" in dry
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


def test_edges_of_two_programs_are_learned_and_classified(programs: Path, tmp_path: Path) -> None:
    """Walks of two blocks through pairs of programs; then which level a walk is of."""
    sources = [str(programs / f"{name}-{level}") for name in ("c", "cpp") for level in ("O0", "O2")]
    lift_files(sources, tmp_path / "graphs")
    pairs = quick_build(
        "pairs", tmp_path / "graphs", tmp_path / "pairs", pair=("c-O0:c-O2", "cpp-O0:cpp-O2"),
        walks=1, walk_blocks=2,
    )  # fmt: skip
    value: dict[str, Any] = read_toml(str(find("pretrain")))
    value["data"] = {"train": str(pairs.path), "val": str(pairs.path), "batch": 8}
    value["task"] |= {"group": "origin", "cut": "block", "length": 64}
    value["model"] |= {"context": 64}
    value["run"] = {"steps": 4, "eval_every": 4, "eval_rows": 16, "device": "cpu"}
    train(value, tmp_path / "run", quiet=True)
    (last,) = [one for one in read_metrics(tmp_path / "run/metrics.jsonl") if "val_loss" in one]
    assert np.isfinite(last["val_loss"]) and 0 <= last["val_pair_accuracy"] <= 1
    # Both ends of an edge: the second half begins with a block, and the first one ends before it.
    rows = Halves(pairs, 61, group="origin", blocks=True)
    spans = rows.spans(np.arange(64), 0)
    for record, document, start in zip(spans.record, spans.document, spans.start, strict=True):
        border = pairs.record(int(record))["border"]
        assert document == 0 or (border[start] == 3 and (border[:start] == 3).sum() == 1)
    optimised = [not record["origin"].endswith("O0") for record in pairs]
    lay(pairs.path, "labels", {"label": np.asarray(optimised, np.uint32)})
    value = read_toml(str(find("classify")))
    value["data"] = {"train": str(pairs.path), "overlays": ["labels"], "batch": 8}
    value["task"]["length"] = 64
    value["run"] = {"steps": 4, "start": str(tmp_path / "run"), "device": "cpu"}
    train(value, tmp_path / "tuned", quiet=True)
    found = evaluate(tmp_path / "tuned", pairs.path, rows=32, device="cpu")
    assert found["rows"] == 32 and found["count_0"] + found["count_1"] == 32
    assert read_run(tmp_path / "tuned")[0].model.dim == 128


def test_a_bag_of_tokens_does_not_know_the_pairs(programs: Path, tmp_path: Path) -> None:
    """Counts of each half's tokens tell less than a tenth more than a coin."""
    tokmill(
        f"tokmill build x86 {programs} --unit walk --walks 4 --min-tokens 24 -o walks -q", tmp_path
    )
    rows = Halves(Store(tmp_path / "walks"), 125, group="program", apart="function")
    size = Store(tmp_path / "walks").vocabularies["mne"].size
    parts = [bag_of_tokens.bags(rows, "mne", size, epochs) for epochs in (range(4), range(4, 5))]
    linear = [(x[:, : 2 * size], y) for x, y in parts]
    assert len(parts[0][1]) > 2000 and abs(parts[1][1].mean() - 0.5) < 0.01
    assert bag_of_tokens.accuracy(*linear) < 0.6
