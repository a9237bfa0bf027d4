"""Settings in JSON, as programs that train BERT have them, and epochs in place of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
import toy
from task_cases import make_stores
from tokmill.cli import main
from tokmill.errors import TokmillError, UsageError
from tokmill.training.epochs import with_epochs
from tokmill.training.recipe.check import from_dict
from tokmill.training.recipe.resolve import resolve

torch.set_num_threads(1)
TRAIN = {
    "seed": 3431, "batch_size": 32, "lr": 1e-4, "n_epochs": 30, "warmup": 0.1,
    "save_steps": 10000, "total_steps": 1000000,
}  # fmt: skip
MODEL = {
    "dim": 32, "dim_ff": 64, "n_layers": 2, "n_heads": 2, "p_drop_attn": 0.1,
    "p_drop_hidden": 0.1, "max_len": 32, "n_segments": 2, "vocab_size": 30522,
}  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stores(tmp_path_factory.mktemp("stores"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "config"
    folder.mkdir()
    for name, value in (("pretrain", TRAIN), ("bert", MODEL)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder / "pretrain.json", folder / "bert.json"


def test_a_file_of_settings_is_a_recipe(
    files: tuple[Path, Path], stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, model = files
    data = {"data": {"train": str(stores / "walks")}}
    config = resolve(train, Path("RUN"), {**data, "settings": [str(model)]}, False)
    assert (config.data.seed, config.run.seed, config.data.batch) == (3431, 3431, 32)
    assert (config.optim.kind, config.optim.lr, config.optim.warmup_share) == (
        "bert_adam",
        1e-4,
        0.1,
    )
    assert (config.run.epochs, config.run.steps) == (30, 1_000_000)
    assert config.run.checkpoint_every == 10_000
    assert config.task.kind == "sentence_pair" and config.task.length == 32
    made = config.model
    assert (made.kind, made.dim, made.layers, made.heads, made.hidden) == ("encoder", 32, 2, 2, 64)
    assert (made.context, made.dropout, made.attention_dropout) == (32, 0.1, 0.1)
    said = capsys.readouterr().err
    assert "vocab_size = 30522 is not used: the vocabulary of the store says it" in said
    # 30 epochs of 40 records in rows of 32 a step.
    assert with_epochs(config).run.steps == 38
    # Over a recipe and below single options.
    named = {**data, "settings": [str(train)], "optim": {"lr": 3e-4}, "steps": 7}
    config = resolve("recipes/bert/bert-medium.toml", Path("RUN"), named, False)
    assert (config.optim.lr, config.data.batch, config.run.steps) == (3e-4, 32, 7)
    assert (config.model.dim, config.model.layers) == (512, 8)


def test_a_configuration_of_bert_has_sizes_and_rates(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, Any] = {
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.2,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 32,
        "initializer_range": 0.02, "intermediate_size": 64, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 64, "model_type": "bert", "num_attention_heads": 2,
        "num_hidden_layers": 3, "pad_token_id": 0, "pooler_fc_size": 768, "type_vocab_size": 2,
        "vocab_size": 30522,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(said))
    config = resolve(file, Path("RUN"), {"data": {"train": str(stores / "walks")}}, False)
    made = config.model
    assert (made.dim, made.layers, made.heads, made.hidden) == (32, 3, 2, 64)
    assert (made.context, made.dropout, made.attention_dropout) == (64, 0.1, 0.2)
    assert (made.activation, made.norm_eps) == ("gelu", 1e-5)
    assert "chooses nothing here: architectures, initializer_range" in capsys.readouterr().err
    file.write_text(json.dumps({**said, "model_type": "roberta"}))
    with pytest.raises(UsageError, match="model_type is 'roberta'"):
        resolve(file, Path("RUN"), {"data": {"train": str(stores / "walks")}}, False)


def test_a_table_that_is_shorter_than_a_row_is_noted(
    stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "pretrain", "--data", str(stores / "walks"), "--device", "cpu", "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--set", "model.context=64"])
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    assert "model.context = 64: a document that is longer" in said.err


def test_the_command_reads_them(
    files: tuple[Path, Path], stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, model = files
    words = ["train", str(train), "--config", str(model), "--data", str(stores / "walks")]
    for more in (["--dry-run", "--json"], ["--steps", "2", "-q", "-o", str(tmp_path / "run")]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more, "--device", "cpu"])
        assert not ended.value.code, capsys.readouterr().err
        if "--json" in more:
            plan = json.loads(capsys.readouterr().out)
            assert plan["steps"] == 38 and plan["epochs"] == pytest.approx(30.4)
            assert 0 < plan["seconds_per_step"] < 600
    kept = json.loads((tmp_path / "run/recipe.json").read_text())
    assert kept["run"]["steps"] == 2 and kept["run"]["epochs"] == 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds no settings"),
        ('{"model": {"dim": 3}}', "holds no settings"),
        ('{"text": "once"}', "text: there is no such key"),
        ('{"lr": "much"}', "expected `float`"),
        ("[" * 100_000, "is no JSON"),
        ('{"lr": 1e-4, "seed": 1, "lr": 2e-4}', "the name 'lr' stands twice"),
    ],
)
def test_other_files_are_no_settings(text: str, said: str, stores: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        resolve(tmp_path / "x.json", Path("RUN"), {"train": str(stores / "walks")}, False)


def test_an_error_names_the_file_of_settings(stores: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"batch_size": 8}')
    recipe = "recipes/bert/bert-medium.toml"
    data = {"train": str(stores / "walks"), "settings": [str(good), str(bad)]}
    for text, said in (('{"lr": -1}', "-1"), ('{"lr": "x"}', "float"), ('{"lrr": 1}', "lrr")):
        bad.write_text(text)
        with pytest.raises(UsageError, match=said) as caught:
            resolve(recipe, Path("RUN"), data, False)
        assert caught.value.where == str(bad)
    bad.write_text("{}")
    with pytest.raises(UsageError, match="-1") as caught:
        resolve(recipe, Path("RUN"), {**data, "optim": {"lr": -1.0}}, False)
    assert str(bad) not in caught.value.where


def epochs(stores: Path, run: dict[str, Any], options: dict[str, Any] | None = None) -> int:
    recipe = {"data": {"train": str(stores / "walks"), "batch": 16}, "run": run}
    recipe["task"] = {"kind": "masked", "rows": "whole"}
    return int(with_epochs(resolve(recipe, Path("RUN"), options or {}, False)).run.steps)


def test_epochs_and_steps(stores: Path) -> None:
    """The first of both ends the run; epochs alone decide; options win over the recipe."""
    assert epochs(stores, {"epochs": 3}) == 8
    assert epochs(stores, {"epochs": 0.1}) == 1
    assert epochs(stores, {"epochs": 3, "steps": 5}) == 5
    assert epochs(stores, {"epochs": 3, "steps": 500}) == 8
    assert (
        epochs(stores, {"steps": 5}, {"num_train_epochs": 2}) == 5 == epochs(stores, {"epochs": 2})
    )
    assert epochs(stores, {"epochs": 3}, {"steps": 2}) == 2
    with pytest.raises(UsageError, match="run.epochs: -1"):
        from_dict({"run": {"epochs": -1}})


def test_a_run_of_epochs_goes_on_for_more_of_them(stores: Path, tmp_path: Path) -> None:
    value = toy.recipe(
        stores / "walks",
        optim={"schedule": "constant"},
        task={"kind": "masked", "rows": "whole"},
        run={"epochs": 1},
        model={"kind": "encoder"},
    )
    del value["run"]["steps"]
    assert tokmill.train(value, tmp_path / "run", quiet=True).step == 5
    again = tokmill.train(None, tmp_path / "run", options={"n_epochs": 2}, resume=True, quiet=True)
    assert again.step == 10
    with pytest.raises(TokmillError, match="other learning rates"):
        more = {"n_epochs": 3, "schedule": "cosine"}
        tokmill.train(None, tmp_path / "run", options=more, resume=True, quiet=True)
