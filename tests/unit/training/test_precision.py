"""Trainings in bf16, and what a device without it is told."""

import contextlib
from pathlib import Path

import pytest
import torch

import tokmill
from tokmill.base.errors import UsageError
from tokmill.training.engines.devices.device import Precision
from toy import cycles, make_store, recipe, weights

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(120))


def test_weights_stay_in_float32(store: Path, tmp_path: Path) -> None:
    exact = tokmill.train(recipe(store, 20), tmp_path / "fp32", quiet=True)
    value = recipe(store, 20, run={"precision": "bf16"})
    half = tokmill.train(value, tmp_path / "bf16", quiet=True)
    assert {tensor.dtype for tensor in weights(half.path).values()} == {torch.float32}
    assert half.metrics["loss"] == pytest.approx(exact.metrics["loss"], abs=2e-2)
    assert half.metrics["loss"] != exact.metrics["loss"]
    assert half.metrics["grad_norm"] == pytest.approx(exact.metrics["grad_norm"], rel=0.05)


def test_a_gpu_without_bf16_is_told_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no such GPU to test on.
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UsageError, match="bf16") as caught:
        Precision("bf16", torch.device("cuda"))
    assert "fp32" in caught.value.hint
    Precision("fp32", torch.device("cuda"))
