"""Several processes that share each step: torch's DistributedDataParallel.

Each process takes its part of the rows, runs forward and backward, and the gradients are added up
over all of them, at the last micro-batch of a step, while the backward pass still runs. Weights and
moments are whole and equal in every process; rank 0 writes them. On CPUs the processes talk through
gloo. On GPUs (one each) gradients go through NCCL; that path is written, and not tested.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from tokmill.errors import Interrupted, MachineError, TokmillError, UsageError
from tokmill.models.model import Tensors
from tokmill.tasks.task import Task
from tokmill.train.config import OptimConfig, RunConfig
from tokmill.train.engine import Single
from tokmill.train.launch import LAUNCHED, LOST, place
from tokmill.train.rng import seed_for, set_torch_states, torch_states

ENDED = "ended"
"""Where the first process to fail leaves "rank exit-code" for the others."""
LOST_WORDS = ("gloo", "NCCL", "Connection", "Socket", "TCPStore")
"""Words of torch's errors about peers, which have no type of their own."""

_runs = itertools.count()
"""Trainings of this process; each has names of its own in the store that all share."""

_groups: list[Any] = []
"""Groups of processes, kept until this one ends: DDP, where it held the last reference, would end
the group's threads while it holds Python's lock, which those threads may wait for."""


class LostPeer(MachineError):
    """Another process of the training is gone."""


class Ddp(Single):
    """One of `world` processes; of an error, which one tells and the others end in silence."""

    learner: DistributedDataParallel

    def __init__(self, config: RunConfig) -> None:
        here = place()
        self.rank, self.world = here.rank, here.world
        self.rehearsed = self.world == 1
        self._join()
        try:
            super().__init__(config)
        except TokmillError as error:
            self._leave(error)
            raise

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        """Put the task on the device, give it the weights of rank 0, and make its optimiser."""
        super().prepare(task, optim)
        with _peers():
            self.learner = DistributedDataParallel(
                task, forward_sync_buffers=False, gradient_as_bucket_view=True
            )
        if self.world > 1:
            # Each draws its own dropout; the first weights were drawn alike.
            seed_for(self.config.seed, 0, self.rank)

    def micro(self, batch: Tensors, last: bool, scale: float) -> dict[str, Tensor]:
        """Run forward and backward; gradients are exchanged after the last micro-batch."""
        if not self.rehearsed:
            self._rehearse(batch)
        with contextlib.nullcontext() if last else self.learner.no_sync(), _peers():
            # DDP divides by the number of processes.
            return super().micro(batch, last, scale * self.world)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all processes, in float64."""
        sums = torch.tensor(values, dtype=torch.float64)
        with _peers():
            dist.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found

    @contextlib.contextmanager
    def lead(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Enter a context on rank 0 alone; the others wait until it is entered."""
        with context if self.rank == 0 else contextlib.nullcontext():
            self.meet()
            yield

    def save(self, folder: Path) -> None:
        """Write weights and moments on rank 0."""
        if self.rank == 0:
            super().save(folder)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            try:
                # Rank 0 may still write.
                self.meet()
            except LostPeer as lost:
                self._leave(lost)
                raise
            dist.destroy_process_group()
        else:
            self._leave(error)

    def _join(self) -> None:
        """Meet the other processes, and find the store of names and values that all share."""
        store: Any = HashStore()
        if self.world > 1:
            try:
                with _peers():
                    store, _, _ = next(rendezvous("env://", self.rank, self.world))
            except ValueError as error:
                raise UsageError(
                    f"the processes cannot meet: {error}", hint="torchrun tells them where"
                ) from error
        self.store = PrefixStore(f"tokmill/{next(_runs)}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with _peers():
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=self.world
            )
        _groups.append(dist.group.WORLD)

    def _rehearse(self, batch: Tensors) -> None:
        """Run one backward pass that leaves nothing behind, before the first that counts.

        After its first backward pass DDP orders gradients anew for their exchange. With more than
        two processes that changes the order of additions: without this, the first step after a
        resume would differ in the last bits from the same step of a run that was never stopped.
        """
        self.rehearsed = True
        states = torch_states()
        with _peers():
            super().micro(batch, True, 0.0)
        self.optimizer.zero_grad(set_to_none=True)
        set_torch_states(states)

    def _leave(self, error: BaseException) -> None:
        """Let one process tell why all end; the others leave in silence with its exit code.

        When a process ends, the others find it missing wherever they wait for it.
        """
        if "LOCAL_RANK" in os.environ and threading.current_thread() is threading.main_thread():
            # torchrun ends those that are left when one has ended; this one is about to.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = 3 if isinstance(error, KeyboardInterrupt) else 70
        if isinstance(error, TokmillError):
            code = error.exit_code
        mine, teller = f"{self.rank} {code}", 0 if isinstance(error, Interrupted) else self.rank
        try:
            if isinstance(error, Interrupted) and self.rank > 0:
                # Rank 0 says it, when all that it has to write is written.
                self.store.wait([ENDED])
            teller, code = map(int, self.store.compare_set(ENDED, "", mine).decode().split())
        except RuntimeError:
            pass  # The store went with its process.
        if teller != self.rank:
            raise SystemExit(code) from None
        if isinstance(error, LostPeer) and LAUNCHED in os.environ:
            raise SystemExit(LOST) from None


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Turn torch's errors about other processes into `LostPeer`."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(word in text for word in LOST_WORDS):
            raise
        raise LostPeer(
            "another process of the training has ended, or cannot be reached",
            hint="it was killed where it left no message, perhaps as memory ran out; "
            "the same command with --resume continues from the newest checkpoint",
        ) from error
