"""BertAdam: its steps and rates beside a written-out reference, its groups, runs and resumes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tokmill
import toy
from document_formulas import bert_rate
from tokmill.base.errors import Interrupted, UsageError
from tokmill.training.engines.optimisers.bert_adam import BertAdam, BertAdamConfig
from tokmill.training.engines.optimisers.optim import (
    clip_gradients,
    clipped_together,
    learning_rate,
)
from tokmill.training.engines.tensors import read_tensors
from tokmill.training.recipe.read_recipe import in_tables
from tokmill.training.recipe.resolve import from_dict
from toy import cycles, losses, make_store, stop_after

torch.set_num_threads(1)
LAST = "checkpoints/step-00000008"
STEPS = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(120))


def recipe(store: Path, steps: int = 8, **sections: Any) -> dict[str, Any]:
    optim = {"kind": "bert_adam", "lr": 1e-2, "warmup": 2, **sections.pop("optim", {})}
    return toy.recipe(store, steps, optim=optim, **sections)


class Small(nn.Module):
    """A matrix, a norm and biases, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()

    def draw(self, step: int) -> dict[str, Any]:
        """Give every weight a gradient, small ones and large ones; return them."""
        random = np.random.default_rng(step)
        drawn = {}
        for number, (name, weight) in enumerate(self.named_parameters()):
            drawn[name] = random.normal(0, 10.0 ** (number - 2), weight.shape)
            weight.grad = torch.tensor(drawn[name])
        return drawn


def groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in module.parameters() if p.ndim == 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": decay, "lr_scale": 1.0},
        {"params": others, "weight_decay": 0.0, "lr_scale": 1.0},
    ]


def rate_of(config: BertAdamConfig, step: int) -> float:
    """Return the rate as the formulas say, written out once more."""
    if config.exact_original:
        share = config.warmup / STEPS if config.warmup else config.warmup_share
        if config.schedule == "constant" and step / STEPS >= share:
            return config.lr
        return bert_rate(config.lr, step, STEPS, share)
    rise = config.warmup or round(config.warmup_share * STEPS)
    if step < rise:
        return config.lr * (step + 1) / rise
    return config.lr * (1 - (step - rise) / (STEPS - 1 - rise))


@pytest.mark.parametrize(
    "config",
    [
        BertAdamConfig(lr=0.01),
        BertAdamConfig(lr=0.01, warmup=7, clip=0.3),
        BertAdamConfig(lr=0.01, clip=0.0, weight_decay=0.2),
        BertAdamConfig(lr=0.01, exact_original=True),
        BertAdamConfig(lr=0.01, exact_original=True, warmup=5, schedule="constant"),
    ],
)
def test_it_steps_as_written_out(config: BertAdamConfig) -> None:
    """Twenty steps in float64, with clipping as the engines do it."""
    ours = Small()
    optimizer = BertAdam(groups(ours, config.weight_decay), config)
    weights = {n: p.detach().numpy().copy() for n, p in ours.named_parameters()}
    m = {n: np.zeros_like(w) for n, w in weights.items()}
    v = {n: np.zeros_like(w) for n, w in weights.items()}
    for step in range(STEPS):
        gradients = ours.draw(step)
        for some in clipped_together(optimizer, list(ours.parameters())):
            clip_gradients(some, config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, STEPS) * group["lr_scale"]
        optimizer.step()
        for name, w in weights.items():
            g = gradients[name]
            if config.clip:
                g = g * min(1.0, config.clip / (np.linalg.norm(g) + 1e-6))
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            update = m[name] / (np.sqrt(v[name]) + 1e-6)
            if w.ndim == 2 or config.exact_original:
                update = update + config.weight_decay * w
            weights[name] = w - rate_of(config, step) * update
    for name, weight in ours.named_parameters():
        assert np.allclose(weight.detach().numpy(), weights[name], rtol=1e-12, atol=1e-14), name


def test_keys_and_what_is_refused() -> None:
    given = {"optimizer": "bert_adam", "warmup_share": 0.2}
    config = from_dict(in_tables(given, {"optim": {"kind": "bert_adam"}})).optim
    assert (config.warmup_share, config.eps, config.weight_decay) == (0.2, 1e-6, 0.01)
    for optim, said in (
        ({"warmup_share": 1.0}, "optim.warmup_share"),
        ({"exact_original": True, "schedule": "cosine"}, "does not train with 'cosine'"),
        ({"exact_original": True, "floor": 0.1}, "has no floor"),
    ):
        with pytest.raises(UsageError, match=said):
            from_dict({"optim": {"kind": "bert_adam", **optim}})
    with pytest.raises(UsageError, match="stage 2") as caught:
        from_dict({"run": {"engine": "deepspeed"}, "optim": {"kind": "bert_adam"}})
    assert "--engine ddp" in caught.value.hint


def test_it_learns_and_goes_on_to_the_bit(store: Path, tmp_path: Path) -> None:
    value = recipe(store)
    tokmill.train(value, tmp_path / "whole", quiet=True)
    found = losses(tmp_path / "whole")
    assert found[8] < found[1] - 0.3
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(5, patch)
        tokmill.train(value, tmp_path / "parts", quiet=True)
    tokmill.train(None, tmp_path / "parts", quiet=True)
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [tmp_path / run / LAST / name for run in ("whole", "parts")]
        assert files[0].read_bytes() == files[1].read_bytes()
    kept = read_tensors(tmp_path / "whole" / LAST / "optimizer.safetensors")
    assert {key.partition(".")[0] for key in kept} == {"exp_avg", "exp_avg_sq"}
