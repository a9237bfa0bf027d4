"""The folder of best schedules of `rl search` and `rl eval`: what is written, replaced, refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import made_times
import tokmill
from made_times import recipe
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators
from tokmill.rl.commands import rl_problems

Here = Callable[..., tuple[str, str]]
MODULE = generators.chain("relu 8")
SEARCH = ["--evaluations", "16", "--with", "random", "-q"]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurements, "_measure", made_times.made)


def names() -> list[str]:
    """The files of a result, without their hidden note."""
    return sorted(path.name for path in Path("best").iterdir() if path.name[0] != ".")


def test_a_result_names_its_files_and_replaces_an_earlier_one(here: Here) -> None:
    here("rl", "search", "matmul 8 8 8", "add 64 8", "relu 8", "-o", "best", *SEARCH)
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
    # A shorter one leaves nothing of the longer one.
    out, _ = here("rl", "search", "relu 16", "-o", "best", "--json", *SEARCH)
    (row,) = json.loads(out)["modules"]
    assert (row["file"], row["module_file"]) == ("best/000.schedule.mlir", "best/000.mlir")
    assert names() == ["000.mlir", "000.schedule.mlir", "notes.txt", "results.json"]
    assert "16xf32" in Path("best/000.mlir").read_text()
    schedule = Path("best/000.schedule.mlir")
    assert "first line" not in here("rl", "replay", "relu 16", schedule)[1]
    text = schedule.read_text()
    for same in (text.partition("\n")[0] + "\n", text.replace("\n", "\r\n"), text + "\n"):
        schedule.write_text(same)
        assert "first line" not in here("rl", "replay", "relu 16", schedule)[1]
    schedule.write_text(text.replace("tile_sizes [", "tile_sizes [1, "))
    assert "only its first line is used" in here("rl", "replay", "relu 16", schedule)[1]


@pytest.mark.parametrize("name", ["000.mlir", "000.schedule.mlir", "results.json"])
def test_files_of_the_user_are_never_replaced(name: str, here: Here) -> None:
    Path("best").mkdir()
    Path("best", name).write_text(MODULE)
    _, said = here("rl", "search", "relu 16", "-o", "best", *SEARCH, code=2)
    assert f"best/{name}" in said and "no earlier result names it" in said and "hint:" in said
    assert names() == [name] and Path("best", name).read_text() == MODULE


def test_folders_that_a_run_names_are_inputs(tmp_path: Path, here: Here) -> None:
    here("rl", "search", "matmul 32 64 64", "-o", "hold", *SEARCH)
    value = recipe(tmp_path / "cache", steps=1, eval_every=0)
    value["task"] |= {"held_out": [], "held_out_folder_path": "hold"}
    tokmill.train(value, tmp_path / "run", quiet=True)
    said = here("rl", "eval", "run", "-o", "hold", "-q", code=2)[1]
    assert "000.mlir would replace what is read" in said
    out, _ = here("rl", "eval", "run", "-o", "best", "-q", "--json", "--samples", 16)
    (row,) = json.loads(out)["modules"]
    assert row["file"] == "best/000.schedule.mlir" and row["schedule"]
    (kept,) = json.loads(Path("best/results.json").read_text())["modules"]
    assert kept["file"] == "000.schedule.mlir" and "schedule" not in kept


def test_a_result_without_a_schedule_writes_no_empty_file(here: Here) -> None:
    Path("best").mkdir()
    (row,) = rl_problems.write_best(Path("best"), [rl_problems.Best({"module": "a"}, "", MODULE)])
    assert row == {"module": "a", "file": "", "module_file": "best/000.mlir"}
    assert names() == ["000.mlir", "results.json"]


def test_a_cache_is_no_file_of_the_result(here: Here) -> None:
    words = ("-o", "best", "--cache", "best/000.mlir", *SEARCH)
    assert "name the same file" in here("rl", "search", "relu 16", *words, code=2)[1]
