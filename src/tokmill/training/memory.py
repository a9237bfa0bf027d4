"""How much memory a step takes, measured by a step on tensors without data.

Torch's fake tensors go through the forward and backward pass as real ones would, and the bytes that
are alive at each moment are added up. So no formula has to follow the models.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokmill.models.inputs import Inputs
from tokmill.models.model import Tensors, blocks_of
from tokmill.tasks.task import Task
from tokmill.training.engines.optim import make_optimizer, moment_bytes
from tokmill.training.engines.precision import DTYPES
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.deepspeed_config import all_settings, stage_of
from tokmill.training.runs.run import make_task, task_type

FIXED = {"cpu": 0.42e9, "cuda": 0.6e9}
"""Bytes of Python, torch and its libraries; of CUDA the size of a context."""
HELD, HELD_RECOMPUTING = {"cpu": 1.45, "cuda": 1.1}, {"cpu": 1.75, "cuda": 1.1}
"""Bytes held for each byte of tensors. On a CPU: measured with glibc 2.36, which keeps freed blocks
and seldom uses them again. For CUDA's caching allocator: a guess."""


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of the tensors that operations make; `most`: the largest sum so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.alive: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return made

    def count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed; views share memory."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.alive:
            return

        def gone(_: object) -> None:
            self.now -= size
            del self.alive[key]

        self.alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def process_bytes(tensors: float, device: str, recompute: bool) -> float:
    """Return an estimate of the memory of a process whose tensors take `tensors` bytes.

    `device`: "cpu" for the memory of the process, "cuda" for that of the GPU.
    """
    return FIXED[device] + (HELD_RECOMPUTING if recompute else HELD)[device] * tensors


class Shares(NamedTuple):
    """The share of all weights, gradients and moments that a process holds."""

    weights: float
    gradients: float
    moments: float


def stage_of_run(config: TrainConfig) -> int:
    """Return the stage of ZeRO that says what an engine splits; `fsdp2` splits as stage 3 does."""
    stages = {"fsdp2": 3, "deepspeed": stage_of(config.engine.deepspeed)}
    return stages.get(config.run.engine, 0)


def shares_of(config: TrainConfig, world: int) -> Shares:
    """Return what each of `world` processes holds: stage 1 splits moments, 3 also weights."""
    stage, part = stage_of_run(config), 1 / world
    return Shares(*(part if stage >= least else 1.0 for least in (3, 2, 1)))


def tensor_bytes(config: TrainConfig, inputs: Inputs, rows: int, parts: int, world: int = 1) -> int:
    """Return the most bytes that tensors of a process take at a time while a model is trained.

    `inputs`: what the model reads; `parts`: micro-batches a step. With W bytes of weights in
    float32, of which a process holds the share w, of gradients g and of moments m (`Shares`; 1, or
    1 / `world`), that is

        w W + m M + a w W + A + G + E

    M: bytes of all moments, 2 W with AdamW; a: 1 where an average of the weights is kept
    (`optim.ema`), else 0; A: what else is alive at the worst moment of forward and backward passes
    over micro-batches of `rows` whole rows, whole gradients (g = 1) among it; G: g W, where
    gradients are split. E, where weights are split:
    weights and gradients of one block, and of what is in no block, whole; and of DeepSpeed's stages
    its float32 copy of W / `world`, and its bucket of gradients.
    """
    shares = shares_of(config, world)
    without = task_type(config).runs_without_numbers
    with FakeTensorMode(allow_non_fake_inputs=True) if without else contextlib.nullcontext():
        task = make_task(config, inputs).train()
        task.model.recompute = config.run.recompute
        batch = task.example(rows)
        dtype = DTYPES[config.run.precision]
        autocast = torch.autocast("cpu", dtype, enabled=dtype is not torch.float32)
        peak = Peak()
        for parameter in task.parameters():
            peak.count(parameter)
            if shares.gradients < 1 and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(let_go)  # type: ignore[no-untyped-call]
        weights = peak.now
        optimizer = make_optimizer(task.param_groups(0.0), config.optim, blocks_of(task))
        moments = moment_bytes(optimizer)
        with peak:
            # From the second micro-batch on, gradients are there already.
            for _ in range(min(parts, 2)):
                with autocast:
                    loss, sums = example_loss(task, batch)
                torch.autograd.backward(loss)
                del loss, sums
    held = shares.weights * (2 if config.optim.ema else 1) + (
        shares.gradients if shares.gradients < 1 else 0
    )
    kept = math.ceil(held * weights + shares.moments * moments)
    return peak.most - weights + kept + extra_bytes(config, task, world)


def example_loss(task: Task, batch: Tensors) -> tuple[Tensor, Any]:
    """Return a loss that takes about the memory of the task's own, and the other results.

    A comparison of vectors takes little memory beside the vectors, and may need real numbers.
    """
    if not task.compares:
        loss, sums = task(batch)
        return loss, sums
    results = task.act(batch)
    return results["vectors"].float().sum(), results


def let_go(weight: Tensor) -> None:
    """Drop the gradient of a weight: the process keeps only a part of it."""
    weight.grad = None


def extra_bytes(config: TrainConfig, task: Task, world: int) -> int:
    """Return the bytes that a process holds because weights are split: E of `tensor_bytes`."""
    stage = stage_of_run(config)
    if stage == 0 or world == 1:
        return 0
    extra = 0.0
    if stage == 3:
        within = [size_of(block) for block in blocks_of(task)]
        extra += 2 * (size_of(task) - sum(within) + max(within, default=0))
    if config.run.engine == "deepspeed":
        count = task.parameter_count()
        zero = all_settings(config.engine.deepspeed, 0.0, count)["zero_optimization"]
        extra += size_of(task) / world + 4 * zero["reduce_bucket_size"]
    return math.ceil(extra)


def size_of(module: nn.Module) -> int:
    """Return the bytes of a module's weights."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
