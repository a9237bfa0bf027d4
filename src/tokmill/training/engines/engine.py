"""How a step runs: the protocol, all that the loop knows of an engine (`plugins.ENGINES`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from tokmill.models.model import Tensors
from tokmill.tasks.task import Task
from tokmill.training.engines.average import Average
from tokmill.training.recipe.config import OptimConfig


class Engine(Protocol):
    """One process of `world`; `rank` 0 writes and talks. A `with` block ends all of them together.

    Every process calls every method of this, in the same order. Batches are prepared, and lie in
    the memory of the CPU. `name` is that of `run.engine`.
    """

    name: str
    compiles: ClassVar[bool]
    """Whether it runs with `run.compile`."""
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

    def micro(
        self, batch: Tensors, last: bool, scale: float, pull: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Run forward and backward of the summed loss × `scale`; return the task's sums.

        `last`: the micro-batch after which gradients are complete. `pull`: (rows, D), the gradient
        of the batch's vectors (`Task.act`), which is known already: then there are no sums.
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

    def act(self, batch: Tensors, train: bool = False) -> dict[str, Tensor]:
        """Run forward alone; return the results of `Task.act`, of this process's batch.

        `train`: with dropout, as `micro` would.
        """
        ...

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, by rank; only their first axis may differ."""
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
        """Return the whole weights by name, in float32, on rank 0; the others get no weights."""
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
