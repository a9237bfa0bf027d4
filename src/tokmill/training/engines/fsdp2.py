"""Several processes that share each step and the weights: torch's fully_shard ("FSDP2").

Each process keeps a part of every weight, its gradient and its moments (Zhao et al. 2023, "PyTorch
FSDP"). The weights of a block are gathered before its forward and its backward pass, and freed
after each. Gradients are added up over the processes as soon as a block has computed them, and each
process keeps its part. So a process holds 16 bytes a weight divided by the number of processes, and
one whole block.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from tokmill.models.model import Tensors, blocks_of
from tokmill.tasks.task import Task
from tokmill.training.engines.engine import Pull
from tokmill.training.engines.optimisers.optim import (
    clipped_together,
    local_part,
    part_of,
    total_norm,
)
from tokmill.training.engines.several import Several, peers
from tokmill.training.engines.single import Learner


class Fsdp2(Several):
    """One of `world` processes, each with its part of every weight."""

    name = "fsdp2"

    compiles = False

    def micro(
        self, batch: Tensors, last: bool, scale: float, pull: Pull | None = None
    ) -> dict[str, Tensor]:
        """Run forward and backward; gradients are added up over all processes each time."""
        # Adding them up once a step would save messages, but keep whole gradients until then.
        with peers():
            return super().micro(batch, last, scale, pull)

    def bad_gradients(self) -> list[str]:
        """Return the weights whose gradient is not finite in any process."""
        local = [local_part(p.grad) for p in self.parameters if p.grad is not None]
        counts = self.total([float(not part.isfinite().all()) for part in local])
        names = [n for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]
        return [name for name, count in zip(names, counts, strict=True) if count]

    def evaluate(self, batch: Tensors) -> dict[str, Tensor]:
        with peers():
            return super().evaluate(batch)

    def act(self, batch: Tensors, train: bool = False) -> dict[str, Tensor]:
        with peers():
            return super().act(batch, train)

    def step(self, lr: float) -> float:
        """Clip, update, zero; an optimiser that needs whole matrices gathers them."""
        with peers():
            return super().step(lr)

    def _place(self, task: Task) -> None:
        mesh = init_device_mesh(self.device.type, (self.world,))
        # A block may return a view of a tensor; no model here changes one in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        with peers():
            # Block by block: a model that fits no device never lies on one as a whole.
            for module in (*blocks_of(task), task):
                shard = fully_shard(module, mesh=mesh)
                # Losses are divided by the targets of all processes, so gradients are summed.
                shard.set_gradient_divide_factor(1.0)
                shard.set_force_sum_reduction_for_comms(True)
        # Weights outside of blocks are then gathered for `act` too, as they are for `forward`.
        register_fsdp_forward_method(task, "act")
        self.plain = self.learner = Learner(task)

    def _clip(self) -> float:
        """Clip by the norm over the parts of all processes; return that norm."""
        sets = [
            [local_part(weight.grad) for weight in some if weight.grad is not None]
            for some in clipped_together(self.optimizer, self.parameters)
        ]
        own = [total_norm(parts).item() for parts in sets]
        squares = self.total([norm * norm for norm in own])
        if self.clip > 0:
            for parts, square in zip(sets, squares, strict=True):
                torch._foreach_mul_(parts, min(1.0, self.clip / (math.sqrt(square) + 1e-6)))
        return math.sqrt(sum(squares))

    def _whole(self, value: Tensor) -> Tensor:
        """Gather a weight or moment; only rank 0 keeps it, in CPU memory."""
        if isinstance(value, DTensor):
            with peers():
                value = value.full_tensor()
        return value.cpu() if self.rank == 0 else value.new_empty(0)

    def _parts(self) -> list[Tensor]:
        return [local_part(weight.detach()) for weight in self.parameters]

    def _swap(self) -> None:
        # Weights outside of blocks stay gathered after an evaluation; the old values would be used.
        for module in self.task.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        super()._swap()

    def _part(self, value: Tensor, like: Tensor) -> Tensor:
        """Return this process's part; each process has read the whole."""
        if not isinstance(like, DTensor) or value.shape != like.shape:
            return value
        return part_of(value.to(self.device), like)
