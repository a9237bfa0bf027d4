"""Whether a training fits: told by arithmetic, refused beyond the machine, absurd sizes by key."""

import time
from pathlib import Path
from typing import Any

import pytest

import tokmill
from tokmill import plugins
from tokmill.base.errors import MachineError, UsageError
from tokmill.models.model import Inputs
from tokmill.training.budget import memory as memory_budget
from tokmill.training.budget.memory import (
    check_memory,
    estimate,
    parameter_count,
    rough_bytes,
    step_bytes,
    tensor_bytes,
)
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import make_task
from toy import SIZE, recipe

SIZES = {"token": SIZE, "other": 301}
STYLES: list[dict[str, Any]] = [
    {"kind": "decoder", "heads": 4},
    {"kind": "decoder", "heads": 4, "kv_heads": 2, "bias": True, "join": "concat"},
    {"kind": "decoder", "heads": 4, "norm": "layer", "position": "learned", "context": 16},
    {"kind": "encoder", "heads": 4, "context": 16},
    {"kind": "rwkv7", "head_dim": 8},
    {"kind": "bag", "buckets": 64},
    {"kind": "set_transformer"},
]


def task_for(style: dict[str, Any]) -> dict[str, Any]:
    """Return what is learned with a model: not the next token, where it looks ahead."""
    if style["kind"] == "set_transformer":
        return {"kind": "signature", "length": 16}
    if style["kind"] in ("encoder", "bag"):
        return {"kind": "masked", "length": 16}
    return {"kind": "next_token", "length": 16, "tied": False}


def inputs_for(style: dict[str, Any]) -> Inputs:
    """Return what a model reads: ids, but sets of vectors with weights."""
    sets = style["kind"] == "set_transformer"
    roles = dict.fromkeys(SIZES, {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4})
    return Inputs(vectors={"vector": 8}) if sets else Inputs(SIZES, roles)


def test_every_kind_of_model_is_here() -> None:
    assert {style["kind"] for style in STYLES} == {*plugins.MODELS} - {"policy"}


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_the_number_of_weights_is_that_of_the_model(style: dict[str, Any], layers: int) -> None:
    config = from_dict({"model": {"dim": 32, "layers": layers, **style}, "task": task_for(style)})
    inputs = inputs_for(style)
    assert parameter_count(config, inputs) == make_task(config, inputs).parameter_count()


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_bytes_of_deep_models(style: dict[str, Any], recompute: bool) -> None:
    config = from_dict(
        {
            "model": {"dim": 32, "layers": 8, **style},
            "task": task_for(style),
            "run": {"recompute": recompute},
        }
    )
    inputs = inputs_for(style)
    exact = tensor_bytes(config, inputs, 8, 2)
    assert step_bytes(config, inputs, 8, 2) == pytest.approx(exact, rel=0.1)
    assert rough_bytes(config, inputs, 8) > exact


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.layers", 10**12),
        ("model.dim", 10**12),
        ("model.hidden", 10**15),
        ("model.heads", 10**9),
        ("task.length", 10**12),
        ("data.batch", 10**12),
        ("data.batch_tokens", 10**18),
        ("run.micro_tokens", 10**15),
        ("run.prefetch", 10**9),
        ("run.steps", 10**18),
    ],
)
def test_absurd_sizes_are_refused_by_their_key(key: str, value: int, store: Path) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(UsageError, match=rf"{key}: .*{value}") as found:
        from_dict(recipe(store, 5, **{section: {name: value}}))
    assert found.value.hint


@pytest.mark.long
def test_the_largest_that_may_be_said_is_estimated(store: Path) -> None:
    begun = time.process_time()
    sizes = {"dim": 1 << 18, "layers": 1_000, "heads": 1 << 10, "hidden": 1 << 22}
    found = estimate(from_dict(recipe(store, 5, model=sizes, task={"length": 64})))
    assert found["parameters"] > 10**14 and "and the machine has" in found["memory_warning"]
    assert time.process_time() - begun < 300  # not for ever


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 2 GB."""
    monkeypatch.setattr(memory_budget, "machine_memory", lambda: (2 * 10**9, 10**9))


@pytest.mark.usefixtures("small")
def test_what_does_not_fit_is_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = recipe(store, 1, model={"dim": 512, "layers": 40, "heads": 8})
    with pytest.raises(MachineError, match="the machine has 2.0 GB") as found:
        tokmill.train(value, tmp_path / "run", quiet=True)
    assert "--over-memory" in found.value.hint and not (tmp_path / "run").exists()
    config = from_dict({**value, "run": {**value["run"], "over_memory": True}})
    capsys.readouterr()
    check_memory(config, Inputs({"token": SIZE}), 8, 1, 1)
    assert capsys.readouterr().err.startswith("warning: the training takes about")


@pytest.mark.usefixtures("small")
def test_much_is_warned_of_and_little_is_not(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for layers in (4, 24, 32):
        config = from_dict(recipe(store, 1, model={"dim": 512, "layers": layers, "heads": 8}))
        needed = estimate(config)["memory_bytes"]
        try:
            check_memory(config, Inputs({"token": SIZE}), 8, 1, 1)
        except MachineError:
            assert needed > 2e9
        said.append((needed, capsys.readouterr().err))
    for needed, text in said:
        assert ("warning" in text) == (1.6e9 < needed < 2e9)
    # Processes of one machine share its memory.
    config = from_dict(recipe(store, 1, model={"dim": 512, "layers": 4, "heads": 8}))
    with pytest.raises(MachineError):
        check_memory(config, Inputs({"token": SIZE}), 8, 4, 4)
