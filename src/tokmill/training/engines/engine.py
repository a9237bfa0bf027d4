"""Engines run the steps of a training (`plugins.ENGINES`): one process on one device, and sums.

Other engines derive from `Engine`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.models.model import Tensors, blocks_of
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.device import (
    Precision,
    keep_freed_memory,
    moved,
    pick_device,
)
from tokmill.training.engines.optimisers.optim import (
    MOMENTS,
    STEP,
    clip_gradients,
    clipped_together,
    make_optimizer,
)
from tokmill.training.engines.tensors import (
    MODEL,
    OPTIMIZER,
    read_tensors,
    read_weights,
    shapes_of,
    unfit,
    write_tensors,
)
from tokmill.training.launch import one_error_per_machine, place
from tokmill.training.recipe.config import EngineConfig, OptimConfig, RunConfig

Pull = Tensor | Callable[[dict[str, Tensor]], Tensor]
"""A gradient of vectors (rows, D), or what computes it from the results of a forward pass."""


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


class Engine:
    """One process, on the CPU or on one CUDA device; the base of those of several.

    The process of `rank` 0 of `world` writes files and messages. A `with` block ends all processes
    together. Every process calls every method, in the same order. Batches are prepared and lie in
    CPU memory.
    """

    name = "single"
    """The value of `run.engine`."""
    files: Mapping[str, bytes] = {}
    """Files with the engine's settings for the folder of the run; after `prepare`."""
    rank, world = 0, 1
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

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        """Put the task on the device and make its optimiser; called once."""
        if self.device.type == "cpu":
            keep_freed_memory()
        self.task, self.clip = task, optim.clip
        self.shapes = shapes_of(task)
        task.model.recompute = self.config.recompute
        if self.config.compile:
            task.model.compiled = True
            for block in blocks_of(task):
                block.compile()
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

    def micro(
        self, batch: Tensors, last: bool, scale: float, pull: Pull | None = None
    ) -> dict[str, Tensor]:
        """Run forward and backward of the summed loss × `scale`; return the task's sums.

        `last`: whether gradients are complete after this micro-batch. `pull`: the gradient of the
        batch's vectors (`Task.act`) in place of the loss: then there are no sums.
        """
        self.learner.train()
        loss, sums = self._loss(self.learner, batch, pull)
        torch.autograd.backward(loss * scale)
        return sums

    def step(self, lr: float) -> float:
        """Clip gradients, update weights, drop gradients; return the norm.

        If the norm is not finite, no weight changes.
        """
        norm = self._clip()
        if not math.isfinite(norm):
            # The gradients are kept for `bad_gradients`.
            return norm
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def bad_gradients(self) -> list[str]:
        """Return the weights whose gradient is not finite, after a `step` that changed nothing."""
        return [
            name
            for name, weight in zip(self.names, self.parameters, strict=True)
            if weight.grad is not None and not weight.grad.isfinite().all()
        ]

    def evaluate(self, batch: Tensors) -> dict[str, Tensor]:
        """Run the forward pass without dropout; return the task's sums."""
        self.plain.eval()
        with torch.no_grad():
            return dict(self._forward(self.plain, batch)[1])

    def act(self, batch: Tensors, train: bool = False) -> dict[str, Tensor]:
        """Run the forward pass of `Task.act`, with dropout to `train`; return the results."""
        self.plain.train(train)
        with torch.no_grad():
            return dict(self._forward(self.plain, batch, act=True))

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, by rank; only their first axis may differ."""
        return [value]

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all processes."""
        return list(values)

    def barrier(self) -> None:
        """Wait until every process calls this."""
        self.total([0.0])

    def lead(self, context: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Enter a context on rank 0 alone; the others wait until it is entered."""
        return context

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights by name in float32 on rank 0; other ranks may get empty ones."""
        return dict(self.task.state_dict())

    def moments(self) -> dict[str, Tensor]:
        """Return the optimiser's state by its kind and the name of the weight."""
        name_of = dict(zip(map(id, self.parameters), self.names, strict=True))
        return {
            f"{key}.{name_of[id(parameter)]}": value
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }

    def save(self, folder: Path) -> dict[str, str]:
        """Write weights and each parameter's moments, the same files for all engines.

        Returns file → digest (`tensors.py`) on rank 0.
        """
        digests: dict[str, str] = {}
        # One after the other, so that they are not in memory together.
        for file, gathered in ((MODEL, self.weights), (OPTIMIZER, self.moments)):
            tensors = gathered()
            if self.rank == 0:
                digests[file] = write_tensors(folder / file, tensors)
        return digests

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, to the bit."""
        self._set_weights(read_weights(folder / MODEL, self.shapes, ""))
        self._set_moments(self._read_moments(folder / OPTIMIZER))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _place(self, task: Task) -> None:
        task.to(self.device)
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
        gradient = pull if isinstance(pull, Tensor) else pull(results)
        return (results["vectors"].float() * gradient).sum(), {}

    def _forward(self, module: nn.Module, batch: Tensors, act: bool = False) -> Any:
        """Return (loss, sums) of a batch, or results."""
        with self.precision.autocast():
            return module(moved(batch, self.device), act)

    def _read_moments(self, path: Path) -> dict[str, dict[str, Tensor]]:
        """Return weight → kind → moment; a weight has either all kinds of moments, or none."""
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in read_tensors(path).items():
            kind, _, name = key.partition(".")
            wanted = () if kind == STEP else self.shapes.get(name)
            if kind not in self.kept.get(name, ()) or value.shape != wanted:
                raise unfit(path, key)
            state.setdefault(name, {})[kind] = value
        for name, kinds in state.items():
            if kinds.keys() != {*self.kept[name]}:
                raise unfit(path, name)
        return state

    def _set_weights(self, tensors: dict[str, Tensor]) -> None:
        self.task.load_state_dict(tensors)

    def _set_moments(self, state: dict[str, dict[str, Tensor]]) -> None:
        name_of = dict(zip(map(id, self.parameters), self.names, strict=True))
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = {
            number: state[name_of[id(parameter)]]
            for number, parameter in enumerate(ordered)
            if name_of[id(parameter)] in state
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})


def make_engine(config: RunConfig, settings: EngineConfig | None = None) -> Engine:
    """Return the engine that a recipe asks for; "auto" is `ddp` in one of several processes.

    `settings`: the recipe's table `[engine]`.
    """
    world = place().world
    name = config.engine
    if name == "auto":
        name = "ddp" if world > 1 else "single"
    with one_error_per_machine():
        if world > 1 and name == "single":
            raise UsageError(
                f"the engine single is one process, and {world} were started",
                where="run.engine",
                hint="--engine ddp shares a step among them",
            )
        # An engine is imported when it is used: one process does not need torch.distributed.
        kind = plugins.load(plugins.ENGINES, name)
    return kind(config, settings)


def add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def over_processes(engine: Engine, sums: Mapping[str, Tensor]) -> dict[str, float]:
    values = engine.total([value.item() for value in sums.values()])
    return dict(zip(sums, values, strict=True))


def on_first(engine: Engine, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sums that every process has in full, as 0 on all but rank 0, for `over_processes`."""
    return {name: value if engine.rank == 0 else value * 0 for name, value in sums.items()}


def most(engine: Engine, number: int) -> int:
    """Return the largest of the numbers that all processes call this with."""
    given = [0.0] * engine.world
    given[engine.rank] = number
    return int(max(engine.total(given)))
