"""The settings of MLIR-RL's DistilBERT, as its document prints them, by `tokmill rl train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import made_times
from tokmill.cli import main
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators
from tokmill.training.recipe.read import read_recipe
from toy import losses, weights

torch.set_num_threads(1)
FILE = "config/config_distilbert.json"
TESTING = """{
    "model_type": "distilbert",
    "bench_count": 4,
    "ppo_batch_size": 8,
    "value_batch_size": 8,
    "lr": 0.0001,
    "benchmarks_folder_path": "data/test/code_files"
}"""
PRODUCTION = """{
    "model_type": "distilbert",
    "bench_count": 32,
    "ppo_batch_size": 16,
    "value_batch_size": 16,
    "lr": 0.0001,
    "benchmarks_folder_path": "data/all/code_files"
}"""
MODEL = """{"model_config": {
    "distilbert": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 6,
        "max_seq_length": 128,
        "vocab_size": 10000,
        "dropout": 0.1
    }
}}"""


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be where the folders of the document are, and measure nothing."""
    monkeypatch.setattr(Measurements, "_measure", made_times.made)
    monkeypatch.chdir(tmp_path)
    for folder in ("test", "all"):
        place = Path("data") / folder / "code_files"
        place.mkdir(parents=True)
        for number, line in enumerate(("matmul 8 8 8, relu", "add 8 16")):
            (place / f"{number}.mlir").write_text(generators.chain(line))


def write(settings: str, **changes: Any) -> None:
    """Write the document's file, with the settings of its model."""
    Path("config").mkdir(exist_ok=True)
    Path(FILE).write_text(json.dumps(json.loads(settings) | json.loads(MODEL) | changes))


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """Run `tokmill rl train`; return what it prints on stdout and on stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["rl", "train", FILE, *words])
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown.err
    return shown.out, shown.err


@pytest.mark.parametrize(("settings", "episodes", "moves"), [(TESTING, 4, 8), (PRODUCTION, 32, 16)])
def test_a_dry_run_of_the_file_as_it_is(
    settings: str, episodes: int, moves: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(settings)
    out, err = command(capsys, "--dry-run", "--json")
    found = json.loads(out)
    # 42.5 M in the six layers, as published; tables, the policy and its heads are on top.
    layers = [name for name in found["tensors"] if ".blocks." in name]
    assert {name.split(".blocks.")[1].split(".")[0] for name in layers} == set("012345")
    assert 42_500_000 < found["parameters"] < 45_000_000
    facts = found["environment"]
    assert facts["modules_to_learn_from"] == 2 and facts["evaluations_a_step"] == episodes
    assert facts["moves_an_update"] == moves and facts["tokens_a_sequence"] == 128
    for key in ("vocab_size = 10000", "dropout = 0.1"):
        assert f"model_config.distilbert.{key} has no effect" in err
    assert "max_seq_length" not in err and not Path("run").exists()


def test_the_models_are_switched_by_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them learns for a step; the sizes are small, and all else is the document's."""
    small = json.loads(MODEL)["model_config"]
    small["distilbert"] |= {"hidden_size": 24, "num_hidden_layers": 1}
    for kind, part in (
        ("distilbert", "encoder.blocks.0.attention.q.weight"),
        ("lstm", "lstm.weight_ih_l0"),
        ("distilbert", "encoder.blocks.0.attention.q.weight"),
    ):
        write(TESTING, model_type=kind, model_config=small)
        run = Path(f"run-{kind}-{len(list(Path().iterdir()))}")
        _, err = command(capsys, "-o", str(run), "--steps", "1")
        assert f"model.observes.{part}" in weights(run)
        assert losses(run, "evaluations") == {1: 4.0}
        kept = read_recipe(run)
        assert kept["model"]["model_type"] == kind
        assert kept["task"]["benchmarks_folder_path"] == str(Path("data/test/code_files").resolve())
        # What belongs to the other model is kept, and not spoken of.
        assert kept["model"]["model_config"] == small
        assert ("vocab_size" in err) == (kind == "distilbert")
