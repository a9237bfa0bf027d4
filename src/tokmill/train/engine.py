"""How a step runs. The loop knows this protocol only; `Single` is one process on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from tokmill.errors import TokmillError, UsageError
from tokmill.models.model import Tensors
from tokmill.tasks.task import Task
from tokmill.train.allocator import keep_freed_memory
from tokmill.train.compiling import any_number_of_documents, compile_errors, compile_task
from tokmill.train.config import OptimConfig, RunConfig
from tokmill.train.launch import Place, one_a_machine, place
from tokmill.train.optim import clip_gradients, make_optimizer
from tokmill.train.precision import Precision
from tokmill.train.tensors import read_tensors, write_tensors

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


class Engine(Protocol):
    """One process of `world`; `rank` 0 writes and talks. A `with` block ends all of them together.

    Every process calls every method of this, in the same order. Batches are prepared, and lie in
    the memory of the CPU.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def skipped(self) -> int:
        """Steps in all whose update was left out, as their gradient overflowed fp16."""
        ...

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        """Put the task on the device and make its optimiser; called once."""
        ...

    def micro(self, batch: Tensors, last: bool, scale: float) -> dict[str, Tensor]:
        """Run forward and backward of the summed loss × `scale`; return the task's sums.

        `last` is the micro-batch after which gradients are complete.
        """
        ...

    def step(self, lr: float) -> float:
        """Clip, update, zero; return the norm; one that is not finite changes nothing.

        In fp16 such a step counts as skipped, and the next ones scale the loss less.
        """
        ...

    def evaluate(self, batch: Tensors) -> dict[str, Tensor]:
        """Run forward alone, without dropout; return the task's sums."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all processes."""
        ...

    def meet(self) -> None:
        """Wait until every process is here."""
        ...

    def lead(self, context: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Enter a context on rank 0 alone; the others wait until it is entered."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimiser into a folder that is there; every engine the same files."""
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, to the bit."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Single:
    """One process, on the CPU or on one CUDA device."""

    rank, world = 0, 1
    task: Task
    learner: nn.Module
    """The task, or what an engine wraps around it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = pick_device(config.device, place())
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.precision = Precision(config.precision, self.device)

    @property
    def skipped(self) -> int:
        """Steps in all whose update was left out."""
        return self.precision.scale.skipped if self.precision.scale else 0

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        """Put the task on the device and make its optimiser."""
        if self.device.type == "cpu":
            keep_freed_memory()
        self.task, self.clip = task.to(self.device), optim.clip
        task.model.recompute = self.config.recompute
        if self.config.compile:
            compile_task(task, self.device)
        self.learner = task
        self.names = [name for name, p in task.named_parameters() if p.requires_grad]
        self.parameters: list[nn.Parameter] = [p for p in task.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(task.param_groups(optim.weight_decay), optim)

    def micro(self, batch: Tensors, last: bool, scale: float) -> dict[str, Tensor]:
        """Run forward and backward; PyTorch adds the gradients up."""
        self.learner.train()
        loss, sums = self._forward(self.learner, batch)
        torch.autograd.backward(loss * (scale * self.precision.factor))
        return sums

    def step(self, lr: float) -> float:
        """Clip, update, zero; return the gradient's norm."""
        self.precision.unscale([p.grad for p in self.parameters if p.grad is not None])
        norm = clip_gradients(self.parameters, self.clip).item()
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self.optimizer.step()
        if self.precision.scale:
            self.precision.scale.update(math.isfinite(norm))
        elif not math.isfinite(norm):
            # The gradients are left to be looked at.
            return norm
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def evaluate(self, batch: Tensors) -> dict[str, Tensor]:
        """Run forward alone."""
        self.task.eval()
        with torch.no_grad():
            return self._forward(self.task, batch)[1]

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the numbers: there is one process."""
        return list(values)

    def meet(self) -> None:
        """Wait until every process is here."""
        self.total([0.0])

    def lead(self, context: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return the context: there is one process."""
        return context

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
        self.precision.save(folder)

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
        self.precision.load(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forward(self, module: nn.Module, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss and the task's sums of a batch."""
        batch = moved(batch, self.device)
        errors: AbstractContextManager[None] = contextlib.nullcontext()
        if self.config.compile:
            any_number_of_documents(batch)
            errors = compile_errors()
        with self.precision.autocast(), errors:
            loss, sums = module(batch)
        return loss, dict(sums)


def make_engine(config: RunConfig) -> Engine:
    """Return the engine that a recipe asks for; "auto" is `ddp` in one of several processes."""
    with one_a_machine():
        several = place().world > 1
        if several and config.engine == "single":
            raise UsageError(
                f"the engine single is one process, and {place().world} were started",
                where="run.engine",
                hint="--engine ddp shares a step among them",
            )
    if several or config.engine == "ddp":
        # It loads torch.distributed, which one process does not need.
        from tokmill.train.ddp import Ddp

        return Ddp(config)
    return Single(config)


def moved(batch: Tensors, device: torch.device) -> Tensors:
    """Return a batch on a device; from pinned memory it is copied while the device computes."""

    def there(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: there(one) for name, one in value.items()}
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    if device.type == "cpu":
        return batch
    return Tensors(**{f.name: there(getattr(batch, f.name)) for f in dataclasses.fields(batch)})


def pick_device(name: str, here: Place | None = None) -> torch.device:
    """Return the device called `name`; "auto" is CUDA where there is one.

    Of several processes (`here` is one of them) each gets a GPU of its machine.
    """
    here = here or Place()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{name!r} is no device", where="run.device", hint="cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"{name!r} is not supported", where="run.device", hint="cpu or cuda")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device", where="run.device", hint="--device cpu")
    if here.world == 1:
        return device
    found = torch.cuda.device_count()
    if device.index is not None or here.local_world > found:
        seen = f"torch sees {found}" if device.index is None else f"{name} is one"
        raise UsageError(
            f"{here.local_world} processes need a GPU each, and {seen}",
            where="run.device",
            hint=f"--processes {found} --device cuda",
        )
    return torch.device("cuda", here.local_rank)


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
