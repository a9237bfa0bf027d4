"""Several processes that share each step: torch's DistributedDataParallel.

Each process runs forward and backward on its part of the rows. At the last micro-batch of a step
the gradients are added up over all processes, while the backward pass still runs. Weights and
moments are whole and equal in every process; rank 0 writes them.
"""

from __future__ import annotations

import contextlib

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tokmill.models.model import Tensors
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.device import set_torch_states, torch_states
from tokmill.training.engines.engine import Pull
from tokmill.training.engines.several import Several, peers
from tokmill.training.recipe.config import EngineConfig, RunConfig


class Ddp(Several):
    """One of `world` processes, each with all weights."""

    name = "ddp"
    learner: DistributedDataParallel

    def __init__(self, config: RunConfig, settings: EngineConfig | None = None) -> None:
        super().__init__(config, settings)
        self.rehearsed = self.world == 1

    def micro(
        self, batch: Tensors, last: bool, scale: float, pull: Pull | None = None
    ) -> dict[str, Tensor]:
        """Run forward and backward; gradients are exchanged after the last micro-batch."""
        if not self.rehearsed:
            self._rehearse(batch, pull)
        with contextlib.nullcontext() if last else self.learner.no_sync(), peers():
            # DDP divides by the number of processes.
            return super().micro(batch, last, scale * self.world, pull)

    def _place(self, task: Task) -> None:
        """Put the task on the device, and give it the weights of rank 0."""
        super()._place(task)
        with peers():
            self.learner = DistributedDataParallel(
                self.plain, forward_sync_buffers=False, gradient_as_bucket_view=True
            )

    def _rehearse(self, batch: Tensors, pull: Pull | None) -> None:
        """Run one backward pass without any effect, before the first real one.

        After its first backward pass DDP changes the order in which gradients are exchanged. With
        more than two processes that changes the order of additions. Without a rehearsal, the first
        step after a resume would differ in the last bits from that of an uninterrupted run.
        """
        self.rehearsed = True
        states = torch_states()
        with peers():
            super().micro(batch, True, 0.0, pull)
        self.optimizer.zero_grad(set_to_none=True)
        set_torch_states(states)
