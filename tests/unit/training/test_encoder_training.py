"""An encoder is trained, resumed and embedded with like any other model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokmill
from embedded import vectors_of
from processes import together, values
from tokmill import plugins
from toy import cycles, losses, make_store, recipe, stop_after, weights
from toy_masked import PART, toy_masked

pytestmark = pytest.mark.usefixtures(toy_masked.__name__)
TASK = {"kind": "toy_masked", "length": 32}
STYLES: dict[str, dict[str, Any]] = {
    "bert": {"kind": "encoder", "context": 32},
    "pre-norm": {"kind": "encoder", "norm_place": "pre", "position": "rope", "bias": False},
    "rwkv7": {"kind": "rwkv7", "head_dim": 8},
}


def made(store: Path, style: str = "bert", steps: int = 12, **keys: Any) -> dict[str, Any]:
    """A recipe of a small model whose positions are predicted from both sides."""
    value = recipe(store, steps)
    sizes = {} if style == "rwkv7" else {"heads": 2}
    value["model"] = {"dim": 32, "layers": 2, **sizes, **STYLES[style], **keys}
    return value | {"task": TASK}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return make_store(tmp_path / "s", cycles(80))


@pytest.mark.parametrize("style", STYLES)
def test_hidden_tokens_are_learned(style: str, store: Path, tmp_path: Path) -> None:
    tokmill.train(made(store, style, steps=150), tmp_path / "run", quiet=True)
    curve = losses(tmp_path / "run")
    assert curve[1] > 2.9 and curve[150] < curve[1] - 0.5


def test_micro_batches_change_rounding_alone(store: Path, tmp_path: Path) -> None:
    """Rows of a micro-batch are as long as its longest, and so are the places of targets."""
    value = made(store)
    tokmill.train(value, tmp_path / "whole", quiet=True)
    value["run"] = {**value["run"], "micro_tokens": 48}
    tokmill.train(value, tmp_path / "parts", quiet=True)
    whole, parts = (losses(tmp_path / name) for name in ("whole", "parts"))
    assert [parts[step] for step in (1, 2, 5)] == pytest.approx([whole[s] for s in (1, 2, 5)], 1e-4)


def in_two(value: dict[str, Any], out: Path) -> None:
    plugins.TASKS["toy_masked"] = PART
    tokmill.train(value, out, quiet=True)


@pytest.mark.parametrize("style", ["bert", "pre-norm"])
def test_two_processes_learn_the_same(style: str, store: Path, tmp_path: Path) -> None:
    """Every weight gets a gradient."""
    value = made(store, style, steps=6)
    tokmill.train(value, tmp_path / "one", quiet=True)
    value["run"] = {**value["run"], "engine": "ddp", "micro_tokens": 64}
    values(together(2, in_two, value, tmp_path / "two"))
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    assert [*two.values()] == pytest.approx([*one.values()], abs=1e-4)
    found, expected = (weights(tmp_path / name) for name in ("two", "one"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-3, rtol=1e-3, msg=name)


def test_probabilities_are_dropped_in_several_processes(store: Path, tmp_path: Path) -> None:
    """The same each time, and others than without dropout."""
    value = made(store, steps=6, attention_dropout=0.3)
    value["run"] = {**value["run"], "engine": "ddp"}
    for name in ("a", "b"):
        values(together(2, in_two, value, tmp_path / name))
    value["model"] = {**value["model"], "attention_dropout": 0.0}
    values(together(2, in_two, value, tmp_path / "without"))
    once, twice, without = (weights(tmp_path / name) for name in ("a", "b", "without"))
    assert all(torch.equal(once[name], twice[name]) for name in once)
    assert not torch.equal(once["model.positions.weight"], without["model.positions.weight"])


@pytest.mark.parametrize("style", ["bert", "pre-norm"])
@pytest.mark.parametrize("key", ["dropout", "attention_dropout"])
def test_a_resumed_run_is_equal_to_the_bit(
    key: str, style: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = made(store, style, **{key: 0.1})
    tokmill.train(value, tmp_path / "once", quiet=True)
    with monkeypatch.context() as patched:
        stop_after(7, patched)
        with pytest.raises(tokmill.TokmillError):
            tokmill.train(value, tmp_path / "twice", quiet=True)
    tokmill.train(value, tmp_path / "twice", resume=True, quiet=True)
    once, twice = (weights(tmp_path / name) for name in ("once", "twice"))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)


@pytest.mark.parametrize("style", STYLES)
def test_records_have_vectors_of_their_own(style: str, store: Path, tmp_path: Path) -> None:
    """Whatever stands beside them in a batch, and with dropout while they were learned."""
    dropped = {} if style == "rwkv7" else {"attention_dropout": 0.1}
    tokmill.train(made(store, style, **dropped), tmp_path / "run", quiet=True)
    alone, together = (
        vectors_of(tmp_path / "run", store, batch_tokens=tokens) for tokens in (1, 16_384)
    )
    np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-5)
