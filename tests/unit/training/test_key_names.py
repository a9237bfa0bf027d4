"""Keys without their table: ours, other trainers', ambiguous and unknown ones."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec
import pytest

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.cli.recipe_command import training_keys
from tokmill.training.recipe.config import KINDS, LEARNED
from tokmill.training.recipe.read_recipe import (
    FREE,
    NESTED,
    OTHER_NAMES,
    OTHER_WAYS,
    TABLES,
    flatten,
    in_tables,
    merged,
)
from tokmill.training.recipe.resolve import from_dict


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("batch_size", "data.batch"),
        ("d_model", "model.dim"),
        ("num_layers", "model.layers"),
        ("n_head", "model.heads"),
        ("d_ff", "model.hidden"),
        ("context_length", "task.length"),
        ("block_size", "task.length"),
        ("learning_rate", "optim.lr"),
        ("warmup_iters", "optim.warmup"),
        ("grad_clip", "optim.clip"),
        ("optimizer", "optim.kind"),
        ("max_iters", "run.steps"),
        ("eval_interval", "run.eval_every"),
        ("steps", "run.steps"),
        ("lr", "optim.lr"),
        ("batch", "data.batch"),
        ("dim", "model.dim"),
        ("length", "task.length"),
    ],
)
def test_a_name_finds_its_table(given: str, key: str) -> None:
    table, _, name = key.partition(".")
    assert merged({}, {given: 3}) == merged({given: 3}, {}) == {table: {name: 3}}


def test_every_other_name_is_of_a_key_that_is_there_and_is_none_of_ours() -> None:
    whole = msgspec.to_builtins(from_dict({}))
    kinds = (
        {"task": {"kind": "masked"}},
        {"model": {"kind": "policy"}, "task": {"kind": "schedules"}},
    )
    keys = flatten(whole)
    for kind in kinds:
        keys |= flatten(msgspec.to_builtins(from_dict(kind)))
    assert set(OTHER_NAMES.values()) <= keys.keys()
    ours = {key.partition(".")[2] for key in keys}
    assert not ours & (OTHER_NAMES.keys() | OTHER_WAYS.keys())
    # A name of ours is looked for in the model and the task only where these tables lack it.
    parts = {name for table in LEARNED for name in whole[table]}
    parts.remove("kind")
    assert not parts & {name for kind in TABLES.values() for name in kind.__struct_fields__}


def test_names_of_several_keys_and_a_warm_up_that_is_a_share() -> None:
    assert merged({}, {"seed": 3}) == {"data": {"seed": 3}, "run": {"seed": 3}}
    with pytest.raises(UsageError, match="run.seed and seed are the same key"):
        merged({"run": {"seed": 2}, "seed": 1}, {})
    assert merged({"max_len": 64}, {}) == {"task": {"length": 64}, "model": {"context": 64}}
    recurrent = {"model": {"kind": "rwkv7"}}
    assert merged({"max_len": 64} | recurrent, {}) == recurrent | {"task": {"length": 64}}
    bert = {"optim": {"kind": "bert_adam"}}
    found = merged(bert, {"warmup": 0.1})["optim"]
    assert found == {"kind": "bert_adam", "warmup_share": 0.1}
    assert merged(bert, {"warmup": 100})["optim"]["warmup"] == 100


def test_options_win_over_the_recipe_under_any_name() -> None:
    recipe = {"optim": {"lr": 1.0, "warmup": 7}, "max_iters": 5}
    assert merged(recipe, {"learning_rate": 2.0, "run": {"steps": 6}}) == {
        "optim": {"lr": 2.0, "warmup": 7},
        "run": {"steps": 6},
    }
    # The tables themselves, and what is wrong in them, stay as they are.
    odd: dict[str, Any] = {"modle": {"dim": 1}, "data": 3}
    assert in_tables(odd, odd) == odd


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        (
            {"warmup": 0.1},
            "warmup: 0.1 is a share of the steps, and adamw counts them",
            "optim.kind=bert_adam",
        ),
        ({"kind": "x"}, "kind may be model.kind or task.kind or optim.kind", "name its table"),
        ({"warmupp": 1}, "warmupp: there is no such key", "did you mean 'warmup'?"),
        ({"learning_rat": 1}, "learning_rat: there is no such key", "'learning_rate'?"),
        ({"min_lr": 1}, "min_lr: there is no such key", "optim.floor"),
        ({"run": {"push": "x"}}, "run.push: there is no such key", "a copy of RUN"),
        ({"vocab_size": 9}, "vocab_size: there is no such key", "the store"),
        ({"lr": 1, "learning_rate": 2}, "lr and learning_rate are the same key", "one of them"),
        ({"optim": {"lr": 1}, "lr": 2}, "optim.lr and lr are the same key", "one of them"),
    ],
)
def test_what_is_not_clear_is_refused(given: dict[str, Any], what: str, hint: str) -> None:
    for value, options, where in (({}, given, "options"), (given, {}, "r.toml")):
        with pytest.raises(UsageError) as caught:
            merged(value, options, "r.toml")
        assert (caught.value.what, caught.value.where) == (what, where)
        assert hint in caught.value.hint


def test_the_schema_lists_them() -> None:
    documented = {key["key"]: key["doc"].partition("Also: ")[2] for key in training_keys([])}
    for name, key in OTHER_NAMES.items():
        assert name in documented[key].split(", "), key


def test_the_page_on_training_lists_keys_that_may_change(repository: Path) -> None:
    text = (repository / "docs/training/checkpoints.md").read_text("utf-8")
    free = text[text.index("These keys may change when") : text.index("`--max-time` counts")]
    assert set(re.findall(r"`(\w+\.\w+)`", free)) == FREE


def test_a_named_size_is_its_keys() -> None:
    given = {"model": {"kind": "encoder", "size": "base", "layers": 3}}
    found = merged(given, {})["model"]
    assert found["dim"] == 768 and found["layers"] == 3 and "size" not in found
    assert from_dict({"model": found}).model.heads == 12


def test_a_size_wins_over_the_keys_of_what_it_is_put_over() -> None:
    recipe = {"model": {"kind": "encoder", "dim": 32, "layers": 1, "dropout": 0.1}}
    found = merged(recipe, {"model": {"size": "tiny"}})["model"]
    assert found == {
        "kind": "encoder", "dim": 128, "layers": 2, "heads": 2, "hidden": 256, "dropout": 0.1,
    }  # fmt: skip
    found = merged({"model": {"kind": "encoder", "size": "tiny"}}, {"model": {"dim": 64}})["model"]
    assert found["dim"] == 64 and found["hidden"] == 256


@pytest.mark.parametrize(
    ("model", "what", "hint"),
    [
        ({"kind": "encoder", "size": "bass"}, "no encoder is called 'bass'", "'base'"),
        ({"kind": "encoder", "size": 3}, "no encoder is called 3", "known: base"),
        ({"size": "base"}, "sizes of the model decoder have no names", "model.dim"),
        ({"kind": "encodr", "size": "base"}, "no model is called 'encodr'", "encoder"),
    ],
)
def test_a_size_that_is_not_there(model: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        merged({"model": model}, {})
    assert what in refused.value.what and hint in refused.value.hint


def test_keys_that_hold_a_table_are_listed() -> None:
    """They are listed, as parts are not loaded to find out."""
    found = {
        key
        for table in LEARNED
        for kind in KINDS[table]
        for key, hint in get_type_hints(plugins.load(KINDS[table], kind).Config).items()
        if get_origin(hint) in (dict, Mapping)
    }
    assert found == set(NESTED)
