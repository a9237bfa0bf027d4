"""The protocol of engines, which run the steps of a training (`plugins.ENGINES`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from tokmill.models.model import Tensors
from tokmill.tasks.task import Task
from tokmill.training.engines.optimisers.average import Average
from tokmill.training.recipe.config import OptimConfig

Pull = Tensor | Callable[[dict[str, Tensor]], Tensor]
"""A gradient of vectors (rows, D), or what computes it from the results of a forward pass."""


class Engine(Protocol):
    """One process of `world`. The one of `rank` 0 writes files and messages.

    A `with` block ends all processes together. Every process calls every method, in the same order.
    Batches are prepared and lie in CPU memory. `name` is the value of `run.engine`.
    """

    name: str
    compiles: ClassVar[bool]
    """Whether it runs with `run.compile`."""
    files: Mapping[str, bytes]
    """Files with the engine's settings for the folder of the run; after `prepare`."""
    rank: int
    world: int
    device: torch.device
    average: Average | None
    """The average of the weights, where the recipe wants one; after `prepare`."""

    @property
    def skipped(self) -> int:
        """Number of steps without an update, because the gradient overflowed fp16."""
        ...

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        """Put the task on the device and make its optimiser; called once."""
        ...

    def micro(
        self, batch: Tensors, last: bool, scale: float, pull: Pull | None = None
    ) -> dict[str, Tensor]:
        """Run forward and backward of the summed loss × `scale`; return the task's sums.

        `last`: whether gradients are complete after this micro-batch. `pull`: the gradient of the
        batch's vectors (`Task.act`) in place of the loss: then there are no sums.
        """
        ...

    def step(self, lr: float) -> float:
        """Clip gradients, update weights, drop gradients; return the norm.

        If the norm is not finite, no weight changes. In fp16 such a step counts as skipped, and the
        loss of the next steps is scaled less.
        """
        ...

    def bad_gradients(self) -> list[str]:
        """Return the weights whose gradient is not finite, after a `step` that changed nothing."""
        ...

    def evaluate(self, batch: Tensors) -> dict[str, Tensor]:
        """Run the forward pass without dropout; return the task's sums."""
        ...

    def act(self, batch: Tensors, train: bool = False) -> dict[str, Tensor]:
        """Run the forward pass of `Task.act`; return the results of this process's batch.

        `train`: with dropout, as `micro` would.
        """
        ...

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, by rank; only their first axis may differ."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the average is in the place of the weights."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all processes."""
        ...

    def meet(self) -> None:
        """Wait until every process calls this."""
        ...

    def lead(self, context: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Enter a context on rank 0 alone; the others wait until it is entered."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights by name in float32 on rank 0; other ranks get empty tensors."""
        ...

    def save(self, folder: Path) -> dict[str, str]:
        """Write weights and optimiser into a folder; all engines write the same files.

        Returns file → digest on rank 0: the seal of tensors (`tensors.py`), the sha256 of others.
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
