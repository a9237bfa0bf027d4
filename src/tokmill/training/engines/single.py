"""One process on one device."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from tokmill.base.errors import MachineError, TokmillError
from tokmill.models.model import Tensors, blocks_of
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.device import keep_freed_memory, moved, pick_device
from tokmill.training.engines.devices.precision import Precision
from tokmill.training.engines.engine import Pull
from tokmill.training.engines.optimisers.average import Average
from tokmill.training.engines.optimisers.optim import (
    MOMENTS,
    clip_gradients,
    clipped_together,
    make_optimizer,
)
from tokmill.training.engines.saving import Saved, shapes_of
from tokmill.training.launch import place
from tokmill.training.recipe.config import EngineConfig, OptimConfig, RunConfig

OFF = "or train without it: --set run.compile=false"


class Learner(nn.Module):
    """A module whose forward pass computes either the loss of a task or the results of `Task.act`.

    Engines wrap this module, so that their work around a forward pass is done for both.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Tensors, act: bool = False) -> Any:
        """Return (loss, sums) of a batch; with `act` the results of `Task.act`."""
        task: Any = self.task
        return task.act(batch) if act else task(batch)


class Single(Saved):
    """One process, on the CPU or on one CUDA device."""

    name = "single"
    files: Mapping[str, bytes] = {}
    rank, world = 0, 1
    compiles: ClassVar[bool] = True
    learner: nn.Module
    """The module of a step: a `Learner`, or an engine's wrapper around it."""
    plain: nn.Module
    """The module of passes without gradients."""

    def __init__(self, config: RunConfig, settings: EngineConfig | None = None) -> None:
        self.config = config
        self.device = pick_device(config.device, place())
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.precision = Precision(config.precision, self.device)

    @property
    def skipped(self) -> int:
        """Number of steps whose update was skipped."""
        return self.precision.scale.skipped if self.precision.scale else 0

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        """Put the task on the device and make its optimiser."""
        if self.device.type == "cpu":
            keep_freed_memory()
        self.task, self.clip = task, optim.clip
        self.shapes = shapes_of(task)
        task.model.recompute = self.config.recompute
        self._place(task)
        self.names = [name for name, p in task.named_parameters() if p.requires_grad]
        self.parameters: list[nn.Parameter] = [p for p in task.parameters() if p.requires_grad]
        groups = task.param_groups(optim.weight_decay)
        self.optimizer = make_optimizer(groups, optim, blocks_of(task))
        name_of = dict(zip(map(id, self.parameters), self.names, strict=True))
        self.kept = {
            name_of[id(weight)]: group[MOMENTS]
            for group in self.optimizer.param_groups
            for weight in group["params"]
        }
        if optim.ema:
            self.average = Average(optim.ema, self._parts)

    def micro(
        self, batch: Tensors, last: bool, scale: float, pull: Pull | None = None
    ) -> dict[str, Tensor]:
        """Run forward and backward; PyTorch adds the gradients up."""
        self.learner.train()
        loss, sums = self._loss(self.learner, batch, pull)
        torch.autograd.backward(loss * (scale * self.precision.factor))
        return sums

    def step(self, lr: float) -> float:
        """Clip, update, zero; return the gradient's norm."""
        self.precision.unscale([p.grad for p in self.parameters if p.grad is not None])
        norm = self._clip()
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self.optimizer.step()
            if self.average:
                self.average.update()
        if self.precision.scale:
            self.precision.scale.update(math.isfinite(norm))
        elif not math.isfinite(norm):
            # The gradients are kept for `bad_gradients`.
            return norm
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def bad_gradients(self) -> list[str]:
        """Return the weights whose gradient is not finite."""
        return [
            name
            for name, weight in zip(self.names, self.parameters, strict=True)
            if weight.grad is not None and not weight.grad.isfinite().all()
        ]

    def evaluate(self, batch: Tensors) -> dict[str, Tensor]:
        """Run forward alone."""
        self.plain.eval()
        with torch.no_grad():
            return dict(self._forward(self.plain, batch)[1])

    def act(self, batch: Tensors, train: bool = False) -> dict[str, Tensor]:
        """Run forward alone, for results."""
        self.plain.train(train)
        with torch.no_grad():
            return dict(self._forward(self.plain, batch, act=True))

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return the tensor: there is one process."""
        return [value]

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the numbers: there is one process."""
        return list(values)

    def meet(self) -> None:
        """Wait until every process is here."""
        self.total([0.0])

    def lead(self, context: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return the context: there is one process."""
        return context

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

    def _place(self, task: Task) -> None:
        """Put the task on the device, and make the module of a step."""
        task.to(self.device)
        if self.config.compile:
            compile_task(task, self.device)
        self.plain = self.learner = Learner(task)

    def _clip(self) -> float:
        """Clip the gradients; return their norm before."""
        norms = [
            clip_gradients(some, self.clip)
            for some in clipped_together(self.optimizer, self.parameters)
        ]
        return (norms[0] if len(norms) == 1 else torch.stack(norms).norm()).item()

    def _loss(
        self, module: nn.Module, batch: Tensors, pull: Pull | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a loss to run backward from, and the task's sums.

        `pull`: a gradient of the batch's vectors, used in place of the task's loss.
        """
        if pull is None:
            loss, sums = self._forward(module, batch)
            return loss, dict(sums)
        results = self._forward(module, batch, act=True)
        known = pull if isinstance(pull, Tensor) else pull(results)
        return (results["vectors"].float() * known).sum(), {}

    def _forward(self, module: nn.Module, batch: Tensors, act: bool = False) -> Any:
        """Return (loss, sums) of a batch, or results."""
        batch = moved(batch, self.device)
        errors: AbstractContextManager[None] = contextlib.nullcontext()
        if self.config.compile:
            any_number_of_documents(batch)
            errors = compile_errors()
        with self.precision.autocast(), errors:
            return module(batch, act)


def compile_task(task: Task, device: torch.device) -> None:
    """Compile the forward and backward pass of a task in place; names of weights stay.

    The first batch of each shape is compiled, which takes about a minute. Raises `MachineError` if
    no compiler is installed.
    """
    variable, usual = ("CC", "gcc") if device.type == "cuda" else ("CXX", "g++")
    compiler = os.environ.get(variable) or usual
    if shutil.which(compiler) is None:
        raise MachineError(
            f"torch.compile needs a compiler, and there is no {compiler!r}",
            where="run.compile",
            hint=f"install {usual}, name another one in the variable {variable}, {OFF}",
        )
    # Whole or trimmed rows, the last micro-batch, evaluation: each has a compiled program.
    torch._dynamo.config.recompile_limit = 32
    task.compile(dynamic=False)


def any_number_of_documents(batch: Tensors) -> None:
    if batch.cu_seqlens is not None:
        torch._dynamo.maybe_mark_dynamic(batch.cu_seqlens, 0)


@contextlib.contextmanager
def compile_errors() -> Iterator[None]:
    """Turn a failure of torch.compile into a `TokmillError`."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        first = str(error).strip().partition("\n")[0]
        raise TokmillError(
            f"torch.compile failed: {first}", where="run.compile", hint=f"report it, {OFF}"
        ) from error
