"""A child process that may die: a command with limits on time, memory and output.

Foreign code may crash, hang, or take all memory. It runs in a child, and whatever happens to the
child is a value (`Ended`) here. The child ends when this process does. `child_calls` calls
functions in such a child.
"""

import contextlib
import math
import os
import resource
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

POLL = 0.05
"""Seconds between two checks of a child."""
KEPT = 64 << 10
"""Bytes of the end of stderr that are kept."""
HEADROOM = 1 << 30
"""Least bytes by which the kernel's limit on memory is above the polled one."""


class Limits(NamedTuple):
    """What a child may use: a command in its whole run, a function in each call."""

    seconds: float = math.inf
    """Seconds on the clock."""
    memory: int | None = None
    """Anonymous resident bytes, checked 20 times a second. The kernel refuses allocations beyond
    twice that, or 1 GiB more if that is larger, so growth between two checks is bounded too. The
    child's own children are not counted."""
    output: int = 64 << 20
    """Bytes that it may print. The answer of a function may have as many."""


class Ended(NamedTuple):
    """How a child ended."""

    code: int
    """Exit code, or minus the signal that ended it."""
    passed: str
    """The limit that it exceeded, in words ("3 seconds", "48 MiB"); "" for none."""
    out: bytes
    """What it printed to stdout."""
    stderr: str
    """The end of what it printed to stderr."""

    def why(self) -> str:
        if self.passed:
            return f"took more than {self.passed}"
        if self.code < 0:
            return f"was killed by {_signal_name(-self.code)}"
        last = self.stderr.strip().splitlines()[-1:]
        return f"ended with exit code {self.code}" + (f": {last[0]}" if last else "")


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Let Ctrl-C wait until the end: a child that is not known yet cannot be ended."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        signal.raise_signal(signal.SIGINT)


class Running:
    """A child that has been started: collects its output and checks its limits."""

    def __init__(
        self,
        command: Sequence[str],
        limits: Limits,
        *,
        line: Callable[[str], bool] | None = None,
        environment: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
        lifeline: bool = True,
    ) -> None:
        self.limits, self.line = limits, line
        self.out, self.stderr, self.answers = bytearray(), bytearray(), bytearray()
        self.stopped = False
        self.open = selectors.DefaultSelector()
        try:
            with _ctrl_c_waits():
                self._start(command, environment, files, lifeline)
        except KeyboardInterrupt:
            if hasattr(self, "process"):
                self.end()
            raise

    def _start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        files: Sequence[int],
        lifeline: bool,
    ) -> None:
        # A session of its own: the terminal's Ctrl-C does not reach it, and killing the group
        # kills what it started too.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=files,
            env=environment,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.add(self.process.stdout.fileno(), self.out)
        self.add(self.process.stderr.fileno(), self.stderr)
        self._bound(resource.RLIMIT_CORE, 0)
        # Without a limit of its own it must not inherit that of `bounds`.
        memory = resource.RLIM_INFINITY
        if self.limits.memory is not None:
            memory = self.limits.memory + max(self.limits.memory, HEADROOM)
        self._bound(resource.RLIMIT_DATA, memory)
        self.begin()

    def _bound(self, what: int, size: int) -> None:
        # Set by the parent: code between fork and exec may hang if the parent has threads.
        with contextlib.suppress(ProcessLookupError):
            _, most = resource.prlimit(self.process.pid, what)
            if most != resource.RLIM_INFINITY:
                size = most if size == resource.RLIM_INFINITY else min(size, most)
            resource.prlimit(self.process.pid, what, (size, size))

    def add(self, stream: int, buffer: bytearray) -> None:
        os.set_blocking(stream, False)
        self.open.register(stream, selectors.EVENT_READ, buffer)

    def begin(self) -> None:
        """Measure the limits from now on."""
        self.since = time.monotonic()
        self.printed = self.lines = 0
        self.out.clear()

    def follow(self, done: Callable[[], bool]) -> str:
        """Wait for `done`, the child's end or an exceeded limit; return that limit, else ""."""
        while not done() and self.process.poll() is None and not self.stopped:
            if self.open.get_map():
                self.gather(POLL)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(POLL)
            if passed := self._excess():
                return passed
        return ""

    def gather(self, pause: float) -> bool:
        """Read what arrives within `pause` seconds; return whether there was something."""
        ready = self.open.select(pause)
        for key, _ in ready:
            if key.data is None:
                continue
            try:
                data = os.read(key.fd, 1 << 20)
            except BlockingIOError:
                continue
            if not data:
                self.open.unregister(key.fd)
            key.data.extend(data)
            if key.data is self.answers:
                continue
            self.printed += len(data)
            if key.data is self.stderr:
                del self.stderr[:-KEPT]
            elif self.line is not None:
                self._tell(self.line)
        return bool(ready)

    def _tell(self, line: Callable[[str], bool]) -> None:
        while (stop := self.out.find(b"\n", self.lines)) >= 0 and not self.stopped:
            text = self.out[self.lines : stop].decode("utf-8", "replace")
            self.lines = stop + 1
            self.stopped = not line(text)

    def _excess(self) -> str:
        limits = self.limits
        if time.monotonic() - self.since > limits.seconds:
            return f"{limits.seconds:,g} seconds"
        if limits.memory is not None and _resident(self.process.pid) > limits.memory:
            return mebibytes(limits.memory)
        if self.printed > limits.output:
            return f"{mebibytes(limits.output)} of output"
        return ""

    def end(self, passed: str = "") -> Ended:
        """Kill the child if it still runs, and return how it ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while self.printed <= self.limits.output and self.open.get_map() and self.gather(0):
            pass
        self.open.close()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        stderr = self.stderr.decode("utf-8", "replace")
        return Ended(self.process.returncode, passed, bytes(self.out), stderr)


def run(command: Sequence[str], limits: Limits, *, lifeline: bool = True) -> Ended:
    """Run a command until it ends or exceeds a limit, and return how it ended.

    The command's stdin is a pipe without data. The pipe is closed when this process ends, in
    whatever way; a command that should end too must watch it. Without `lifeline` stdin is empty.

    Raises `OSError` if the command cannot be started.
    """
    running = Running(command, limits, lifeline=lifeline)
    passed = ""
    try:
        passed = running.follow(lambda: False)
    finally:
        ended = running.end(passed)
    return ended


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _resident(pid: int) -> int:
    # Anonymous memory alone: the kernel can drop pages of mapped files.
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    _, _, rest = status.partition("RssAnon:")
    return int(rest.split()[0]) * 1024 if rest else 0
