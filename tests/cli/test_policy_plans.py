"""What `tokmill rl train` says of a policy: with `--dry-run`, and when a training begins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import made_times
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators

Here = Callable[..., tuple[str, str]]
torch.set_num_threads(1)
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurements, "_measure", made_times.made)


def settings(folder: Path, kind: str = "distilbert", **sizes: Any) -> Path:
    """Write a file of settings for two modules, of which one is held out."""
    (folder / "code_files").mkdir(exist_ok=True)
    (folder / "code_files" / "a.mlir").write_text(generators.chain("matmul 8 8 8, relu"))
    said = {
        "model_type": kind, "bench_count": 4, "held_out": ["add 8 16"], "steps": 2,
        "benchmarks_folder_path": str(folder / "code_files"), "model_config": {kind: sizes},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(said))
    return folder / "config.json"


FIELDS = {**SMALL, "max_seq_length": 128, "vocab_size": 10_000, "dropout": 0.1}
BUCKETS = {**SMALL, "tokens": "buckets", "max_seq_length": 128, "vocab_size": 10_000,
           "truncate": True, "seed_compatible": True}  # fmt: skip


def test_a_dry_run_and_a_training_say_the_same(here: Here, tmp_path: Path) -> None:
    for sizes, facts, notes in (
        (
            FIELDS,
            {"tokens a sequence": "128", "tokens of the longest": "68"},
            ["vocab_size = 10000 has no effect", "dropout = 0.1 has no effect"],
        ),
        (
            BUCKETS,
            {"tokens a sequence": "128", "features kept": "18.3%",
             "features with ids of their own": "10.5%"},
            ["cut to 128 tokens: 127 of 694 numbers (18.3%) are kept"],
        ),
    ):  # fmt: skip
        facts |= {
            "modules to learn from": "1", "modules held out": "1",
            "evaluations a step": "4", "evaluations in all": "8", "operation features": "347",
            "history features": "1,280",
        }  # fmt: skip
        file = settings(tmp_path, **sizes)
        out, err = here("rl", "train", file, "--dry-run")
        rows = [line.split("  ") for line in out.splitlines()]
        table = {row[0]: row[-1].strip() for row in rows}
        assert facts.items() <= table.items()
        assert all(note in err for note in notes)
        # What is said of stores is not there.
        assert not table.keys() & {"columns", "batch", "micro-batch", "tokens per step"}
        assert not table.keys() & {"total tokens", "total FLOP"}
        run = f"run-{len(sizes)}"
        _, err = here("rl", "train", file, "-o", run)
        assert all(f"{name}: {value}" in err for name, value in facts.items())
        assert all(note in err for note in notes)
        # A run that goes on says none of it again.
        _, err = here("rl", "train", "-o", run)
        assert "operation features" not in err and "has no effect" not in err


def test_long_sequences_are_warned_of_and_short_ones_refused(here: Here, tmp_path: Path) -> None:
    _, err = here("rl", "train", settings(tmp_path, **SMALL, tokens="buckets"), "--dry-run")
    assert "reads sequences of 696 tokens" in err and "square" in err
    out, err = here("rl", "train", settings(tmp_path, kind="lstm"), "--dry-run")
    assert "vectors a sequence" in out and "note:" not in err
    # The sequence has no room for the module; a training would say so too.
    file = settings(tmp_path, **SMALL, max_seq_length=20)
    for words in (["--dry-run"], ["-o", "run"]):
        _, err = here("rl", "train", file, *words, code=2)
        assert "a sequence can have 68 tokens" in err and "hint: 68 keeps all" in err
    file = settings(tmp_path, **SMALL, max_seq_length=20, truncate=True)
    out, err = here("rl", "train", file, "--dry-run")
    assert "tokens of it kept" in out and "29.4%" in out and "cut to 20 tokens" in err


def test_facts_are_numbers_for_programs(here: Here, tmp_path: Path) -> None:
    out, _ = here("rl", "train", settings(tmp_path, **BUCKETS), "--dry-run", "--json")
    found = json.loads(out)["environment"]
    assert found["modules_to_learn_from"] == found["modules_held_out"] == 1
    assert found["features_kept"] == pytest.approx(127 / 694)
    # 100 of the 127 numbers that are kept have ids; those of 27 are the ids of others too.
    assert found["features_with_ids_of_their_own"] == pytest.approx(73 / 694)
