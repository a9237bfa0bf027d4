"""Several processes that share each step and the weights: torch's fully_shard ("FSDP2").

Each process keeps a part of every weight, its gradient and its moments (Zhao et al. 2023, "PyTorch
FSDP"). The weights of a block are gathered before its forward and before its backward pass, and let
go after each; gradients are added up over the processes as soon as a block has made them, each
process keeping its part. So a process holds 16 bytes a weight divided by the number of processes,
and one block.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from tokmill.models.model import Tensors, blocks_of
from tokmill.tasks.task import Task
from tokmill.training.engines.optim import clipped_together, total_norm
from tokmill.training.engines.several import Several, peers
from tokmill.training.engines.single import Learner


class Fsdp2(Several):
    """One of `world` processes, each with its part of every weight."""

    name = "fsdp2"

    compiles = False

    def micro(
        self, batch: Tensors, last: bool, scale: float, pull: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Run forward and backward; gradients are added up over all processes each time."""
        # Adding them up once a step would save talk, and hold all gradients whole until then.
        with peers():
            return super().micro(batch, last, scale, pull)

    def bad_gradients(self) -> list[str]:
        """Return the weights whose gradient is not finite in any process."""
        local = [local_part(p.grad) for p in self.parameters if p.grad is not None]
        counts = self.total([float(not part.isfinite().all()) for part in local])
        names = [n for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]
        return [name for name, count in zip(names, counts, strict=True) if count]

    def evaluate(self, batch: Tensors) -> dict[str, Tensor]:
        """Run forward alone."""
        with peers():
            return super().evaluate(batch)

    def act(self, batch: Tensors, train: bool = False) -> dict[str, Tensor]:
        """Run forward alone, for results."""
        with peers():
            return super().act(batch, train)

    def step(self, lr: float) -> float:
        """Clip, update, zero; an optimiser of matrices gathers them."""
        with peers():
            return super().step(lr)

    def _place(self, task: Task) -> None:
        """Leave each process its part of every weight, on its device."""
        mesh = init_device_mesh(self.device.type, (self.world,))
        # What a block returns may be a view of it; no model here changes one in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        with peers():
            # Block by block: a model that fits no device never lies on one as a whole.
            for module in (*blocks_of(task), task):
                shard = fully_shard(module, mesh=mesh)
                # Losses are divided by the targets of all processes, so gradients are summed.
                shard.set_gradient_divide_factor(1.0)
                shard.set_force_sum_reduction_for_comms(True)
        # Both gather what lies in no block, as `forward` does by itself.
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
        """Gather a weight or moment; only rank 0 keeps it, in the memory of the CPU."""
        if isinstance(value, DTensor):
            with peers():
                value = value.full_tensor()
        return value.cpu() if self.rank == 0 else value.new_empty(0)

    def _parts(self) -> list[Tensor]:
        """Return what this process holds of the weights that are trained."""
        return [local_part(weight.detach()) for weight in self.parameters]

    def _swap(self) -> None:
        """Let weights and average change places."""
        # What is in no block stays gathered after an evaluation, and would be used once more.
        for module in self.task.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        super()._swap()

    def _part(self, value: Tensor, like: Tensor) -> Tensor:
        """Return this process's part; each process has read the whole."""
        if not isinstance(like, DTensor) or value.shape != like.shape:
            return value
        there = value.to(self.device)
        return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


def local_part(value: Tensor) -> Tensor:
    """Return what this process holds of a tensor, without a copy."""
    return value.to_local() if isinstance(value, DTensor) else value
