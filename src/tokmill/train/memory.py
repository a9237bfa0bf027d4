"""How much memory a step takes, found by running it without numbers.

Tensors without data (torch's fake tensors) go through forward and backward as real ones would,
while what is alive at each moment is added up. So no formula has to follow the models.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokmill.models.model import Tensors
from tokmill.train.config import TrainConfig
from tokmill.train.precision import DTYPES
from tokmill.train.run import make_task

FIXED = {"cpu": 0.42e9, "cuda": 0.6e9}
"""Bytes of Python, torch and its libraries; of CUDA the size of a context."""
HELD, HELD_RECOMPUTING = {"cpu": 1.45, "cuda": 1.1}, {"cpu": 1.75, "cuda": 1.1}
"""Bytes held for each byte of tensors. On a CPU, measured with glibc 2.36, which keeps blocks that
are let go and seldom finds a use for them; of CUDA's caching allocator, a guess."""


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
        """Count the memory of a tensor until it is let go; views share theirs."""
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
    """Return about how much memory a process takes whose tensors take so many bytes.

    `device`: "cpu" is the memory of the process, "cuda" that of the GPU.
    """
    return FIXED[device] + (HELD_RECOMPUTING if recompute else HELD)[device] * tensors


def tensor_bytes(config: TrainConfig, sizes: Mapping[str, int], rows: int, parts: int) -> int:
    """Return the most bytes that tensors take at a time while a model is trained.

    Weights and two moments, in float32; and what is alive at the worst moment of forward and
    backward passes over micro-batches of `rows` whole rows, gradients among it. `sizes`: the ids of
    each column; `parts`: micro-batches a step.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        task = make_task(config, sizes).train()
        task.model.recompute = config.run.recompute
        ids = torch.zeros(rows, task.length, dtype=torch.int64)
        columns = dict.fromkeys(task.sizes, ids)
        targets = dict.fromkeys(task.target_names, ids)
        batch = Tensors(columns, ids, ids, whole=True, targets=targets)
        dtype = DTYPES[config.run.precision]
        autocast = torch.autocast("cpu", dtype, enabled=dtype is not torch.float32)
        peak = Peak()
        for parameter in task.parameters():
            peak.count(parameter)
        weights = peak.now
        with peak:
            # From the second micro-batch on, gradients are there already.
            for _ in range(min(parts, 2)):
                with autocast:
                    loss, sums = task(batch)
                torch.autograd.backward(loss)
                del loss, sums
    return peak.most + 2 * weights
