"""Files of weights and moments: whole tensors by name in float32, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.tasks.task import Task
from tokmill.training.engines.tensors import read_tensors

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def shapes_of(task: Task) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in task.state_dict().items()}


def load_weights(task: Task, path: Path, seal: str = "") -> None:
    """Read weights into a task; names and shapes must be equal. `seal`: as in `read_tensors`."""
    task.load_state_dict(read_weights(path, shapes_of(task), seal))


def read_weights(path: Path, shapes: Mapping[str, torch.Size], seal: str = "") -> dict[str, Tensor]:
    tensors = read_tensors(path, seal)
    for name in shapes.keys() | tensors.keys():
        if name not in shapes or name not in tensors or shapes[name] != tensors[name].shape:
            raise unfit(path, name)
    return tensors


def unfit(path: Path, name: str) -> TokmillError:
    return TokmillError(
        f"the tensor {name!r} does not fit the model of the recipe",
        where=str(path),
        hint="the file belongs to another recipe, or another version of tokmill made it",
    )
