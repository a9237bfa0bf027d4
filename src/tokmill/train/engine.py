"""How a step runs. The loop knows this protocol only; `Single` is one process on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from tokmill.errors import TokmillError, UsageError
from tokmill.feed.feed import Batch
from tokmill.tasks.task import Task, to_tensors
from tokmill.train.config import OptimConfig, RunConfig
from tokmill.train.optim import clip_gradients, make_optimizer
from tokmill.train.tensors import read_tensors, write_tensors

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


class Engine(Protocol):
    """One process of `world`; `rank` 0 writes."""

    rank: int
    world: int
    device: torch.device

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        """Put the task on the device and make its optimiser; called once."""
        ...

    def micro(self, batch: Batch, last: bool, scale: float) -> dict[str, Tensor]:
        """Run forward and backward of the summed loss × `scale`; return the task's sums.

        `last` is the micro-batch after which gradients are complete.
        """
        ...

    def step(self, lr: float) -> float:
        """Clip, update, zero; return the norm; one that is not finite changes nothing."""
        ...

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Run forward alone, without dropout; return the task's sums."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all processes."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimiser into a folder that is there."""
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, to the bit."""
        ...

    def finish(self) -> None:
        """Let go of processes and devices."""
        ...


class Single:
    """One process, on the CPU or on one CUDA device."""

    rank, world = 0, 1

    def __init__(self, config: RunConfig) -> None:
        self.device = pick_device(config.device)
        self.bf16 = config.precision == "bf16"

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        """Put the task on the device and make its optimiser."""
        self.task, self.clip = task.to(self.device), optim.clip
        self.names = [name for name, p in task.named_parameters() if p.requires_grad]
        self.parameters: list[nn.Parameter] = [p for p in task.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(task.param_groups(optim.weight_decay), optim)

    def micro(self, batch: Batch, last: bool, scale: float) -> dict[str, Tensor]:
        """Run forward and backward; PyTorch adds the gradients up."""
        self.task.train()
        with self._autocast():
            loss, sums = self.task(to_tensors(batch, self.device))
        (loss * scale).backward()
        return dict(sums)

    def step(self, lr: float) -> float:
        """Clip, update, zero; return the gradient's norm."""
        norm = clip_gradients(self.parameters, self.clip).item()
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Run forward alone."""
        self.task.eval()
        with torch.no_grad(), self._autocast():
            _, sums = self.task(to_tensors(batch, self.device))
        return dict(sums)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the numbers: there is one process."""
        return list(values)

    def save(self, folder: Path) -> None:
        """Write weights, and each parameter's moments by its name."""
        write_tensors(folder / MODEL, self.task.state_dict())
        name_of = dict(zip(map(id, self.parameters), self.names, strict=True))
        write_tensors(
            folder / OPTIMIZER,
            {
                f"{key}.{name_of[id(parameter)]}": value
                for parameter, state in self.optimizer.state.items()
                for key, value in state.items()
            },
        )

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        load_weights(self.task, folder / MODEL)
        moments = read_tensors(folder / OPTIMIZER)
        name_of = dict(zip(map(id, self.parameters), self.names, strict=True))
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        number_of = {name_of[id(parameter)]: i for i, parameter in enumerate(ordered)}
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            kind, _, name = key.partition(".")
            if name not in number_of:
                raise _unfit(folder / OPTIMIZER, name)
            state.setdefault(number_of[name], {})[kind] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


def make_engine(config: RunConfig) -> Engine:
    """Return the engine that a recipe asks for."""
    return Single(config)


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{name!r} is no device", where="run.device", hint="cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"{name!r} is not supported", where="run.device", hint="cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device", where="run.device", hint="--device cpu")
    return device


def load_weights(task: Task, path: Path) -> None:
    """Read weights into a task; names and shapes must be its own."""
    tensors, own = read_tensors(path), task.state_dict()
    for name in own.keys() | tensors.keys():
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            raise _unfit(path, name)
    task.load_state_dict(tensors)


def _unfit(path: Path, name: str) -> TokmillError:
    return TokmillError(
        f"the tensor {name!r} does not fit the model of the recipe",
        where=str(path),
        hint="the file belongs to another recipe",
    )
