"""An encoder is trained, resumed and embedded with like any other model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
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
    tokmill.train(value, tmp_path / "twice", quiet=True)
    once, twice = (weights(tmp_path / name) for name in ("once", "twice"))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)
