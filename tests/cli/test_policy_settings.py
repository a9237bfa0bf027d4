"""The settings of MLIR-RL's DistilBERT, as its document prints them, by `tokmill rl train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import made_times
from tokmill.cli import main
from tokmill.errors import UsageError
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators
from tokmill.training.recipe.read import read_recipe
from tokmill.training.recipe.resolve import resolve
from tokmill.training.recipe.settings import tell
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


SECTIONS: dict[str, dict[str, Any]] = {
    "observation_space": {
        "max_num_stores_loads": 5, "max_num_loops": 9, "max_num_load_store_dim": 6,
        "num_tile_sizes": 7, "vect_size_limit": 512,
    },
    "action_space": {"order": [["I"], ["V", "NT"]], "interchange_mode": "pointers"},
    "exploration": {"strategy": ["entropy"], "init_epsilon": 0.5},
    "architecture": {
        "new_architecture": False, "activation": "relu", "normalize_bounds": "max",
        "normalize_adv": "standard",
    },
    "reward": {"sparse_reward": True, "split_ops": True},
    "training": {
        "bench_count": 4, "replay_count": 10, "nb_iterations": 3, "reuse_experience": "none",
        "truncate": 5,
    },
    "ppo": {
        "ppo_epochs": 5, "ppo_batch_size": 8, "lr": 2e-4, "gamma": 0.99, "clip_epsilon": 0.3,
        "entropy_coef": 0.02,
    },
    "value_function": {
        "value_epochs": 0, "value_batch_size": 8, "value_coef": 0.4, "value_clip": False,
    },
    "data_paths": {
        "benchmarks_folder_path": "data/test/code_files", "json_file": "a.json",
        "eval_json_file": "b.json",
    },
    "augmentation": {"_comment": "optional", "use_augmentation": False, "augmentation_ratio": 0.0},
    "logging": {"tags": ["x"], "debug": False, "results_dir": "r", "main_exec_data_file": ""},
}  # fmt: skip
"""All names that MLIR-RL's configurations have, by their sections."""
TAKEN = {
    "model": {"accesses": 5, "loops": 9, "dimensions": 6, "model_type": "distilbert"},
    "task": {"bench_count": 4, "ppo_epochs": 5, "ppo_batch_size": 8, "gamma": 0.99, "clip": 0.3,
             "entropy_coef": 0.02, "value_epochs": 0, "value_batch_size": 8, "value_coef": 0.4},
    "optim": {"lr": 2e-4},
    "run": {"steps": 3},
}  # fmt: skip
"""What they mean here."""
NOT_TAKEN = [
    "num_tile_sizes", "vect_size_limit", "order", "interchange_mode", "strategy", "init_epsilon",
    "new_architecture", "activation", "normalize_bounds", "normalize_adv", "sparse_reward",
    "split_ops", "replay_count", "reuse_experience", "truncate", "value_clip", "json_file",
    "eval_json_file", "use_augmentation", "augmentation_ratio", "tags", "debug", "results_dir",
    "main_exec_data_file",
]  # fmt: skip


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be where the folders of the document are, and measure nothing."""
    monkeypatch.setattr(Measurements, "_measure", made_times.made)
    monkeypatch.chdir(tmp_path)
    tell.cache_clear()
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


@pytest.mark.parametrize("nested", [True, False])
def test_all_names_of_the_original_are_taken_or_named(
    nested: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """In sections and with the model's sizes alone, as in its repository, or flat."""
    sizes = json.loads(MODEL)["model_config"]["distilbert"]
    flat = {name: value for part in SECTIONS.values() for name, value in part.items()}
    flat.pop("_comment")
    settings = SECTIONS if nested else flat
    said = {"_description": "x", "model_type": "distilbert", "model_config": sizes, **settings}
    Path("config").mkdir()
    Path(FILE).write_text(json.dumps(said))
    config = resolve(FILE, Path("run"), {}, False)
    for table, keys in TAKEN.items():
        for name, value in keys.items():
            assert getattr(getattr(config, table), name) == value, name
    assert config.model.model_config == {"distilbert": sizes}
    assert config.task.benchmarks_folder_path == str(Path("data/test/code_files").resolve())
    lines = [line for line in capsys.readouterr().err.splitlines() if "not used: " in line]
    # Each is named once, with a reason.
    parts = [line.split("not used: ")[1].partition(": ") for line in lines]
    assert sorted(name for names, _, _ in parts for name in names.split(", ")) == sorted(NOT_TAKEN)
    assert all(reason for _, _, reason in parts)
    Path(FILE).write_text(json.dumps({**said, "num_tile_size": 7}))
    with pytest.raises(UsageError, match="num_tile_size: there is no such key"):
        resolve(FILE, Path("run"), {}, False)
