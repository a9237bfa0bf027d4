"""One of several processes that share each step: how they meet, and how they end together.

`Ddp` and DeepSpeed decide what the processes share and exchange. On CPUs they
communicate through gloo, on GPUs (one for each process) through NCCL; the latter is not tested.
"""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from tokmill.base.errors import Interrupted, MachineError, TokmillError, UsageError
from tokmill.models.model import Tensors
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.device import seed_for, set_torch_states, torch_states
from tokmill.training.engines.engine import Engine, Pull
from tokmill.training.launch import (
    LAUNCHED,
    LOST,
    check_host,
    interface_to,
    place,
    report_waiting,
)
from tokmill.training.recipe.config import EngineConfig, OptimConfig, RunConfig

ENDED = "ended"
"""Key of the shared store: the first process that fails writes "rank exit-code" for the others."""
MASTER = "MASTER_ADDR"
"""Environment variable of torchrun: the address of the first process."""
WORD = timedelta(seconds=5)
"""How long a process that lost a peer waits for the peer's entry under `ENDED`."""
LOST_WORDS = ("gloo", "NCCL", "Connection", "Socket", "TCPStore")
"""Words in torch's errors about lost peers, which have no exception type of their own."""

_runs = itertools.count()
"""Counts the trainings of this process; each has its own prefix in the shared store."""

_groups: list[Any] = []
"""Groups of processes, kept until this process ends. Whoever drops the last reference waits for the
group's threads while it holds Python's lock, and the threads may wait for that lock: DDP hung this
way. DeepSpeed's processes could abort at their end; since its groups are kept too, that has not
been seen again."""


class LostProcess(MachineError):
    """Another process of the training is gone."""


class Several(Engine):
    """One of `world` processes. At an error one process reports it and the others end silently."""

    store: PrefixStore | None = None

    def __init__(self, config: RunConfig, settings: EngineConfig | None = None) -> None:
        here = place()
        self.rank, self.world = here.rank, here.world
        try:
            self._join()
            super().__init__(config, settings)
        except TokmillError as error:
            self._leave(error)
            raise

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        super().prepare(task, optim)
        if self.world > 1:
            # From here on each process draws its own dropout; the first weights were equal.
            seed_for(self.config.seed, 0, self.rank)

    def total(self, values: Sequence[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64)
        with peers():
            dist.all_reduce(sums)
        return sums.tolist()

    def gather(self, value: Tensor) -> list[Tensor]:
        counts = [0.0] * self.world
        counts[self.rank] = len(value)
        sizes = [int(count) for count in self.total(counts)]
        padded = value.new_zeros(max(sizes), *value.shape[1:])
        padded[: len(value)] = value
        parts = [torch.empty_like(padded) for _ in sizes]
        with peers():
            dist.all_gather(parts, padded)
        return [one[:size] for one, size in zip(parts, sizes, strict=True)]

    @contextlib.contextmanager
    def lead(self, context: AbstractContextManager[None]) -> Iterator[None]:
        with context if self.rank == 0 else contextlib.nullcontext():
            self.barrier()
            yield

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            try:
                # Rank 0 may still write.
                self.barrier()
            except LostProcess as lost:
                self._leave(lost)
                raise
            self._part_ways()
        elif self.world == 1:
            # No other process waits for this one to end, and it may train again.
            self._part_ways()
        else:
            self._leave(error)

    def _join(self) -> None:
        store: Any = HashStore()
        if self.world > 1:
            host, port = (os.environ.get(name, "") for name in (MASTER, "MASTER_PORT"))
            if host:
                check_host(host, MASTER)
                if place().local_world < self.world and (device := interface_to(host)):
                    # gloo takes the address of the machine's own name, which may be 127.0.0.1.
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
            try:
                with peers(), report_waiting(f"the first process, at {host}:{port}"):
                    store, _, _ = next(rendezvous("env://", self.rank, self.world))
            except ValueError as error:
                raise UsageError(
                    f"the processes cannot meet: {error}",
                    hint="start them with torchrun, or with `tokmill train --processes N`",
                ) from error
        self.store = PrefixStore(f"tokmill/{next(_runs)}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with peers(), report_waiting(f"{self.world - 1} other processes"):
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=self.world
            )
        _groups.append(dist.group.WORLD)

    def _part_ways(self) -> None:
        _groups.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()

    def _leave(self, error: BaseException) -> None:
        """Let one process report the error; the others exit silently with its exit code.

        When a process ends, the others notice it as soon as they wait for it.
        """
        if "LOCAL_RANK" in os.environ and threading.current_thread() is threading.main_thread():
            # When one process has ended, torchrun sends a signal to the others. This one is ending
            # already.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.store is None:
            return  # They never met.
        code = 3 if isinstance(error, KeyboardInterrupt) else 70
        if isinstance(error, TokmillError):
            code = error.exit_code
        ending, teller = f"{self.rank} {code}", 0 if isinstance(error, Interrupted) else self.rank
        try:
            if isinstance(error, Interrupted) and self.rank > 0:
                # Rank 0 reports it, after it has written its files.
                self.store.wait([ENDED])
            if isinstance(error, LostProcess):
                # The peer reports the reason, if it was not killed.
                with contextlib.suppress(dist.DistStoreError):
                    self.store.wait([ENDED], WORD)
            teller, code = map(int, self.store.compare_set(ENDED, "", ending).decode().split())
        except RuntimeError:
            pass  # The store went with its process.
        if teller != self.rank:
            raise SystemExit(code) from None
        if isinstance(error, LostProcess) and LAUNCHED in os.environ:
            raise SystemExit(LOST) from None


@contextlib.contextmanager
def peers() -> Iterator[None]:
    """Turn torch's errors about other processes into `LostProcess`."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(word in text for word in LOST_WORDS):
            raise
        raise LostProcess(
            "another process of the training has ended, or cannot be reached",
            hint="if it left no message, it was killed, perhaps because memory ran out; "
            "the same command continues from the newest checkpoint",
        ) from error


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
            self._warm_up_backward(batch, pull)
        with contextlib.nullcontext() if last else self.learner.no_sync(), peers():
            # DDP divides by the number of processes.
            return super().micro(batch, last, scale * self.world, pull)

    def _place(self, task: Task) -> None:
        super()._place(task)
        with peers():
            self.learner = DistributedDataParallel(
                self.plain, forward_sync_buffers=False, gradient_as_bucket_view=True
            )

    def _warm_up_backward(self, batch: Tensors, pull: Pull | None) -> None:
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
