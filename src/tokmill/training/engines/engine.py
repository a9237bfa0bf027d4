"""How a step runs. The loop knows this protocol only; `Single` is one process on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from tokmill.errors import TokmillError, UsageError
from tokmill.models.model import Tensors
from tokmill.tasks.task import Task
from tokmill.training.engines.allocator import keep_freed_memory
from tokmill.training.engines.average import AVERAGE, Average
from tokmill.training.engines.compiling import any_number_of_documents, compile_errors, compile_task
from tokmill.training.engines.optim import MOMENTS, clip_gradients, make_optimizer
from tokmill.training.engines.precision import Precision
from tokmill.training.engines.tensors import read_tensors, write_tensors
from tokmill.training.launch import Place, one_a_machine, place
from tokmill.training.recipe.config import EngineConfig, OptimConfig, RunConfig

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


class Engine(Protocol):
    """One process of `world`; `rank` 0 writes and talks. A `with` block ends all of them together.

    Every process calls every method of this, in the same order. Batches are prepared, and lie in
    the memory of the CPU. `name` is that of `run.engine`.
    """

    name: str
    files: Mapping[str, bytes]
    """What a run folder keeps of what the engine was told; after `prepare`."""
    rank: int
    world: int
    device: torch.device
    average: Average | None
    """Of the weights, where the recipe wants one; after `prepare`."""

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

    def bad_gradients(self) -> list[str]:
        """Return the weights whose gradient is not finite, after a `step` that changed nothing."""
        ...

    def evaluate(self, batch: Tensors) -> dict[str, Tensor]:
        """Run forward alone, without dropout; return the task's sums."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Have the average in the place of the weights, until the end of a block."""
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

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights by name, in float32; what other ranks than 0 get is no use."""
        ...

    def save(self, folder: Path) -> dict[str, str]:
        """Write weights and optimiser into a folder that is there; every engine the same files.

        Returns file → digest on rank 0: of tensors the seal (`tensors.py`), of others the sha256.
        """
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

    name = "single"
    files: Mapping[str, bytes] = {}
    rank, world = 0, 1
    task: Task
    learner: nn.Module
    """The task, or what an engine wraps around it."""
    average: Average | None = None

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
        self.task, self.clip = task, optim.clip
        self.shapes = shapes_of(task)
        task.model.recompute = self.config.recompute
        self.learner = self._place(task)
        self.names = [name for name, p in task.named_parameters() if p.requires_grad]
        self.parameters: list[nn.Parameter] = [p for p in task.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(task.param_groups(optim.weight_decay), optim)
        if optim.ema:
            self.average = Average(optim.ema, self._parts)

    def micro(self, batch: Tensors, last: bool, scale: float) -> dict[str, Tensor]:
        """Run forward and backward; PyTorch adds the gradients up."""
        self.learner.train()
        loss, sums = self._forward(self.learner, batch)
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
            # The gradients are left to be looked at.
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
        self.task.eval()
        with torch.no_grad():
            return self._forward(self.task, batch)[1]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the average in the place of the weights, until the end of a block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the numbers: there is one process."""
        return list(values)

    def meet(self) -> None:
        """Wait until every process is here."""
        self.total([0.0])

    def lead(self, context: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return the context: there is one process."""
        return context

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights by name."""
        return {name: self._whole(value) for name, value in self.task.state_dict().items()}

    def moments(self) -> dict[str, Tensor]:
        """Return the optimiser's state by its kind and the name of the weight."""
        name_of = dict(zip(map(id, self.parameters), self.names, strict=True))
        return {
            f"{key}.{name_of[id(parameter)]}": self._whole(value)
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }

    def save(self, folder: Path) -> dict[str, str]:
        """Write weights, each parameter's moments, and the average; return file → digest."""
        digests: dict[str, str] = {}
        # One after the other: they need not lie in memory together.
        for file, gathered in ((MODEL, self.weights), (OPTIMIZER, self.moments)):
            tensors = gathered()
            if self.rank == 0:
                digests[file] = write_tensors(folder / file, tensors)
        if self.average:
            with self.averaged():
                tensors = self.weights()
                if self.rank == 0:
                    said = self.average.metadata()
                    digests[AVERAGE] = write_tensors(folder / AVERAGE, tensors, said)
        return digests | self.precision.save(folder) if self.rank == 0 else {}

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        self._set_weights(read_weights(folder / MODEL, self.shapes))
        self._set_moments(self._read_moments(folder / OPTIMIZER))
        if self.average:
            with self.averaged():
                self._set_weights(read_weights(folder / AVERAGE, self.shapes))
            self.average.load(folder / AVERAGE)
        self.precision.load(folder)

    def _read_moments(self, path: Path) -> dict[str, dict[str, Tensor]]:
        """Return weight → kind → moment; a weight has all kinds of AdamW's, or none."""
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in read_tensors(path).items():
            kind, _, name = key.partition(".")
            wanted = () if kind == MOMENTS[0] else self.shapes.get(name)
            if kind not in MOMENTS or name not in self.names or value.shape != wanted:
                raise _unfit(path, key)
            state.setdefault(name, {})[kind] = value
        for name, kinds in state.items():
            if kinds.keys() != {*MOMENTS}:
                raise _unfit(path, name)
        return state

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

    def _place(self, task: Task) -> nn.Module:
        """Put the task on the device; return what a step runs."""
        task.to(self.device)
        if self.config.compile:
            compile_task(task, self.device)
        return task

    def _clip(self) -> float:
        """Clip the gradients; return their norm before."""
        return clip_gradients(self.parameters, self.clip).item()

    def _whole(self, value: Tensor) -> Tensor:
        """Return all of a weight or moment, of which this process may hold a part."""
        return value

    def _part(self, value: Tensor, like: Tensor) -> Tensor:
        """Return what this process holds of a weight or moment; `like` is its weight."""
        return value

    def _parts(self) -> list[Tensor]:
        """Return what this process holds of the weights that are trained."""
        return [weight.detach() for weight in self.parameters]

    def _swap(self) -> None:
        """Let weights and average change places."""
        assert self.average is not None
        self.average.swap()

    def _set_weights(self, tensors: dict[str, Tensor]) -> None:
        own = self.task.state_dict()
        self.task.load_state_dict(
            {name: self._part(value, own[name]) for name, value in tensors.items()}
        )

    def _set_moments(self, state: dict[str, dict[str, Tensor]]) -> None:
        name_of = dict(zip(map(id, self.parameters), self.names, strict=True))
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        known = {
            number: {
                kind: self._part(value, parameter)
                for kind, value in state[name_of[id(parameter)]].items()
            }
            for number, parameter in enumerate(ordered)
            if name_of[id(parameter)] in state
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": known, "param_groups": groups})

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


def make_engine(config: RunConfig, table: EngineConfig | None = None) -> Engine:
    """Return the engine that a recipe asks for; "auto" is `ddp` in one of several processes."""
    with one_a_machine():
        several = place().world > 1
        if several and config.engine == "single":
            raise UsageError(
                f"the engine single is one process, and {place().world} were started",
                where="run.engine",
                hint="--engine ddp shares a step among them",
            )
        if config.compile and config.engine in ("fsdp2", "deepspeed"):
            raise UsageError(
                f"the engine {config.engine} does not compile the model",
                where="run.compile",
                hint="--set run.compile=false, or --engine ddp",
            )
    # Each is loaded when it is wanted: one process does not need torch.distributed.
    if config.engine == "fsdp2":
        from tokmill.training.engines.fsdp2 import Fsdp2

        return Fsdp2(config)
    if config.engine == "deepspeed":
        from tokmill.training.engines.deepspeed import DeepSpeed

        return DeepSpeed(config, (table or EngineConfig()).deepspeed)
    if several or config.engine == "ddp":
        from tokmill.training.engines.ddp import Ddp

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


def shapes_of(task: Task) -> dict[str, torch.Size]:
    """Return the shapes of the weights by name."""
    return {name: value.shape for name, value in task.state_dict().items()}


def load_weights(task: Task, path: Path, seal: str = "") -> None:
    """Read weights into a task; names and shapes must be its own, `seal` as of `read_tensors`."""
    task.load_state_dict(read_weights(path, shapes_of(task), seal))


def read_weights(path: Path, shapes: Mapping[str, torch.Size], seal: str = "") -> dict[str, Tensor]:
    """Read weights, which must have these names and shapes."""
    tensors = read_tensors(path, seal)
    for name in shapes.keys() | tensors.keys():
        if name not in shapes or name not in tensors or shapes[name] != tensors[name].shape:
            raise _unfit(path, name)
    return tensors


def _unfit(path: Path, name: str) -> TokmillError:
    return TokmillError(
        f"the tensor {name!r} does not fit the model of the recipe",
        where=str(path),
        hint="the file belongs to another recipe",
    )
