"""The example of a loop of one's own: its parts, and that it learns and resumes."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import own_loop
from own_loop import LanguageModel, load_checkpoint, sample_batch, save_checkpoint, train
from tokmill.base.errors import TokmillError
from tokmill.models.model import Inputs
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.tasks.next_token import NextToken, NextTokenConfig

CONFIG = DecoderConfig(dim=16, layers=2, heads=2)


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_the_cross_entropy_of_the_logits(tied: bool) -> None:
    torch.manual_seed(0)
    model, ids = LanguageModel(CONFIG, 20, tied), torch.randint(20, (3, 9))
    targets = torch.randint(20, (3, 9))
    targets[1, 4] = -1
    assert model(ids).shape == (3, 9, 20)
    loss = model.loss(ids, targets)
    expected = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(loss, expected)
    weights = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_a_run(tied: bool) -> None:
    torch.manual_seed(0)
    inputs = Inputs({"token": 20})
    task = NextToken(NextTokenConfig(tied=tied), Decoder(CONFIG, inputs), inputs)
    model = LanguageModel(CONFIG, 20, tied)
    model.load_state_dict(task.state_dict())
    ids = torch.randint(20, (2, 5))
    torch.testing.assert_close(model(ids), task.logits(model.hidden(ids)))


def test_windows_begin_anywhere_and_targets_are_one_ahead() -> None:
    array = np.arange(100, 120, dtype=np.uint16)
    x, y = sample_batch(array, 2000, 7, generator=torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (2000, 7) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x + 1, y) and torch.equal(x[:, 1:], y[:, :-1])
    begins, counts = np.unique(x[:, 0], return_counts=True)
    # 13 places, each taken 154 times on average; 4 standard deviations are 48.
    assert begins.tolist() == list(range(100, 113)) and abs(counts - 2000 / 13).max() < 48


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("place", ["path", "name", "file"])
def test_checkpoints_go_to_paths_and_open_files(place: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    model, optimizer = trained()
    if place == "file":
        with path.open("wb") as handle:
            save_checkpoint(model, optimizer, 5, handle)
    else:
        save_checkpoint(model, optimizer, 5, path if place == "path" else str(path))
    stored = load_file(path)
    kept = {f"optimizer.{i}.{key}" for i in (0, 1) for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(stored) == {"model.weight", "model.bias", *kept}
    other = nn.Linear(3, 2)
    its = torch.optim.AdamW(other.parameters(), 0.1)
    if place == "file":
        with path.open("rb") as handle:
            assert load_checkpoint(handle, other, its) == 5
    else:
        assert load_checkpoint(str(path), other, its) == 5
    assert torch.equal(other.weight, model.weight)
    assert [float(its.state[p]["step"]) for p in other.parameters()] == [1, 1]


@pytest.mark.parametrize("data", [b"", b"\x10\0\0\0\0\0\0\0{}"])
def test_a_damaged_checkpoint_is_refused(data: bytes) -> None:
    model, optimizer = trained()
    with pytest.raises(TokmillError, match="damaged"):
        load_checkpoint(io.BytesIO(data), model, optimizer)


def test_a_loop_that_was_stopped_ends_with_the_same_weights(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(b"".join(b"%d squared is %d.\n" % (n, n * n) for n in range(2000)))
    once, twice = tmp_path / "once.safetensors", tmp_path / "twice.safetensors"
    whole = train(corpus, once, steps=40)
    assert whole[-1] < 3.5 < whole[0]
    parts = train(corpus, twice, steps=40, stop=15) + train(corpus, twice, steps=40)
    assert parts == whole
    found, expected = load_file(twice), load_file(once)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_example_runs_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(bytes(range(97, 123)) * 50)
    command = [sys.executable, own_loop.__file__, "corpus.txt", "toy.safetensors", "3"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "nats a byte" in done.stdout
