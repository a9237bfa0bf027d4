"""The folder of best schedules of `rl search` and `rl eval`: what is written, replaced, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import made_times
import tokmill
from made_times import recipe
from tokmill.cli import main
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators
from tokmill.rl.commands import rl_problems

MODULE = generators.chain("relu 8")
SEARCH = ["--evaluations", "16", "--with", "random", "-q"]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Measurements, "_measure", made_times.made)
    monkeypatch.chdir(tmp_path)


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["rl", *words])
    return int(str(ended.value.code))


def names() -> list[str]:
    """The files of a result, without their hidden note."""
    return sorted(path.name for path in Path("best").iterdir() if path.name[0] != ".")


def test_a_result_names_its_files_and_replaces_an_earlier_one(capsys: Any) -> None:
    assert command("search", "matmul 8 8 8", "add 64 8", "relu 8", "-o", "best", *SEARCH) == 0
    assert names() == sorted(
        ["results.json", *(f"00{n}{end}" for n in range(3) for end in (".mlir", ".schedule.mlir"))]
    )
    found = json.loads(Path("best/results.json").read_text())["modules"]
    assert [(one["module"], one["file"], one["module_file"]) for one in found] == [
        ("matmul 8 8 8", "000.schedule.mlir", "000.mlir"),
        ("add 64 8", "001.schedule.mlir", "001.mlir"),
        ("relu 8", "002.schedule.mlir", "002.mlir"),
    ]
    assert all(one["status"] and "counts" in one for one in found)
    Path("best/notes.txt").write_text("of the user")
    capsys.readouterr()
    # A shorter one leaves nothing of the longer one.
    assert command("search", "relu 16", "-o", "best", "--json", *SEARCH) == 0
    (row,) = json.loads(capsys.readouterr().out)["modules"]
    assert (row["file"], row["module_file"]) == ("best/000.schedule.mlir", "best/000.mlir")
    assert names() == ["000.mlir", "000.schedule.mlir", "notes.txt", "results.json"]
    assert "16xf32" in Path("best/000.mlir").read_text()


@pytest.mark.parametrize("name", ["000.mlir", "000.schedule.mlir", "results.json"])
def test_files_of_the_user_are_never_replaced(name: str, capsys: Any) -> None:
    Path("best").mkdir()
    Path("best", name).write_text(MODULE)
    assert command("search", "relu 16", "-o", "best", *SEARCH) == 2
    said = capsys.readouterr().err
    assert f"best/{name}" in said and "no earlier result names it" in said and "hint:" in said
    assert names() == [name] and Path("best", name).read_text() == MODULE


def test_folders_that_a_run_names_are_inputs(tmp_path: Path, capsys: Any) -> None:
    assert command("search", "matmul 32 64 64", "-o", "hold", *SEARCH) == 0
    value = recipe(tmp_path / "cache", steps=1, eval_every=0)
    value["task"] |= {"held_out": [], "held_out_folder_path": "hold"}
    tokmill.train(value, tmp_path / "run", quiet=True)
    assert command("eval", "run", "-o", "hold", "-q") == 2
    assert "000.mlir would replace what is read" in capsys.readouterr().err
    assert command("eval", "run", "-o", "best", "-q", "--json", "--samples", "16") == 0
    (row,) = json.loads(capsys.readouterr().out)["modules"]
    assert row["file"] == "best/000.schedule.mlir" and row["schedule"]
    (kept,) = json.loads(Path("best/results.json").read_text())["modules"]
    assert kept["file"] == "000.schedule.mlir" and "schedule" not in kept


def test_a_result_without_a_schedule_writes_no_empty_file() -> None:
    Path("best").mkdir()
    (row,) = rl_problems.write_best(Path("best"), [rl_problems.Best({"module": "a"}, "", MODULE)])
    assert row == {"module": "a", "file": "", "module_file": "best/000.mlir"}
    assert names() == ["000.mlir", "results.json"]


def test_a_cache_is_no_file_of_the_result(capsys: Any) -> None:
    words = ("search", "relu 16", "-o", "best", "--cache", "best/000.mlir", *SEARCH)
    assert command(*words) == 2
    assert "name the same file" in capsys.readouterr().err
