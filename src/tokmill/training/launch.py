"""Several processes: where this one stands among them, and torchrun, which starts them.

torchrun tells each process RANK, WORLD_SIZE, LOCAL_RANK and where the others are (MASTER_*); any
other starter that sets these serves as well. `tokmill train --processes N` is torchrun in a process
of its own, with exit codes and errors that are those of the training. Nothing here imports torch
before processes are started.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tokmill import plugins
from tokmill.errors import MachineError, TokmillError, UsageError

LAUNCHED = "TOKMILL_LAUNCHED"
"""Is set for the processes of `--processes`: their launcher says what they cannot."""
LOST = 75
"""Exit code of a launched process whose peers are gone: its launcher knows more."""
FLAGS = ("--processes", "--nodes", "--node-rank", "--master", "--devices")
"""What `Launch` holds, as it stands on the command line; the processes do without."""
STANDALONE = "--standalone"
SUPERVISED = "TORCHELASTIC_RUN_ID"
"""Is set where torchrun looks after the processes."""
PATIENCE = 20.0
"""Seconds that a process which says nothing leaves to the one that tells the error."""
HERE = "127.0.0.1"
"""This machine, by an address that needs no name."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable by which CUDA knows which GPUs a process may use."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """One process among `world`: its number in all, and on its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def place() -> Place:
    """Return where this process stands, as its starter said; one process where none did."""
    world = _number("WORLD_SIZE", 1)
    if world < 2:
        return Place()
    rank = _number("RANK", -1)
    if not 0 <= rank < world:
        raise UsageError(
            f"WORLD_SIZE is {world}, and RANK {'is not set' if rank < 0 else f'is {rank}'}",
            hint="start the processes with torchrun, or with `tokmill train --processes N`",
        )
    return Place(rank, world, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", world))


def resume_flags() -> str:
    """Return " --processes N" where the processes of this run are all on this machine."""
    here = place()
    return f" --processes {here.world}" if here.world == here.local_world > 1 else ""


def resume_command(run: Path) -> str:
    """Return the command that continues a run."""
    return f"tokmill train --resume -o {shlex.quote(str(run))}{resume_flags()}"


def gpus_of(text: str) -> tuple[str, ...]:
    """Return the GPUs that `--devices` names, as CUDA_VISIBLE_DEVICES wants them.

    "2" is so many, "0,3" are those with these numbers and "3," is one of them. They are numbered
    among those that CUDA_VISIBLE_DEVICES shows already. Raises `UsageError` for what is neither.
    """
    if not text:
        return ()
    if not re.fullmatch(r"\d+|(\d+,)+\d*", text):
        raise UsageError(
            f"--devices: {text!r} is neither a number of GPUs nor a list of their numbers",
            hint="--devices 2 takes two of them, --devices 0,3 those two, --devices 3, that one",
        )
    numbers: Sequence[int] = range(int(text.split(",")[0]))
    if "," in text:
        numbers = [int(one) for one in text.split(",") if one]
    if not numbers:
        raise UsageError(
            f"--devices: {text!r} is a number of GPUs, so it names none",
            hint="--devices 0, with its comma takes GPU 0 alone; for the CPU, leave --devices out",
        )
    if len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--devices: {text!r} names a GPU twice",
            hint="each process takes a GPU of its own",
        )
    shown = [one for one in os.environ.get(VISIBLE, "").split(",") if one]
    if VISIBLE in os.environ and max(numbers) >= len(shown):
        raise UsageError(
            f"--devices: the variable {VISIBLE} shows {len(shown)} GPUs, and number {max(numbers)} "
            "is none of them",
            hint="they are numbered from 0",
        )
    return tuple(shown[number] if shown else str(number) for number in numbers)


@dataclass(frozen=True)
class Launch:
    """How many processes are started, on how many machines and GPUs.

    `master` is HOST:PORT of the first machine.
    """

    processes: int = 1
    """On each machine."""
    nodes: int = 1
    node_rank: int = 0
    master: str = ""
    gpus: tuple[str, ...] = ()
    """One for each process of this machine (`gpus_of`); none: as they are found."""

    @property
    def several(self) -> bool:
        """Whether there is anything to start."""
        return self.processes > 1 or self.nodes > 1

    def check(self) -> None:
        """Refuse numbers that start nothing."""
        for flag, value in (("--processes", self.processes), ("--nodes", self.nodes)):
            if value < 1:
                raise UsageError(f"{flag}: {value} is below 1", hint=f"{flag} 1 is the least")
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(
                f"--node-rank: {self.node_rank} is none of {self.nodes} machines",
                hint=f"number them 0 to {self.nodes - 1}, each once",
            )
        if (self.nodes > 1) != bool(self.master) or (
            self.master and not re.fullmatch(r".+:\d+", self.master)
        ):
            raise UsageError(
                f"--master: {self.master!r} with {self.nodes} machines",
                hint="with several machines, name a port of the first one: --master HOST:PORT",
            )
        if self.gpus and len(self.gpus) != self.processes:
            raise UsageError(
                f"--devices: {len(self.gpus)} GPUs for {self.processes} processes",
                hint="each process takes one: leave --processes out, or name as many GPUs",
            )
        if (self.several or self.gpus) and place().world > 1:
            raise UsageError(
                "--processes starts processes, and this one was started as one of several",
                hint="leave --processes and --devices out under torchrun",
            )

    def torchrun(self, arguments: Sequence[str]) -> list[str]:
        """Return torchrun's arguments that start `tokmill` with the rest of its own."""
        kept, skip = [], False
        for argument in arguments:
            name, given, _ = argument.partition("=")
            if not skip and name not in (*FLAGS, "--dry-run"):
                kept.append(argument)
            skip = not skip and name in FLAGS and not given
        where = [STANDALONE]
        if self.nodes > 1:
            host, _, port = self.master.rpartition(":")
            where = [f"--nnodes={self.nodes}", f"--node-rank={self.node_rank}"]
            where += [f"--master-addr={host}", f"--master-port={port}"]
        return [*where, f"--nproc-per-node={self.processes}", "-m", "tokmill", *kept]

    def line(self, arguments: Sequence[str]) -> str:
        """Return the command that does the same by hand."""
        first = f"{VISIBLE}={','.join(self.gpus)} " if self.gpus else ""
        return first + shlex.join(["torchrun", *self.torchrun(arguments)])

    def take_gpus(self) -> None:
        """Let this process, and those that it starts, see these GPUs alone.

        Raises `UsageError` where the machine does not have them.
        """
        if not self.gpus:
            return
        os.environ[VISIBLE] = ",".join(self.gpus)
        from torch import cuda

        found = cuda.device_count()
        if found < len(self.gpus):
            raise UsageError(
                f"--devices: torch sees {found} of the {len(self.gpus)} GPUs {','.join(self.gpus)}",
                hint="`tokmill doctor` says which there are; without --devices, the CPU is taken "
                "where there is none",
            )

    def run(self, arguments: Sequence[str]) -> int:
        """Start the processes, wait for their end, and return the training's exit code.

        The first signal is handed on, so that they save a checkpoint; a second one kills them.

        Raises:
            KeyboardInterrupt: a signal ended them before they could save.
            MachineError: one of them was killed.
        """
        self.take_gpus()
        # torchrun would take one thread a process.
        threads = max(1, len(os.sched_getaffinity(0)) // self.processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ[LAUNCHED] = "1"
        # At a signal that is left to it, torchrun gives the processes 30 seconds and forgets their
        # exit codes.
        ours, given = ["--signals-to-handle=SIGQUIT"], self.torchrun(arguments)
        if self.nodes == 1:
            # The machine's name need not be known anywhere.
            ours += [f"--local-addr={HERE}", "--rdzv-backend=c10d", f"--rdzv-endpoint={HERE}:0"]
            # It says the same of localhost, a name that a small system may not know.
            given.remove(STANDALONE)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            # torch asks which name an address has, for its messages: where nobody answers, the
            # default is to wait for half a minute, and to warn.
            os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        else:
            check_host(self.master.rpartition(":")[0], "--master")
        with _quiet(), _handing_on() as signals:
            codes = _torchrun([*ours, *given])
        told = [code for code in codes.values() if code > 0 and code != LOST]
        if told or not codes:
            return told[0] if told else 0
        if signals:
            raise KeyboardInterrupt
        rank, code = min(codes.items(), key=lambda found: (found[1] == LOST, found[1] == -15))
        name = signal.Signals(-code).name if code < 0 else ""
        raise MachineError(
            f"process {rank} was killed by {name}" if name else "a process elsewhere ended",
            hint="where memory ran out, a smaller run.micro_tokens needs less of it; "
            "the same command with --resume continues from the newest checkpoint",
        )


def begin_worker() -> None:
    """Make a process that was started as one of several end with its starter, and quietly.

    Before the first step there is nothing to save, and while it waits for the others Python could
    not see a signal: so a signal simply ends it, until the loop takes signals over.
    """
    if place().world > 1:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def one_a_machine() -> Iterator[None]:
    """Let the first process of a machine tell what all of them find wrong."""
    try:
        yield
    except TokmillError as error:
        if place().local_rank:
            if SUPERVISED in os.environ:
                # torchrun ends all when one has ended, and the first may not have spoken yet. It
                # ends this one too, before the time is over.
                time.sleep(PATIENCE)
            sys.exit(error.exit_code)
        raise


def check_host(host: str, where: str) -> None:
    """Refuse the name of a machine that this one cannot find; torch would try for minutes."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MachineError(
            f"the machine {host!r} cannot be found: {error.strerror}",
            where=where,
            hint=f"give its address in numbers, such as {HERE} for this machine, or write the name "
            "into the hosts file of each machine",
        ) from error


@contextlib.contextmanager
def told_when_waiting(what: str, seconds: float = 5.0) -> Iterator[None]:
    """Say on stderr what is waited for, if it takes longer than some seconds."""
    timer = threading.Timer(seconds, lambda: print(f"waiting for {what}", file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _torchrun(arguments: list[str]) -> dict[int, int]:
    """Run torchrun here; return the exit code of each process that failed (-n: by signal n)."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
    return {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torchrun, which logs tracebacks of its own; the processes speak for themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _handing_on() -> Iterator[list[int]]:
    """Hand the first signal on to the processes, kill them on a second; yield those that came."""
    psutil = plugins.require("psutil")
    came: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        came.append(number)
        children = psutil.Process().children()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.send_signal(signal.SIGTERM if len(came) == 1 else signal.SIGKILL)
        if not children:
            raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGINT)
    before: dict[int, Any] = {number: signal.signal(number, take) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"-?\d+", text):
        raise UsageError(f"the variable {name} is {text!r}", hint="it is set by torchrun, a number")
    return int(text)
