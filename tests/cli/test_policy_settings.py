"""The names of MLIR-RL's own configurations: each is taken, or named in a note."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokmill.base.errors import UsageError
from tokmill.mlir.modules import generators
from tokmill.training.recipe.resolve import resolve

FILE = "config.json"
SIZES = {"hidden_size": 768, "max_seq_length": 128, "vocab_size": 10_000, "dropout": 0.1}
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


@pytest.mark.parametrize("nested", [True, False])
def test_all_names_of_the_original_are_taken_or_named(
    nested: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In sections and with the model's sizes alone, as in its repository, or flat."""
    monkeypatch.chdir(tmp_path)
    place = Path("data/test/code_files")
    place.mkdir(parents=True)
    (place / "0.mlir").write_text(generators.chain("add 8 16"))
    flat = {name: value for part in SECTIONS.values() for name, value in part.items()}
    flat.pop("_comment")
    settings = SECTIONS if nested else flat
    said = {"_description": "x", "model_type": "distilbert", "model_config": SIZES, **settings}
    Path(FILE).write_text(json.dumps(said))
    config = resolve(FILE, Path("run"), {})
    for table, keys in TAKEN.items():
        for name, value in keys.items():
            assert getattr(getattr(config, table), name) == value, name
    assert config.model.model_config == {"distilbert": SIZES}
    assert config.task.benchmarks_folder_path == str(Path("data/test/code_files").resolve())
    lines = [line for line in capsys.readouterr().err.splitlines() if "not used: " in line]
    # Each is named once, with a reason.
    parts = [line.split("not used: ")[1].partition(": ") for line in lines]
    assert sorted(name for names, _, _ in parts for name in names.split(", ")) == sorted(NOT_TAKEN)
    assert all(reason for _, _, reason in parts)
    Path(FILE).write_text(json.dumps({**said, "num_tile_size": 7}))
    with pytest.raises(UsageError, match="num_tile_size: there is no such key"):
        resolve(FILE, Path("run"), {})
