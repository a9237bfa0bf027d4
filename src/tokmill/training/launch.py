"""Several processes: where this one stands among them, and torchrun, which starts them.

torchrun tells each process RANK, WORLD_SIZE, LOCAL_RANK and where the others are (MASTER_*); any
other starter that sets these serves as well. `tokmill train --processes N` is torchrun in a process
of its own, with exit codes and errors that are those of the training. Nothing here imports torch
before processes are started.
"""

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

import msgspec

from tokmill import plugins
from tokmill.base.errors import MachineError, TokmillError, UsageError, shell_word
from tokmill.base.recipe import Positive, check_types

LAUNCHED = "TOKMILL_LAUNCHED"
"""Environment variable of processes that `--processes` started: their launcher reports a lost
one."""
LOST = 75
"""Exit code of a launched process that lost its peers. The launcher knows which one ended first."""
FLAGS = ("--processes", "--nodes", "--node-rank", "--master")
"""Flags of the launcher, which are not passed on to the processes."""
STANDALONE = "--standalone"
SUPERVISED = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets for its processes."""
PATIENCE = 20.0
"""Seconds that a process waits before it exits, while the first one of its machine reports an
error."""
HERE = "127.0.0.1"
"""The address of this machine; no name has to be looked up."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """One of `world` processes: its number among all of them, and among those of its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def place() -> Place:
    """Return the place that the environment gives this process; a single process by default."""
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


def resume_command(run: Path) -> str:
    here = place()
    flags = f" --processes {here.world}" if here.world == here.local_world > 1 else ""
    return f"tokmill train -o {shell_word(run)}{flags}"


USES = {
    "classify": "predict RUN INPUT",
    **dict.fromkeys(["masked", "sentence_pair", "contrastive", "signature"], "embed RUN STORE"),
}
"""Task of a run that is not sampled → the command that uses it."""


def use_command(run: Path, task: str, facts: Any) -> str:
    """Return the command that samples a run, or else uses it; "": there is none.

    facts: those of the store that it learned from, with `columns`, `schema`, `vocabularies` and
    `measures`.
    """
    folder = shell_word(run)
    if not facts.measures.continues:
        use = USES.get(task, "")
        return f"tokmill {use.replace('RUN', folder)}" if use else ""
    names = [facts.schema[name].vocab for name in facts.columns if name in facts.schema]
    coders = [facts.vocabularies[name].coder for name in names if name in facts.vocabularies]
    if not coders and len(facts.columns) == 1:
        return f"tokmill sample {folder} --ids 1,2,3"
    if not coders or len(coders) < len(facts.columns):
        return ""
    prompt = "TEXT" if coders[0] == "tokenizer" else '"55 48 89 e5"'
    return f"tokmill sample {folder} --prompt {prompt}"


class Launch(msgspec.Struct, frozen=True):
    """How many processes are started, on how many machines."""

    processes: Positive = 1
    """Processes on this machine that share each step, one for each GPU."""
    nodes: Positive = 1
    """Number of machines; start it on each of them."""
    node_rank: int = 0
    """Number of this machine, from 0."""
    master: str = ""
    """HOST:PORT of machine 0, a free port."""

    @property
    def several(self) -> bool:
        return self.processes > 1 or self.nodes > 1

    def check(self) -> None:
        """Raise `UsageError` for numbers that do not fit together."""
        check_types(self)
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
        if self.several and place().world > 1:
            raise UsageError(
                "--processes starts processes, and this one was started as one of several",
                hint="leave --processes out under torchrun",
            )

    def torchrun(self, arguments: Sequence[str]) -> list[str]:
        """Return torchrun's arguments, which start `tokmill` with all `arguments` but `FLAGS`."""
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
        return shlex.join(["torchrun", *self.torchrun(arguments)])

    def run(self, arguments: Sequence[str]) -> int:
        """Start the processes, wait for their end, and return the training's exit code.

        The first signal is handed on, so that they save a checkpoint; a second one kills them.
        """
        # torchrun would set one thread a process.
        threads = max(1, len(os.sched_getaffinity(0)) // self.processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ[LAUNCHED] = "1"
        # When torchrun handles a signal, it kills the processes after 30 seconds and loses their
        # exit codes. So it gets a signal that nobody sends.
        options, command = ["--signals-to-handle=SIGQUIT"], self.torchrun(arguments)
        if self.nodes == 1:
            # Addresses in place of names: a small system may know neither its own name nor
            # localhost, which --standalone uses.
            options += [f"--local-addr={HERE}", "--rdzv-backend=c10d", f"--rdzv-endpoint={HERE}:0"]
            command.remove(STANDALONE)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            # For its messages torch looks up the name of an address. Without an answer it would
            # wait for half a minute and warn.
            os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        else:
            check_host(self.master.rpartition(":")[0], "--master")
        with _quiet(), _forward_signals() as signals:
            codes = _torchrun([*options, *command])
        reported = [code for code in codes.values() if code > 0 and code != LOST]
        if reported or not codes:
            return reported[0] if reported else 0
        if signals:
            raise KeyboardInterrupt
        rank, code = min(codes.items(), key=lambda item: (item[1] == LOST, item[1] == -15))
        name = signal.Signals(-code).name if code < 0 else ""
        raise MachineError(
            f"process {rank} was killed by {name}" if name else "a process elsewhere ended",
            hint="if memory ran out, a smaller run.micro_tokens needs less of it; "
            "the same command continues from the newest checkpoint",
        )


def begin_worker() -> None:
    """Make one of several processes end when its launcher ends, and at once at a signal.

    Before the first step there is nothing to save, and Python sees no signal while torch waits for
    the other processes. The training loop handles signals later.
    """
    if place().world > 1:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def one_error_per_machine() -> Iterator[None]:
    """Let only the first process of a machine report an error that all of them find."""
    try:
        yield
    except TokmillError as error:
        if place().local_rank:
            if SUPERVISED in os.environ:
                # torchrun ends all processes when one has ended, perhaps before the first one has
                # reported the error. So this one waits; torchrun ends it before the time is over.
                time.sleep(PATIENCE)
            sys.exit(error.exit_code)
        raise


def check_host(host: str, where: str) -> None:
    """Raise `MachineError` for a name that is unknown here: torch would try for minutes."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MachineError(
            f"the machine {host!r} cannot be found: {error.strerror}",
            where=where,
            hint=f"give its address in numbers, such as {HERE} for this machine, or add the name "
            "to the hosts file of each machine",
        ) from error


def interface_to(host: str) -> str:
    """Return the network interface of this machine that leads to another one; "": none is found."""
    kind, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as one:
        one.connect(address)  # Sends nothing.
        own = one.getsockname()[0]
        for name, addresses in plugins.require("psutil").net_if_addrs().items():
            if any(each.address == own for each in addresses):
                return str(name)
    return ""


@contextlib.contextmanager
def report_waiting(what: str, seconds: float = 5.0) -> Iterator[None]:
    """Print what the process waits for, if it takes longer than some seconds."""
    timer = threading.Timer(seconds, lambda: print(f"waiting for {what}", file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _torchrun(arguments: list[str]) -> dict[int, int]:
    """Run torchrun in this process; return the exit codes of failed processes (-n: signal n)."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
    return {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torchrun, which logs tracebacks; the processes report their errors themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _forward_signals() -> Iterator[list[int]]:
    """Send the first signal on to the processes, and kill them at the second one.

    Yields the list of signals that have come.
    """
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
        raise UsageError(f"the variable {name} is {text!r}", hint="torchrun sets it to a number")
    return int(text)
