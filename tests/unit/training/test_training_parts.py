"""The parts of training alone: windows, and checkpoints at a path or in an open file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tokmill.errors import TokmillError, UsageError
from tokmill.training.parts import load_checkpoint, sample_batch, save_checkpoint


def test_windows_begin_anywhere_and_targets_are_one_ahead() -> None:
    array = np.arange(100, 120, dtype=np.uint16)
    x, y = sample_batch(array, 2000, 7, generator=torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (2000, 7) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x + 1, y) and torch.equal(x[:, 1:], y[:, :-1])
    begins, counts = np.unique(x[:, 0], return_counts=True)
    # 13 places, each taken 154 times on average; 4 standard deviations are 48.
    assert begins.tolist() == list(range(100, 113)) and abs(counts - 2000 / 13).max() < 48


def test_windows_of_a_mapped_file(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint32).tofile(tmp_path / "ids.bin")
    mapped = np.memmap(tmp_path / "ids.bin", np.uint32, "r")
    x, y = sample_batch(mapped, 1, 8)
    assert x.tolist() == [list(range(8))] and y.tolist() == [list(range(1, 9))]
    with pytest.raises(UsageError, match="no window of 9 ids"):
        sample_batch(mapped, 1, 9)


def test_equal_seeds_draw_equal_windows() -> None:
    array = np.arange(1000)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(sample_batch(array, 4, 5)[0])
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], sample_batch(array, 4, 5)[0])


class Plain(torch.optim.Optimizer):
    """An optimiser of one's own, with a number in its state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["t"] = state.get("t", 0) + 1
                state["sum"] = state.get("sum", 0) + parameter.grad
                parameter.data -= group["lr"] / state["t"] * state["sum"]


def trained() -> tuple[nn.Module, Plain]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Plain(model.parameters(), 0.5)
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
    assert set(stored) == {"model.weight", "model.bias", "optimizer.0.sum", "optimizer.1.sum"}
    assert torch.equal(stored["model.weight"], model.weight)
    other = nn.Linear(3, 2)
    its = Plain(other.parameters(), 0.1)
    if place == "file":
        with path.open("rb") as handle:
            assert load_checkpoint(handle, other, its) == 5
    else:
        assert load_checkpoint(str(path), other, its) == 5
    assert torch.equal(other.weight, model.weight)
    assert its.param_groups[0]["lr"] == 0.5
    assert [its.state[p]["t"] for p in other.parameters()] == [1, 1]


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = tmp_path / "a.safetensors"
    save_checkpoint(model, optimizer, 5, path)
    wide = nn.Linear(4, 2)
    with pytest.raises(TokmillError, match="does not fit") as caught:
        load_checkpoint(path, wide, Plain(wide.parameters(), 0.1))
    assert caught.value.where == str(path)
    less = nn.Linear(3, 2)
    with pytest.raises(TokmillError, match="does not fit"):
        load_checkpoint(path, less, Plain([less.weight], 0.1))


@pytest.mark.parametrize("data", [b"", b"\x10\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_damaged_checkpoint_is_refused(data: bytes) -> None:
    model, optimizer = trained()
    with pytest.raises(TokmillError):
        load_checkpoint(io.BytesIO(data), model, optimizer)


@pytest.mark.parametrize(
    "said", [{}, {"step": "[" * 9999}, {"step": '"x"'}, {"groups": "{}"}, {"state": '{"x": 1}'}]
)
def test_a_checkpoint_that_says_something_else(said: dict[str, str], tmp_path: Path) -> None:
    """Whole, but without a digest, and what it says is no state of an optimiser."""
    model, optimizer = trained()
    path = tmp_path / "a.safetensors"
    save_checkpoint(model, optimizer, 3, path)
    kept = {"step": "3", "groups": "[]", "state": "{}", **said}
    save_file(load_file(path), path, metadata=kept if said else None)
    with pytest.raises(TokmillError, match="does not fit"):
        load_checkpoint(path, model, optimizer)
