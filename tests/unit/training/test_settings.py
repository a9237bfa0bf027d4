"""Settings in JSON, as programs that train BERT have them, and epochs in place of steps."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import tokmill
import toy
from task_cases import make_stores
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.recipe import overrides
from tokmill.cli import main
from tokmill.training.data import with_epochs
from tokmill.training.engines.optimisers.optim import learning_rate
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.read_recipe import read_recipe
from tokmill.training.recipe.resolve import from_dict, resolve

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
    config = resolve(train, Path("RUN"), {**data, "settings": [str(model)]})
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
    assert "not used: vocab_size: the vocabulary of the store says it" in said
    # 30 epochs of 40 records in rows of 32 a step.
    assert with_epochs(config).run.steps == 38
    # Over a recipe and below single options.
    named = {**data, "settings": [str(train)], "optim": {"lr": 3e-4}, "steps": 7}
    config = resolve("recipes/bert/bert-medium.toml", Path("RUN"), named)
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
    config = resolve(file, Path("RUN"), {"data": {"train": str(stores / "walks")}})
    made = config.model
    assert (made.dim, made.layers, made.heads, made.hidden) == (32, 3, 2, 64)
    assert (made.context, made.dropout, made.attention_dropout) == (64, 0.1, 0.2)
    assert (made.activation, made.norm_eps) == ("gelu", 1e-5)
    assert "not used: architectures, initializer_range" in capsys.readouterr().err
    file.write_text(json.dumps({**said, "model_type": "roberta"}))
    with pytest.raises(UsageError, match="model_type is 'roberta'"):
        resolve(file, Path("RUN"), {"data": {"train": str(stores / "walks")}})


def test_a_table_that_is_shorter_than_a_row_is_noted(
    stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "pretrain", "--data", str(stores / "walks"), "--device", "cpu", "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        main([*words, *(f"--set=model.{key}" for key in ("context=64", "dim=32", "layers=1"))])
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
        ("{", "is not JSON"),
        ('{"lr": 1e-4, // a comment\n}', "no comments"),
        ("[1]", "holds no settings"),
        ('{"model": {"dim": 3}}', "holds no settings"),
        ('{"text": "once"}', "text: there is no such key"),
        ('{"lr": "much", "d_model": 8}', "expected `float`"),
        ("[" * 100_000, "is not JSON"),
        ('{"lr": 1e-4, "seed": 1, "lr": 2e-4}', "the name 'lr' stands twice"),
    ],
)
def test_other_files_are_no_settings(text: str, said: str, stores: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        resolve(tmp_path / "x.json", Path("RUN"), {"train": str(stores / "walks")})


def test_an_error_names_the_file_of_settings(stores: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"batch_size": 8}')
    recipe = "recipes/bert/bert-medium.toml"
    data = {"train": str(stores / "walks"), "settings": [str(good), str(bad)]}
    for text, said in (('{"lr": -1}', "-1"), ('{"lr": "x"}', "float"), ('{"lrr": 1}', "lrr")):
        bad.write_text(text)
        with pytest.raises(UsageError, match=said) as caught:
            resolve(recipe, Path("RUN"), data)
        assert caught.value.where == str(bad)
    bad.write_text("{}")
    with pytest.raises(UsageError, match="-1") as caught:
        resolve(recipe, Path("RUN"), {**data, "optim": {"lr": -1.0}})
    assert caught.value.where == "options"


@pytest.mark.parametrize(
    "key, value", [("optim.lr", "nan"), ("lr", "inf"), ("model.dim", "0"), ("dim", "-1")]
)
def test_an_error_names_the_recipe_or_the_options(
    key: str, value: str, stores: Path, tmp_path: Path
) -> None:
    data = {"train": str(stores / "walks")}
    bad = tmp_path / "bad.toml"
    bad.write_text(f"{key} = {value}\n")
    options = {**data, **overrides([f"{key}={value}"])}
    asked = ((bad, data, str(bad)), ("decoder-tiny", options, "options"))
    for given, over, where in asked:
        with pytest.raises(UsageError, match=key) as caught:
            resolve(given, Path("RUN"), over)
        assert caught.value.where == where


def test_another_mistake_of_the_recipe_does_not_blame_the_options(
    stores: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[model]\ndim = 0\n[run]\nsteps = -1\n")
    options = {"train": str(stores / "walks"), **overrides(["run.steps=10"])}
    with pytest.raises(UsageError, match=r"model\.dim") as caught:
        resolve(bad, Path("RUN"), options)
    assert caught.value.where == str(bad)


CS336 = {
    "context_length": 24, "d_model": 16, "num_layers": 3, "num_heads": 2, "d_ff": 40,
    "max_iters": 7, "learning_rate": 3e-4, "batch_size": 4, "vocab_size": 500,
}  # fmt: skip
"""Names of the settings of CS336's trainer."""


def three_ways(files: Sequence[Path], store: Path) -> TrainConfig:
    """Resolve settings as the recipe, over a store, and over --data: all mean the same."""
    first, *rest = map(str, files)
    data = {"data": {"train": str(store)}}
    alone = resolve(first, Path("RUN"), {**data, "settings": rest})
    for recipe, options in ((store, {}), (None, data)):
        other = resolve(recipe, Path("RUN"), {**options, "settings": [first, *rest]})
        assert msgspec.to_builtins(other) == msgspec.to_builtins(alone)
    return alone


def test_settings_tell_which_model_they_are_of(
    files: tuple[Path, Path], stores: Path, tmp_path: Path
) -> None:
    """A decoder of CS336's names and BERT of its own, wherever the file stands."""
    file = tmp_path / "cs336.json"
    file.write_text(json.dumps(CS336))
    made = three_ways([file], stores / "walks")
    assert (made.model.kind, made.task.kind, made.optim.kind) == (
        "decoder",
        "next_token",
        "adamw",
    )
    assert (made.model.dim, made.model.layers, made.model.heads, made.model.hidden) == (
        16,
        3,
        2,
        40,
    )
    assert (made.task.length, made.run.steps, made.optim.lr, made.data.batch) == (24, 7, 3e-4, 4)
    for some in (files, files[:1], files[1:]):
        made = three_ways(some, stores / "walks")
        assert (made.model.kind, made.task.kind) == ("encoder", "sentence_pair")
        assert made.optim.kind == "bert_adam"
    # Over a recipe they are settings of its model.
    options = {"data": {"train": str(stores / "walks")}, "settings": [str(files[0])]}
    with pytest.raises(UsageError, match="a share of the steps, and muon counts them"):
        resolve("decoder-tiny", Path("RUN"), options)


def test_settings_of_two_models_are_refused(tmp_path: Path, stores: Path) -> None:
    (tmp_path / "both.json").write_text('{"d_model": 16, "type_vocab_size": 2, "lr": 1e-3}')
    for options in ({}, {"model": {"kind": "encoder"}}):
        with pytest.raises(UsageError) as caught:
            given = {"data": {"train": str(stores / "walks")}, **options}
            resolve(tmp_path / "both.json", Path("RUN"), given)
        assert "of a decoder (d_model) and of BERT (type_vocab_size)" in caught.value.what


def test_settings_of_any_model_go_by_the_store(
    tmp_path: Path, stores: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plain.json"
    file.write_text('{"batch_size": 4, "lr": 1e-3}')
    # Without [MASK] there is no BERT.
    assert three_ways([file], store).model.kind == "decoder"
    data = {"data": {"train": str(stores / "walks")}}
    with pytest.raises(UsageError, match="whether a decoder or BERT is meant") as caught:
        resolve(file, Path("RUN"), data)
    # Both commands of the hint do what it says.
    commands = re.findall(r"`tokmill (.*?)`", caught.value.hint)
    for command, kind in zip(commands, ("encoder", "decoder"), strict=True):
        words = shlex.split(command.replace("-o RUN", f"-o {tmp_path / kind} --steps 1 -q"))
        with pytest.raises(SystemExit) as ended:
            main([*words, "--device", "cpu"])
        assert not ended.value.code, capsys.readouterr().err
        assert read_recipe(tmp_path / kind)["model"]["kind"] == kind
    for kind, task in (("encoder", "sentence_pair"), ("rwkv7", "next_token")):
        made = resolve(file, Path("RUN"), {**data, "model": {"kind": kind}})
        assert (made.model.kind, made.task.kind) == (kind, task)


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4,
    "steps_per_print": 20, "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.03},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 9,
                   "total_num_steps": 90, "warmup_type": "linear", "last_batch_iteration": -1},
    },
    "logging": {"level": "warning"},
    "fp16": {"enabled": False, "loss_scale": 0},
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto",
                          "offload_optimizer": {"device": "cpu"}},
    "activation_checkpointing": {"partition_activations": True}, "wall_clock_breakdown": False,
}  # fmt: skip
"""A file as DeepSpeed's users have it; its numbers fit 2 processes."""


def deepspeed(
    folder: Path,
    store: Path,
    world: int = 2,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> TrainConfig:
    """Resolve the file with changes over a store, for so many processes; None removes a name."""
    said = {name: one for name, one in (DEEPSPEED | changes).items() if one is not None}
    (folder / "ds_config.json").write_text(json.dumps(said))
    given = {"settings": [str(folder / "ds_config.json")], **(options or {})}
    return resolve(store, Path("RUN"), given, world)


def test_deepspeeds_own_file_is_read(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = deepspeed(tmp_path, store, options={"task": {"length": 40}})
    assert (made.data.batch, made.run.micro_tokens) == (24, 3 * 40)
    optim = made.optim
    # The scheduler's largest rate is that of the training.
    assert (optim.kind, optim.lr, optim.betas, optim.eps) == ("adamw", 3e-4, (0.8, 0.99), 1e-7)
    assert (optim.weight_decay, optim.clip) == (0.03, 0.5)
    assert (optim.schedule, optim.warmup, optim.floor) == ("linear", 9, 0.0)
    run = made.run
    assert (run.engine, run.steps, run.log_every, run.precision) == ("deepspeed", 90, 20, "bf16")
    zero = {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
    assert made.engine.deepspeed == {"zero_optimization": zero, "wall_clock_breakdown": False}
    said = capsys.readouterr().err
    assert "run.engine = deepspeed" in said and "data.batch = 24" in said
    assert "has zero_optimization, wall_clock_breakdown" in said
    unused = "logging (run.log_every has one), activation_checkpointing (run.recompute has one)"
    unused += ", bf16.check_grad_overflow"
    assert f"without effect here: {unused}" in said
    # As the recipe it is the same; an engine that is named, and options, win.
    file, data = tmp_path / "ds_config.json", {"data": {"train": str(store)}}
    alone = resolve(file, Path("RUN"), {**data, "task": {"length": 40}}, 2)
    assert msgspec.to_builtins(alone) == msgspec.to_builtins(made)
    more = {"run": {"engine": "ddp", "steps": 5}, "optim": {"lr": 1.0}, "data": {"batch": 48}}
    made = deepspeed(tmp_path, store, options=more)
    assert (made.run.engine, made.run.steps, made.optim.lr) == ("ddp", 5, 1.0)
    assert (made.data.batch, made.run.micro_tokens) == (48, 3 * 128)


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "world", "expected"),
    [
        # The whole batch is rows of a micro-batch x accumulation x processes.
        (24, 3, 4, 2, (24, 3)),
        (24, 3, None, 2, (24, 3)),
        (24, None, 4, 2, (24, 3)),
        (None, 3, 4, 2, (24, 3)),
        (None, 3, None, 4, (12, 3)),
        (None, 5, 2, 1, (10, 5)),
        (24, None, 1, 2, (24, 12)),
        # The recipe says 16 rows.
        ("auto", "auto", 2, 2, (16, 4)),
        # What the file does not say, the recipe does.
        (24, None, None, 2, (24, None)),
        ("auto", "auto", "auto", 2, (16, None)),
        (24, 3, 4, 1, "--processes 2"),
        (24, 5, None, 2, "take one of"),
        (24, None, 7, 2, "take one of"),
        (4, 3, None, 8, "take one of"),
        (0, None, None, 1, '"train_batch_size": 8'),
        (24, "3", None, 1, '"train_micro_batch_size_per_gpu": 8'),
    ],
)
def test_the_batch_of_deepspeed_counts_all_processes(
    batch: Any, micro: Any, steps: Any, world: int, expected: Any, store: Path, tmp_path: Path
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = dict(zip(names, (batch, micro, steps), strict=True))
    if isinstance(expected, str):
        with pytest.raises(UsageError) as caught:
            deepspeed(tmp_path, store, world, **sizes)
        assert expected in caught.value.hint
        assert caught.value.where == str(tmp_path / "ds_config.json")
        return
    made = deepspeed(tmp_path, store, world, **sizes)
    rows, each = expected
    assert (made.data.batch, made.run.micro_tokens) == (rows, each * 128 if each else 16_384)


def test_what_deepspeeds_file_leaves_out_is_its_default_or_the_recipes(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = resolve(store, Path("RUN"), {})
    auto = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}
    rates = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    made = deepspeed(
        tmp_path, store, train_batch_size="auto", train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto", gradient_clipping="auto", steps_per_print=None,
        optimizer=auto, scheduler={"type": "WarmupLR", "params": rates},
        bf16={"enabled": "auto"}, fp16={"enabled": "auto"}, zero_optimization=None,
    )  # fmt: skip
    assert made.optim == msgspec.structs.replace(plain.optim, schedule="constant", eps=1e-8)
    assert made.run == msgspec.structs.replace(plain.run, engine="deepspeed")
    # DeepSpeed without this table does not split anything; a recipe would be stage 2.
    assert made.engine.deepspeed["zero_optimization"] == {"stage": 0}
    # An optimiser and a schedule without arguments have DeepSpeed's.
    bare = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupDecayLR"}}
    optim = deepspeed(tmp_path, store, **bare).optim
    assert (optim.betas, optim.eps, optim.weight_decay) == ((0.9, 0.999), 1e-8, 0.0)
    assert (optim.lr, optim.warmup, optim.schedule) == (1e-3, 1000, "linear")
    optim = deepspeed(tmp_path, store, scheduler={"type": "WarmupCosineLR"}).optim
    assert (optim.lr, optim.floor, optim.schedule) == (2e-4, 1e-4, "cosine")
    # Over a recipe with another optimiser, the keys that AdamW lacks go.
    (tmp_path / "ds_config.json").write_text(json.dumps(DEEPSPEED | {"scheduler": "auto"}))
    given = {"settings": [str(tmp_path / "ds_config.json")], "data": {"train": str(store)}}
    optim = resolve("pretrain", Path("RUN"), given, 2).optim
    assert (optim.kind, optim.lr, optim.schedule, optim.warmup) == ("adamw", 2e-4, "linear", 50)
    assert "not used: optim.warmup_share: AdamW has no such key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: DeepSpeed 0.19 has no such key"),
        ({"bf16": {"enable": True}}, "bf16.enable: DeepSpeed 0.19 has no such key"),
        ({"fp16": {"enabled": False, "loss_scal": 0}}, "fp16.loss_scal: DeepSpeed"),
        ({"optimizer": {"type": "AdamW", "param": {"lr": 1e-5}}}, "optimizer.param: DeepSpeed"),
        ({"scheduler": {"type": "WarmupLR", "parms": {}}}, "scheduler.parms: DeepSpeed"),
        ({"fp16": {"enabled": True}, "bf16": None}, "fp16: matrix products are in fp32 or bf16"),
        ({"torch_autocast": {"enabled": True}}, "run.precision decides this"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer: Lamb cannot be read"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            "optimizer: Adam, adam_w_mode = False cannot be read",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "amsgrad = True"),
        ({"optimizer": {"type": "AdamW", "params": {"eps": "small"}}}, "optim.eps"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler: OneCycle cannot be read"),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 3}}}, "total_num_steps"),
        ({"scheduler": []}, "scheduler: [] is no object"),
        ({"zero_optimization": {"stage": 5}}, "it is 0, 1, 2 or 3"),
    ],
)
def test_what_deepspeeds_file_may_not_say(
    changes: dict[str, Any], what: str, store: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        deepspeed(tmp_path, store, **changes)
    assert what in caught.value.what and caught.value.hint
    assert caught.value.where == str(tmp_path / "ds_config.json")


def of_deepspeed(kind: str, step: int, **keys: float) -> float:
    """The rate of DeepSpeed's classes (lr_schedules.py, 0.19.8) as a share of the largest."""
    total, warmup, least = keys["total"], keys["warmup"], keys["least"]
    if step < warmup:
        return step / warmup
    if kind == "WarmupLR":
        return 1.0
    if kind == "WarmupDecayLR":
        return least + (1 - least) * max(0.0, (total - step) / max(1.0, total - warmup))
    done = min(1.0, (step - warmup + 1) / max(1, total - warmup))
    return least + (1 - least) * (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_schedules_are_deepspeeds_but_for_a_step(kind: str, store: Path, tmp_path: Path) -> None:
    total, warmup, lr = 400, 40, 1e-3
    params: dict[str, Any] = {"warmup_num_steps": warmup, "warmup_type": "linear"}
    least = {"WarmupLR": 0.0, "WarmupDecayLR": 0.2, "WarmupCosineLR": 0.1}[kind]
    if kind == "WarmupDecayLR":
        params |= {"warmup_max_lr": lr, "warmup_min_lr": least * lr}
    if kind == "WarmupCosineLR":
        params |= {"cos_min_ratio": least}
    if kind != "WarmupLR":
        params["total_num_steps"] = total
    optimizer = {"type": "AdamW", "params": {"lr": lr}}
    schedule = {"type": kind, "params": params}
    made = deepspeed(tmp_path, store, optimizer=optimizer, scheduler=schedule)
    for step in range(0, total, 7):
        mine = learning_rate(made.optim, step, total) / lr
        # A step of DeepSpeed's counter is at most a 40th of the warm-up, a 230th after it.
        near = [of_deepspeed(kind, max(0, step + d), total=total, warmup=warmup, least=least)
                for d in (-1, 0, 1, 2)]  # fmt: skip
        assert min(near) - 1e-9 <= mine <= max(near) + 1e-9, step


def epochs(stores: Path, run: dict[str, Any], options: dict[str, Any] | None = None) -> int:
    recipe = {"data": {"train": str(stores / "walks"), "batch": 16}, "run": run}
    recipe["task"] = {"kind": "masked", "rows": "whole"}
    return int(with_epochs(resolve(recipe, Path("RUN"), options or {})).run.steps)


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
    with pytest.raises(UsageError, match="run.epochs"):
        from_dict({"run": {"epochs": -1}})


def test_a_run_of_epochs_goes_on_for_more_of_them(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = toy.recipe(
        stores / "walks",
        optim={"schedule": "constant"},
        task={"kind": "masked", "rows": "whole"},
        run={"epochs": 1},
        model={"kind": "encoder"},
    )
    del value["run"]["steps"]
    assert tokmill.train(value, tmp_path / "run", quiet=True).step == 5
    assert "run.epochs" not in capsys.readouterr().err
    assert tokmill.train(value, tmp_path / "run", options={"steps": 9}, quiet=True).step == 5
    note = "note: run.epochs = 1 end the run after 5 steps, before run.steps = 9"
    assert note in capsys.readouterr().err.splitlines()
    with pytest.raises(TokmillError, match="no such store") as error:
        tokmill.train(None, tmp_path / "run", options={"data": {"train": "gone"}}, quiet=True)
    assert "--data STORE or --val STORE" in error.value.hint
    again = tokmill.train(None, tmp_path / "run", options={"n_epochs": 2}, quiet=True)
    assert again.step == 10
    with pytest.raises(TokmillError, match="other learning rates"):
        more = {"n_epochs": 3, "schedule": "cosine"}
        tokmill.train(None, tmp_path / "run", options=more, quiet=True)


def test_deepspeeds_file_alone_tells_no_model(stores: Path, store: Path, tmp_path: Path) -> None:
    deepspeed(tmp_path, store)
    given = {"data": {"train": str(stores / "walks")}}
    with pytest.raises(UsageError, match="whether a decoder or BERT is meant"):
        resolve(tmp_path / "ds_config.json", Path("RUN"), given, 2)
    cs336 = tmp_path / "cs336.json"
    cs336.write_text(json.dumps(CS336))
    given["settings"] = [str(cs336)]  # type: ignore[assignment]
    made = resolve(tmp_path / "ds_config.json", Path("RUN"), given, 2)
    assert (made.model.kind, made.run.engine, made.model.dim) == ("decoder", "deepspeed", 16)
    # DeepSpeed's file is read after the other, whose rows are 24 long.
    assert (made.data.batch, made.run.micro_tokens, made.run.steps) == (24, 3 * 24, 90)
