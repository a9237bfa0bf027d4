"""examples/plugin, installed by pip: its source, task, figure and command work as tokmill's own."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SEQUENCES = {"first": "ACGTNACG", "second": "GGCC", "third": "ATATATAT"}
SHARES = {"first": 4 / 8, "second": 1.0, "third": 0.0}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Run:
    """Runs tokmill in a folder, where the plug-in is installed."""
    site = tmp_path_factory.mktemp("site")
    install = ("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation")
    subprocess.run(
        [sys.executable, *install, "--target", site, repository / "examples/plugin"], check=True
    )

    def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tokmill", *map(str, words)],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_its_parts_work(run: Run, tmp_path: Path) -> None:
    lines = [f">{name} text\r\n{s[:3].lower()}\r\n{s[3:]}\r\n" for name, s in SEQUENCES.items()]
    (tmp_path / "a.fasta").write_text("".join(lines) + ">bad\nACGX\n>none\n", newline="")
    built = run(tmp_path, "build", "fasta", "a.fasta", "-o", "s", "--max-rejects", "1", "-q")
    assert built.returncode == 0, built.stderr
    assert "s: 3 records, 20 tokens" in built.stdout
    place = f"byte {sum(map(len, lines))}:"
    assert place in run(tmp_path, "store", "rejects", "s").stdout

    listed = run(tmp_path, "gc", "s", "--json")
    assert {row["name"]: row["gc"] for row in json.loads(listed.stdout)} == SHARES
    assert run(tmp_path, "plot", "gc", "s", "-o", "gc.csv").returncode == 0
    with open(tmp_path / "gc.csv") as file:
        rows = list(csv.reader(file))
    assert sum(float(row[-1] or 0) for row in rows[1:]) == len(SEQUENCES)

    model = ("model.kind=encoder", "model.dim=16", "model.layers=1", "model.heads=2")
    sets = [word for key in ("task.kind=gc", "run.device=cpu", *model) for word in ("--set", key)]
    trained = run(tmp_path, "train", "s", "-o", "run", "--steps", "2", "-q", *sets)
    assert trained.returncode == 0, trained.stderr
    measured = json.loads(run(tmp_path, "eval", "run", "s", "--json").stdout)
    assert measured["targets"] == 3 and 0 < measured["loss"] < 0.5


def test_it_is_listed_apart_from_the_commands_of_tokmill(run: Run, tmp_path: Path) -> None:
    shown = run(tmp_path, "--help").stdout
    assert "gc " in shown.partition("plug-ins")[2]
    assert "fasta" in run(tmp_path, "build", "--help").stdout


def test_a_file_without_a_header_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text("ACGT\n")
    refused = run(tmp_path, "build", "fasta", "a.fasta", "-o", "s")
    assert refused.returncode == 1 and "a.fasta" in refused.stderr
