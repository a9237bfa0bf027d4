"""A child process that may die: a command or a function with limits on time, memory and output.

Code of others may crash, hang, or take all memory. It runs in a child, and whatever happens to the
child is a value (`Ended`) or an error (`ChildDied`) here. The child ends when this process does.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from tokmill import errors
from tokmill.child_serve import frame, frame_size
from tokmill.errors import MachineError, TokmillError

POLL = 0.05
"""Seconds between two checks of a child."""
START = 60.0
"""Seconds that a child may take to import the function that it is to call."""
KEPT = 64 << 10
"""The last bytes of stderr, so many, are kept."""
HEADROOM = 1 << 30
"""Bytes, at least, by which the kernel's limit on memory lies above the polled one."""
TICKS = os.sysconf("SC_CLK_TCK")


class Limits(NamedTuple):
    """What a child may use: a command in its whole run, a function in each call."""

    seconds: float = math.inf
    """Seconds on the clock."""
    cpu_seconds: float = math.inf
    """CPU seconds of all its threads."""
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
    said: str
    """The end of what it printed to stderr."""

    def why(self) -> str:
        """Return in words how it ended."""
        if self.passed:
            return f"took more than {self.passed}"
        if self.code < 0:
            return f"was killed by {_signal_name(-self.code)}"
        last = self.said.strip().splitlines()[-1:]
        return f"ended with exit code {self.code}" + (f": {last[0]}" if last else "")


class ChildDied(MachineError):
    """A child ended before it gave an answer; `ended` says how."""

    ended: Ended | None = None


class ChildError(TokmillError):
    """A function in a child raised an error that is no `TokmillError`."""


class _Running:
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
        self.out, self.said, self.answers = bytearray(), bytearray(), bytearray()
        self.stopped = False
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
        self.open = selectors.DefaultSelector()
        self.add(self.process.stdout.fileno(), self.out)
        self.add(self.process.stderr.fileno(), self.said)
        self._bound(resource.RLIMIT_CORE, 0)
        if limits.memory is not None:
            self._bound(resource.RLIMIT_DATA, limits.memory + max(limits.memory, HEADROOM))
        self.begin()

    def _bound(self, what: int, size: int) -> None:
        # Set by the parent: code between fork and exec may hang if the parent has threads.
        with contextlib.suppress(ProcessLookupError):
            _, most = resource.prlimit(self.process.pid, what)
            size = size if most == resource.RLIM_INFINITY else min(size, most)
            resource.prlimit(self.process.pid, what, (size, size))

    def add(self, stream: int, buffer: bytearray) -> None:
        """Collect the output of a stream in a buffer."""
        os.set_blocking(stream, False)
        self.open.register(stream, selectors.EVENT_READ, buffer)

    def begin(self) -> None:
        """Measure the limits from now on."""
        self.since, self.cpu_before = time.monotonic(), self._cpu()
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
            if key.data is self.said:
                del self.said[:-KEPT]
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
        if limits.cpu_seconds < math.inf and self._cpu() - self.cpu_before > limits.cpu_seconds:
            return f"{limits.cpu_seconds:,g} CPU seconds"
        if limits.memory is not None and _resident(self.process.pid) > limits.memory:
            return _mebibytes(limits.memory)
        if self.printed > limits.output:
            return f"{_mebibytes(limits.output)} of output"
        return ""

    def _cpu(self) -> float:
        if self.limits.cpu_seconds == math.inf:
            return 0.0
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return 0.0
        # The second field is the name in brackets, which may hold spaces; user and system time
        # are fields 14 and 15.
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS

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
        said = self.said.decode("utf-8", "replace")
        return Ended(self.process.returncode, passed, bytes(self.out), said)


def run(
    command: Sequence[str],
    limits: Limits,
    *,
    line: Callable[[str], bool] | None = None,
    environment: Mapping[str, str] | None = None,
    lifeline: bool = True,
) -> Ended:
    """Run a command until it ends or exceeds a limit, and return how it ended.

    `line` gets each line of stdout as it arrives; it ends the command by returning False. The
    command's stdin is a pipe without data. The pipe is closed when this process ends, in whatever
    way; a command that should end too must watch it. Without `lifeline` stdin is empty.

    Raises `OSError` if the command cannot be started.
    """
    running = _Running(command, limits, line=line, environment=environment, lifeline=lifeline)
    passed = ""
    try:
        passed = running.follow(lambda: False)
    finally:
        ended = running.end(passed)
    return ended


class Child:
    """A function that is called in a child: `with Child("package.module:name") as f: f(1)`.

    Arguments and results are plain values that msgpack holds (numbers, strings, bytes, lists,
    dicts), so that nothing a broken child sends is code. A child serves many calls; if it has
    died, the next call starts another.
    """

    def __init__(
        self, target: str, limits: Limits, *, line: Callable[[str], bool] | None = None
    ) -> None:
        self.target, self.limits, self.line = target, limits, line
        self._running: _Running | None = None
        self._requests = self._answers = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; start a child if none runs.

        Raises `ChildDied` if the child ends or exceeds a limit, the function's own `TokmillError`,
        and `ChildError` for any other exception of the function.
        """
        try:
            running = self._running or self._start()
            running.begin()
            self._send(running, frame(msgspec.msgpack.encode(arguments)))
            return self._result(running)
        except BaseException as error:
            # After an error of the function the child serves on; after any other it is ended.
            if isinstance(error, ChildDied) or not isinstance(error, TokmillError):
                self.close()
            raise

    def close(self) -> None:
        """End the child."""
        running, self._running = self._running, None
        if running is not None:
            running.end()
            self._close_pipes()

    def _close_pipes(self) -> None:
        os.close(self._requests)
        os.close(self._answers)

    def _start(self) -> _Running:
        theirs, self._requests = os.pipe()
        self._answers, other = os.pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from tokmill.child_serve import serve; "
            f"serve({self.target!r}, {theirs}, {other})"
        )
        try:
            running = _Running(
                [sys.executable, "-c", code],
                self.limits._replace(seconds=START, cpu_seconds=math.inf),
                line=self.line,
                files=(theirs, other),
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(theirs)
            os.close(other)
        running.add(self._answers, running.answers)
        os.set_blocking(self._requests, False)
        self._running = running
        self._result(running)
        running.limits = self.limits
        return running

    def _send(self, running: _Running, data: bytes) -> None:
        rest = memoryview(data)

        def sent() -> bool:
            nonlocal rest
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                rest = rest[os.write(self._requests, rest) :]
            return not rest

        # The wait must also end when the pipe has room for more.
        running.open.register(self._requests, selectors.EVENT_WRITE)
        passed = running.follow(sent)
        running.open.unregister(self._requests)
        if passed:
            raise self._died(passed)

    def _result(self, running: _Running) -> Any:
        answers = running.answers

        def whole() -> bool:
            # A broken child may have written any size.
            size = min(frame_size(answers), self.limits.output)
            return len(answers) >= 8 and len(answers) >= 8 + size

        passed = running.follow(whole)
        while not passed and not whole() and running.gather(0):
            pass
        if passed or not whole():
            raise self._died(passed)
        size = 8 + frame_size(answers)
        try:
            kind, value = msgspec.msgpack.decode(bytes(answers[8:size]), type=tuple[str, Any])
        except msgspec.DecodeError:
            raise self._died("", "gave an answer that cannot be read") from None
        del answers[:size]
        if kind == "value":
            return value
        if kind == "MemoryError" and self.limits.memory is not None:
            raise self._died(_mebibytes(self.limits.memory))
        raise _error(kind, value)

    def _died(self, passed: str, why: str = "") -> ChildDied:
        running, self._running = self._running, None
        assert running is not None
        ended = running.end(passed)
        self._close_pipes()
        died = ChildDied(
            f"the process that calls {self.target} {why or ended.why()}",
            hint="its arguments made it fail, or its limits are too small",
        )
        died.ended = ended
        return died


def call(
    target: str,
    *arguments: Any,
    limits: Limits,
    line: Callable[[str], bool] | None = None,
) -> Any:
    """Call a function once, in a new child; see `Child`."""
    with Child(target, limits, line=line) as child:
        return child(*arguments)


def _error(kind: str, value: Any) -> TokmillError:
    """Return the error that a function raised in a child."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, TokmillError) and len(value) == 3:
        what, where, hint = map(str, value)
        return known(what, where=where, hint=hint)
    return ChildError(f"{kind}: {value}", hint="the function itself failed in the child")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _resident(pid: int) -> int:
    # Anonymous memory alone: the kernel can drop pages of mapped files.
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    _, _, rest = status.partition("RssAnon:")
    return int(rest.split()[0]) * 1024 if rest else 0
