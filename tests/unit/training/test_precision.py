"""The loss scale by its rule, and trainings in fp16 and bf16."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
from tokmill.base.errors import Interrupted, TokmillError, UsageError
from tokmill.tasks.next_token import NextToken
from tokmill.training.engines.devices.precision import (
    FIRST_SCALE,
    RAISE_AFTER,
    LossScale,
    Precision,
)
from toy import cycles, losses, make_store, recipe, stop_after, weights

torch.set_num_threads(1)

CPU = torch.device("cpu")
FP16 = {"precision": "fp16", "peak_flops": 1e12}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(120))


def test_the_scale_rises_after_many_good_steps_and_falls_at_each_bad_one() -> None:
    scale = LossScale()
    assert scale.value == FIRST_SCALE == 65536
    for _ in range(RAISE_AFTER - 1):
        scale.update(True)
    scale.update(False)
    assert (scale.value, scale.skipped) == (FIRST_SCALE / 2, 1)
    for _ in range(RAISE_AFTER):
        scale.update(True)
    assert (scale.value, scale.good, scale.skipped) == (FIRST_SCALE, 0, 1)
    for _ in range(16):
        scale.update(False)
    assert scale.value == 1.0
    with pytest.raises(TokmillError, match="overflow fp16 even if the loss is not scaled"):
        scale.update(False)


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_weights_stay_in_float32(name: str, tolerance: float, store: Path, tmp_path: Path) -> None:
    run = {"peak_flops": 1e12}
    exact = tokmill.train(recipe(store, 20, run=run), tmp_path / "fp32", quiet=True)
    run["precision"] = name
    half = tokmill.train(recipe(store, 20, run=run), tmp_path / name, quiet=True)
    assert {tensor.dtype for tensor in weights(half.path).values()} == {torch.float32}
    assert half.metrics["loss"] == pytest.approx(exact.metrics["loss"], abs=tolerance)
    assert half.metrics["loss"] != exact.metrics["loss"]
    assert half.metrics["grad_norm"] == pytest.approx(exact.metrics["grad_norm"], rel=0.05)
    assert half.metrics.get("skipped_steps") == (0 if name == "fp16" else None)


def overflowing(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Make gradients so many times larger, but not the loss that is reported."""
    forward = NextToken.forward

    def large(self: NextToken, batch: Any) -> Any:
        loss, sums = forward(self, batch)
        return loss * factor, sums

    monkeypatch.setattr(NextToken, "forward", large)


def test_an_overflow_skips_the_step_and_halves_the_scale(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, 2.0**14)
    value = recipe(store, 20, run={**FP16, "checkpoint_every": 1, "keep": 99, "micro_tokens": 48})
    run = tokmill.train(value, tmp_path / "run", quiet=True)
    skipped = losses(run.path, "skipped_steps")
    first = next(step for step in skipped if skipped[step] < step)
    # Overflows come first, one after the other, until the scale fits.
    assert first > 1 and skipped[20] >= first - 1
    assert all(losses(run.path, "grad_norm")[step] is None for step in range(1, first))
    assert losses(run.path)[20] < losses(run.path)[1]
    places = [f"checkpoints/step-{step:08d}" for step in (1, first - 1, first)]
    before, still, after = (weights(run.path, place) for place in places)
    assert all(torch.equal(before[name], still[name]) for name in before)
    assert not all(torch.equal(before[name], after[name]) for name in before)
    scale = json.loads((run.path / places[2] / "scale.json").read_text())
    assert scale == {"value": FIRST_SCALE / 2 ** (first - 1), "good": 1, "skipped": first - 1}


def test_a_resume_in_fp16_is_exact(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, 2.0**14)
    value = recipe(store, 12, run=FP16, model={"dropout": 0.1})
    whole = tokmill.train(value, tmp_path / "whole", quiet=True)
    # Between two overflows, so that the scale has to be that of the checkpoint.
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(Interrupted):
            tokmill.train(value, tmp_path / "parts", quiet=True)
    parts = tokmill.train(None, tmp_path / "parts", resume=True, quiet=True)
    for name in ("model.safetensors", "optimizer.safetensors", "scale.json"):
        left, right = (run.path / "checkpoints/step-00000012" / name for run in (whole, parts))
        assert left.read_bytes() == right.read_bytes(), name
    for name in ("loss", "skipped_steps"):
        assert losses(whole.path, name) == losses(parts.path, name)
    assert losses(whole.path, "skipped_steps")[12] > 2


def test_a_gradient_that_no_scale_saves_is_an_error(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, 1e30)
    with pytest.raises(TokmillError, match="overflow fp16") as caught:
        tokmill.train(recipe(store, 30, run=FP16), tmp_path / "run", quiet=True)
    assert "bf16" in caught.value.hint


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_loss_that_is_no_number_is_refused_in_every_precision(
    precision: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = NextToken.forward

    def poisoned(self: NextToken, batch: Any) -> Any:
        loss, sums = forward(self, batch)
        return loss * math.nan, {name: value * math.nan for name, value in sums.items()}

    monkeypatch.setattr(NextToken, "forward", poisoned)
    run = {**FP16, "precision": precision}
    with pytest.raises(TokmillError, match="the loss is not finite"):
        tokmill.train(recipe(store, 3, run=run), tmp_path / "run", quiet=True)


def test_a_gpu_without_bf16_is_told_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no such GPU to test on.
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UsageError, match="bf16") as caught:
        Precision("bf16", torch.device("cuda"))
    assert "fp16" in caught.value.hint
    for name in ("fp16", "fp32"):
        Precision(name, torch.device("cuda"))


def test_scaling_and_unscaling_round_nothing() -> None:
    precision = Precision("fp16", CPU)
    gradients = [torch.randn(9), torch.randn(3, 3)]
    scaled = [gradient * precision.factor for gradient in gradients]
    precision.unscale(scaled)
    assert all(torch.equal(left, right) for left, right in zip(gradients, scaled, strict=True))
    assert Precision("bf16", CPU).factor == 1.0
