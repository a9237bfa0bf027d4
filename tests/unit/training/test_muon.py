"""Muon: its directions, its steps beside torch's, the weights that it moves, runs and resumes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tokmill
import toy
from tokmill.base.errors import Interrupted, TokmillError, UsageError
from tokmill.models.model import Inputs, blocks_of
from tokmill.training.budget.memory import tensor_bytes
from tokmill.training.engines.optimisers.muon import (
    BUFFER,
    COEFFICIENTS,
    MATRICES,
    ROUNDS,
    Muon,
    MuonConfig,
    orthogonal,
)
from tokmill.training.engines.optimisers.optim import make_optimizer
from tokmill.training.engines.tensors import read_tensors
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import make_task
from toy import cycles, losses, make_store, stop_after

torch.set_num_threads(1)
MUON = {"kind": "muon", "lr": 1e-2, "warmup": 2}
LAST = "checkpoints/step-00000008"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(120))


def recipe(store: Path, steps: int = 8, **sections: Any) -> dict[str, Any]:
    optim = {**MUON, **sections.pop("optim", {})}
    return toy.recipe(store, steps, optim=optim, **sections)


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4), (1, 6)])
def test_all_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    """As the polynomial says, which is applied to each of them; their vectors stay."""
    given = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    a, b, c = COEFFICIENTS
    for one, found in zip(given.double().numpy(), orthogonal(given, torch.float32), strict=True):
        left, singular, right = np.linalg.svd(one, full_matrices=False)
        singular /= np.linalg.norm(singular)
        for _ in range(ROUNDS):
            singular = a * singular + b * singular**3 + c * singular**5
        assert (left * singular) @ right == pytest.approx(found.numpy(), abs=1e-4)
        assert singular.max() < 1.25
    assert orthogonal(torch.zeros(1, 3, 4)).isfinite().all()


class Small(nn.Module):
    """An embedding, two blocks, and a head that is a linear map too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 5)

    def draw(self, step: int) -> None:
        """Give every weight a gradient."""
        random = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random)


def groups(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(module.parameters()), "weight_decay": 0.1, "lr_scale": 1.0}]


def test_it_steps_as_torch_does() -> None:
    """Matrices in blocks as torch.optim.Muon, all else as torch.optim.AdamW, to the bit there."""
    ours, peer = Small(), Small()
    config = MuonConfig(lr=0.02)
    optimizer = make_optimizer(groups(ours), config, blocks_of(ours))
    matrices = [p for n, p in peer.named_parameters() if n.startswith("blocks") and p.ndim == 2]
    others = [p for p in peer.parameters() if all(p is not one for one in matrices)]
    first = [one.detach().clone() for one in matrices]
    peers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, 0.02, config.betas, config.eps, 0.1, fused=True),
    ]
    for step in range(4):
        ours.draw(step)
        peer.draw(step)
        for one in (optimizer, *peers):
            one.step()
    kept = dict(ours.named_parameters())
    for name, weight in peer.named_parameters():
        if all(weight is not one for one in matrices):
            assert torch.equal(kept[name], weight), name
    moved = [kept[n] for n, p in peer.named_parameters() if any(p is one for one in matrices)]
    assert len(moved) == 4
    for mine, theirs, before in zip(moved, matrices, first, strict=True):
        # torch multiplies in bfloat16, which has 8 bits.
        scale = (theirs - before).abs().max().item()
        torch.testing.assert_close(mine, theirs, atol=0.03 * scale, rtol=0)
        assert not torch.equal(mine, before)


def test_the_rate_of_matrices_is_its_own() -> None:
    for rate in (1.0, 0.25):
        small = Small()
        before = {name: weight.detach().clone() for name, weight in small.named_parameters()}
        made = make_optimizer(groups(small), MuonConfig(matrix_rate=rate), blocks_of(small))
        small.draw(0)
        for group in made.param_groups:
            group["lr"], group["weight_decay"] = 0.1 * group["lr_scale"], 0.0
        made.step()
        # As far as AdamW moves: about .2 of the rate in the root mean square.
        moved = (small.blocks[0][0].weight - before["blocks.0.0.weight"]).square().mean().sqrt()
        assert moved.item() == pytest.approx(0.1 * 0.2 * rate, rel=0.25)
        assert (small.head.weight - before["head.weight"]).abs().max().item() == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["decoder", "rwkv7"])
def test_it_moves_the_matrices_of_blocks_alone(kind: str) -> None:
    model = {"kind": kind, "dim": 16, "layers": 2}
    model |= {"heads": 2} if kind == "decoder" else {"head_dim": 8}
    task = make_task(from_dict({"model": model}), Inputs({"token": toy.SIZE}))
    made = make_optimizer(task.param_groups(0.1), MuonConfig(), blocks_of(task))
    names = {id(weight): name for name, weight in task.named_parameters()}
    chosen = {
        names[id(weight)]: group
        for group in made.param_groups
        for weight in group["params"]
        if group[MATRICES]
    }
    assert len(chosen) == 2 * (7 if kind == "decoder" else 6)
    assert all(".blocks." in name and name.endswith(".weight") for name in chosen)
    assert all(group["weight_decay"] == 0.1 for group in chosen.values())
    every = [weight for group in made.param_groups for weight in group["params"]]
    assert {id(weight) for weight in every} == {id(p) for p in task.parameters() if p.requires_grad}


def test_numbers_and_models_that_make_no_training(store: Path, tmp_path: Path) -> None:
    for key, value in (("momentum", 1.0), ("momentum", -0.1), ("matrix_rate", 0.0)):
        with pytest.raises(UsageError, match=f"optim.{key}"):
            from_dict({"optim": {"kind": "muon", key: value}})
    with pytest.raises(UsageError, match="momentum"):
        from_dict({"optim": {"momentum": 0.9}})
    with pytest.raises(UsageError, match="no optimiser is called 'muun'") as caught:
        from_dict({"optim": {"kind": "muun"}})
    assert "muon" in caught.value.hint
    with pytest.raises(UsageError, match="Muon updates matrices inside blocks"):
        Muon(groups(nn.Linear(2, 2)), MuonConfig())
    deepspeed = {"run": {"engine": "deepspeed"}, "optim": {"kind": "muon"}}
    with pytest.raises(UsageError, match="stage 2") as caught:
        from_dict(deepspeed)
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
    assert {key.partition(".")[0] for key in kept} == {BUFFER, "step", "exp_avg", "exp_avg_sq"}
    assert all(value.dtype == torch.float32 for value in kept.values())
    for name, tensor in kept.items():
        assert name.startswith(BUFFER) == (".blocks." in name and tensor.ndim == 2)
    with pytest.raises(TokmillError, match="optim.kind: 'muon' → 'adamw'"):
        tokmill.train(toy.recipe(store, 9), tmp_path / "parts", quiet=True)


def test_it_holds_one_moment_of_a_matrix(store: Path) -> None:
    found = []
    for kind in ("adamw", "muon"):
        config = from_dict(toy.recipe(store, optim={"kind": kind}))
        found.append(tensor_bytes(config, Inputs({"token": toy.SIZE}), 2, 1))
    task = make_task(config, Inputs({"token": toy.SIZE}))
    matrices = sum(w.numel() for n, w in task.named_parameters() if ".blocks." in n and w.ndim == 2)
    assert found[0] - found[1] == 4 * matrices
