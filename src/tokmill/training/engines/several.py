"""One of several processes that share each step: how they meet, and how they end together.

What they share and exchange is the engine's, `ddp.py` and those beside it. On CPUs the processes
talk through gloo. On GPUs (one each) gradients go through NCCL; that path is written, and not
tested.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from tokmill.errors import Interrupted, MachineError, TokmillError, UsageError
from tokmill.tasks.task import Task
from tokmill.training.engines.rng import seed_for
from tokmill.training.engines.single import Single
from tokmill.training.launch import LAUNCHED, LOST, check_host, place, told_when_waiting
from tokmill.training.recipe.config import EngineConfig, OptimConfig, RunConfig

ENDED = "ended"
"""Where the first process to fail leaves "rank exit-code" for the others."""
MASTER = "MASTER_ADDR"
"""The variable in which torchrun says where the first process is."""
WORD = timedelta(seconds=5)
"""How long a process that lost another waits for that one's reason."""
LOST_WORDS = ("gloo", "NCCL", "Connection", "Socket", "TCPStore")
"""Words of torch's errors about peers, which have no type of their own."""

_runs = itertools.count()
"""Trainings of this process; each has names of its own in the store that all share."""

_groups: list[Any] = []
"""Groups of processes, kept until this one ends: whoever lets go of the last reference ends the
group's threads, and they may wait for Python's lock, which that one holds. DDP hung that way.
DeepSpeed's processes can abort at their end, after their work; with its groups kept, and ended
together once all are done, that has not been seen."""


class LostPeer(MachineError):
    """Another process of the training is gone."""


class Several(Single):
    """One of `world` processes; of an error, which one tells and the others end in silence."""

    store: PrefixStore | None = None

    def __init__(self, config: RunConfig, told: EngineConfig | None = None) -> None:
        here = place()
        self.rank, self.world = here.rank, here.world
        try:
            self._join()
            super().__init__(config, told)
        except TokmillError as error:
            self._leave(error)
            raise

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        """Put the task on the device and make its optimiser."""
        super().prepare(task, optim)
        if self.world > 1:
            # Each draws its own dropout; the first weights were drawn alike.
            seed_for(self.config.seed, 0, self.rank)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of some numbers over all processes, in float64."""
        sums = torch.tensor(values, dtype=torch.float64)
        with peers():
            dist.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, by rank; only their first axis may differ."""
        counts = [0.0] * self.world
        counts[self.rank] = len(value)
        sizes = [int(count) for count in self.total(counts)]
        padded = value.new_zeros(max(sizes), *value.shape[1:])
        padded[: len(value)] = value
        found = [torch.empty_like(padded) for _ in sizes]
        with peers():
            dist.all_gather(found, padded)
        return [one[:size] for one, size in zip(found, sizes, strict=True)]

    @contextlib.contextmanager
    def lead(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Enter a context on rank 0 alone; the others wait until it is entered."""
        with context if self.rank == 0 else contextlib.nullcontext():
            self.meet()
            yield

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
            self._part_ways()
        elif self.world == 1:
            # Nobody waits for the end of this process: it may train once more.
            self._part_ways()
        else:
            self._leave(error)

    def _join(self) -> None:
        """Meet the other processes, and find the store of names and values that all share."""
        store: Any = HashStore()
        if self.world > 1:
            host, port = (os.environ.get(name, "") for name in (MASTER, "MASTER_PORT"))
            if host:
                check_host(host, MASTER)
            try:
                with peers(), told_when_waiting(f"the first process, at {host}:{port}"):
                    store, _, _ = next(rendezvous("env://", self.rank, self.world))
            except ValueError as error:
                raise UsageError(
                    f"the processes cannot meet: {error}", hint="torchrun tells them where"
                ) from error
        self.store = PrefixStore(f"tokmill/{next(_runs)}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with peers(), told_when_waiting(f"{self.world - 1} other processes"):
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=self.world
            )
        _groups.append(dist.group.WORLD)

    def _part_ways(self) -> None:
        """End the groups of processes, those that an engine made for itself too."""
        _groups.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()

    def _leave(self, error: BaseException) -> None:
        """Let one process tell why all end; the others leave in silence with its exit code.

        When a process ends, the others find it missing wherever they wait for it.
        """
        if "LOCAL_RANK" in os.environ and threading.current_thread() is threading.main_thread():
            # torchrun ends those that are left when one has ended; this one is about to.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.store is None:
            return  # They never met.
        code = 3 if isinstance(error, KeyboardInterrupt) else 70
        if isinstance(error, TokmillError):
            code = error.exit_code
        mine, teller = f"{self.rank} {code}", 0 if isinstance(error, Interrupted) else self.rank
        try:
            if isinstance(error, Interrupted) and self.rank > 0:
                # Rank 0 says it, when all that it has to write is written.
                self.store.wait([ENDED])
            if isinstance(error, LostPeer):
                # The other one knows why it ends, if it was not killed.
                with contextlib.suppress(dist.DistStoreError):
                    self.store.wait([ENDED], WORD)
            teller, code = map(int, self.store.compare_set(ENDED, "", mine).decode().split())
        except RuntimeError:
            pass  # The store went with its process.
        if teller != self.rank:
            raise SystemExit(code) from None
        if isinstance(error, LostPeer) and LAUNCHED in os.environ:
            raise SystemExit(LOST) from None


@contextlib.contextmanager
def peers() -> Iterator[None]:
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
