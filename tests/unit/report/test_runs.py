"""What lies in a folder: runs and how far they are, stores and tokenizers beside them."""

import json
import os
import shutil
from pathlib import Path

import pytest
from test_report_inspect import TOKENIZER

from report_stores import write_store
from small_runs import STEPS, cut, edit_recipe, make_runs
from tokmill.report.comparison.run_summaries import find_runs, read_run, read_runs
from tokmill.report.describe.inspect import describe


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


def test_a_run_says_what_it_is(root: Path) -> None:
    from tokmill.training.engines.tensors import read_tensors

    path = root / "runs/lr-0.01/seed-1"
    found = describe(path)
    weights = read_tensors(path / "model/model.safetensors")
    losses = [(entry["val_loss"], entry["step"]) for entry in read_run(path).entries
              if "val_loss" in entry]  # fmt: skip
    assert found["what"] == "a finished training"
    assert (found["step"], found["steps"]) == (STEPS, STEPS)
    assert found["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert (found["best"]["val_loss"], found["best"]["step"]) == min(losses)
    assert found["best"]["weights_kept"] == (path / "best/model.safetensors").exists()
    assert (found["model"], found["task"]) == ("decoder", "next_token")
    assert (found["engine"], found["precision"], found["processes"]) == ("auto", "fp32", 1)
    assert found["machine"].startswith("cpu, torch")
    assert found["validation_store"] == str(root / "lm/val")
    assert found["recipe"] == json.loads((path / "recipe.json").read_text())


def test_a_table_of_runs_has_the_newest_last(root: Path, tmp_path: Path) -> None:
    whole = shutil.copytree(root / "runs/lr-0.01/seed-0", tmp_path / "whole")
    part = cut(whole, tmp_path / "deep/er/part", 9)
    begun = cut(whole, tmp_path / "begun", 0)
    damaged = cut(whole, tmp_path / "damaged", 0)
    (damaged / "recipe.json").write_text("{")
    (begun / "metrics.jsonl").unlink()
    for second, file in enumerate((part / "metrics.jsonl", begun / "recipe.json")):
        os.utime(file, (2_000_000_000 + second,) * 2)
    found = describe(tmp_path)
    assert (found["kind"], found["what"]) == ("runs", "a folder of 4 runs")
    rows = found["runs"]
    assert [row["name"] for row in rows] == ["damaged", "whole", "deep/er/part", "begun"]
    states = ["damaged", "finished", f"step 9 of {STEPS}", "not begun"]
    assert [row["state"] for row in rows] == states
    assert "recipe.json" not in rows[0]["problem"] and rows[0]["problem"]
    metrics = {k: v for entry in read_run(whole).entries for k, v in entry.items()}
    assert rows[1]["val_loss"] == metrics["val_loss"]
    assert rows[1]["bits_per_byte"] == metrics["val_bits_per_byte"]
    assert rows[1]["parameters"] and rows[2]["parameters"] is None
    json.dumps(found)


def test_a_run_that_was_given_more_steps_is_not_finished(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "runs/lr-0.01/seed-0", tmp_path / "longer")
    edit_recipe(run, lambda recipe: recipe["run"].update(steps=2 * STEPS))
    assert read_run(run).state == f"step {STEPS} of {2 * STEPS}"


def test_what_lies_among_checkpoints_is_none(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "runs/lr-0.01/seed-0", tmp_path / "run")
    kept = read_run(run).checkpoints
    for name in ("step-old", "step-00000009", "step-99999999", "step-100000000"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints/step-old/state.json").touch()
    assert read_run(run).checkpoints == kept and read_run(run).step == STEPS
    for name in ("step-99999999", "step-100000000"):
        (run / "checkpoints" / name / "state.json").touch()
    assert read_run(run).checkpoints == [*kept, "step-99999999", "step-100000000"]


def test_where_runs_are_looked_for(root: Path, tmp_path: Path) -> None:
    assert len(find_runs(root)) == 6
    assert find_runs(root / "lm") == []
    run = root / "runs/lr-0.01/seed-0"
    assert find_runs(run) == [run]
    (tmp_path / "latest").symlink_to(run)
    (tmp_path / ".hidden").symlink_to(run)
    assert find_runs(tmp_path) == [tmp_path / "latest"]
    assert len(read_runs([run, tmp_path, run / "."])) == 1


def test_a_folder_says_what_lies_beside_a_tokenizer(root: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "train", [[[2, 0]], [[3, 0]]])
    write_store(tmp_path / "val", [[[2, 0]]], complete=False)
    found = describe(tmp_path)
    assert (found["kind"], found["what"]) == ("folder", "a folder of 2 stores")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/manifest.json").write_text("{")
    for place in (tmp_path, tmp_path / "small"):
        place.mkdir(exist_ok=True)
        (place / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    shutil.copytree(root / "runs/lr-0.01/seed-0", tmp_path / "run")
    found = describe(tmp_path)
    assert found["kind"] == "tokenizer"
    assert found["what"].endswith("in its folder, beside 3 stores, 1 tokenizer, 1 run")
    assert [(row["name"], row["kind"]) for row in found["stores"]] == [
        ("broken", "damaged"), ("train", "store"), ("val", "partial store"),
    ]  # fmt: skip
    assert found["stores"][1]["records"] == 2
    assert [row["size"] for row in found["tokenizers"]] == [3]
    assert [row["name"] for row in found["runs"]] == ["run"]
    alone = describe(tmp_path / "small")
    assert alone["what"] == "a tokenizer (tokenizer.json), in its folder"
