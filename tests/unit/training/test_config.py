"""The numbers that a recipe may hold, and which of them may change on a resume."""

from typing import Any

import msgspec
import pytest

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.read_recipe import FREE, RATE, differences, flatten
from tokmill.training.recipe.resolve import from_dict, seconds


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("run.steps", 0, "run.steps: expected `int` >= 1, not 0"),
        ("optim.decay", 1.5, "<= 1.0, not 1.5"),
        ("optim.floor", 2.0, "not 2.0"),
        ("optim.lr", float("nan"), "optim.lr: expected `float` >= 0.0, not nan"),
        ("optim.lr", float("inf"), "optim.lr: expected `float` <= "),
        ("optim.lr", -1.0, "not -1.0"),
        ("optim.eps", -1e-8, "not -1e-08"),
        ("optim.betas", [0.9, 1.0], "optim.betas[1]: expected `float` < 1.0"),
        ("optim.betas", [float("nan"), 0.9], "optim.betas[0]"),
        ("run.peak_flops", float("inf"), "not inf"),
        ("data.weights", [1.0, float("inf")], "data.weights[1]"),
        ("data.batch_tokens", -1, "not -1"),
        ("data.shards", -1, "not -1"),
        ("data.seed", 10**20, "data.seed: a whole number of 67 bits"),
        ("run.seed", -(10**20), "run.seed: a whole number of 67 bits"),
        ("data.weights", [1.0], "1 weights for 2 stores"),
        ("data.weights", [1.0, 0.0], "data.weights[1]: expected `float` > 0.0"),
        ("run.track", ["tensorboard"], "no tracker is called 'tensorboard'"),
        ("run.max_time", "soon", "'soon' is not a time"),
    ],
)
def test_numbers_that_make_no_training(key: str, value: Any, what: str) -> None:
    table, _, name = key.partition(".")
    recipe: dict[str, Any] = {"data": {"train": ["a", "b"]}}
    recipe[table] = {**recipe.get(table, {}), name: value}
    with pytest.raises(UsageError) as caught:
        from_dict(recipe)
    assert what in caught.value.what and caught.value.hint


def test_several_stores_have_weights() -> None:
    config = from_dict({"data": {"train": ["a", "b"], "weights": [3.0, 1.0]}})
    assert config.data.stores == ("a", "b") and config.data.weights == (3.0, 1.0)
    assert from_dict({"data": {"train": "a"}}).data.stores == ("a",)


def as_saved(config: TrainConfig) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return value


def test_differences_are_of_what_decides_the_weights() -> None:
    config = from_dict({"run": {"track": ["wandb"], "steps": 7}, "optim": {"lr": 0.5}})
    before = as_saved(from_dict({}))
    assert differences(before, config) == {"optim.lr": "0.002 → 0.5", "run.steps": "1000 → 7"}
    assert not differences(as_saved(config), config)


def test_engines_are_told_what_they_alone_know() -> None:
    table = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    config = from_dict({"engine": {"deepspeed": table}, "run": {"engine": "deepspeed"}})
    assert config.engine.deepspeed == table
    # Another stage, or another engine, is the same training.
    assert not differences(as_saved(config), from_dict({"run": {"engine": "ddp"}}))
    for table, what in (
        ({"optimizer": {"type": "Adam"}}, "deepspeed.optimizer: the table [optim] decides this"),
        ({"gradient_clipping": 2.0}, "engine.deepspeed.gradient_clipping: optim.clip decides"),
        ({"zero_optimization": {"stage": 4}}, "it is 0, 1, 2 or 3"),
        ({"zero_optimization": 2}, "it is 0, 1, 2 or 3"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "a run records the norm"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}, "no float32 weights"),
    ):
        with pytest.raises(UsageError) as caught:
            from_dict({"engine": {"deepspeed": table}}, "r.toml")
        assert what in caught.value.what and caught.value.hint and caught.value.where == "r.toml"
    with pytest.raises(UsageError, match="'fp16' is not known"):
        from_dict({"run": {"precision": "fp16"}})
    with pytest.raises(UsageError, match="engine.deepsped: there is no such key"):
        from_dict({"engine": {"deepsped": {}}})


def test_the_lists_of_keys_hold_keys() -> None:
    keys = flatten(msgspec.to_builtins(from_dict({}))).keys()
    for kind in plugins.OPTIMIZERS:
        keys |= flatten(msgspec.to_builtins(from_dict({"optim": {"kind": kind}}))).keys()
    assert keys >= FREE and keys >= RATE and not FREE & RATE
    assert "run.start" not in FREE


def test_times() -> None:
    given = ("90", "90s", "1.5m", "2h", "")
    assert [*map(seconds, given)] == [90, 90, 90, 7200, float("inf")]
