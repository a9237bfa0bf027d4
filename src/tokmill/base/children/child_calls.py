"""Functions that are called in a child process, which may die (`child`).

Whatever happens to the child is a result or an error (`ChildDied`, `ChildError`) here.
"""

import atexit
import contextlib
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Self

import msgspec

from tokmill.base import errors
from tokmill.base.children.child import Ended, Limits, Running, mebibytes
from tokmill.base.children.child_serve import frame, frame_size
from tokmill.base.errors import MachineError, TokmillError

REMOVE = 'read -r line; rm -rf -- "$1" || { sleep 1; rm -rf -- "$1"; }'
"""Waits until its stdin ends. What still writes at that moment ends with the same process."""


class Scratch:
    """A temporary folder, `path`, with a shell beside it that removes it when this process ends.

    Commands end by `os._exit` and workers are killed, so nothing in this process can be relied on.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="tokmill-")
        try:
            # A session of its own: the terminal's Ctrl-C does not reach it.
            self._remover = subprocess.Popen(
                ["/bin/sh", "-c", REMOVE, "tokmill-scratch", self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._remover.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._remover.stdin.close()
        self._remover.wait()


START = 600.0
"""Seconds that a child may take to import the function that it is to call: libraries over NFS."""


class ChildDied(MachineError):
    """A child ended before it gave an answer; `ended` says how."""

    ended: Ended | None = None


class ChildError(TokmillError):
    """A function in a child raised an error that is not a `TokmillError`."""


class Child:
    """A function that is called in a child: `with Child("package.module:name") as f: f(1)`.

    Arguments and results are plain values that msgpack holds (numbers, strings, bytes, lists,
    dicts), so that nothing a broken child sends is code. A child serves many calls; if it has
    died, the next call starts another. Its temporary files lie in a folder of its own, which goes
    with it: one that is killed removes none.
    """

    def __init__(
        self, target: str, limits: Limits, *, line: Callable[[str], bool] | None = None
    ) -> None:
        self.target, self.limits, self.line = target, limits, line
        self._running: Running | None = None
        self._scratch: Scratch | None = None
        self._requests = self._answers = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; start a child if none runs.

        Raises `ChildDied` if the child ends or exceeds a limit, the function's own `TokmillError`,
        and `ChildError` for any other exception of the function.
        """
        try:
            running = self._running or self._start()
            running.limits = self.limits
            running.begin()
            self._send(running, frame(msgspec.msgpack.encode(arguments)))
            return self._result(running)
        except BaseException as error:
            # After an error of the function the child serves on; after any other it is ended.
            if isinstance(error, ChildDied) or not isinstance(error, TokmillError):
                self.close()
            raise

    def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()
            self._clear()

    def _clear(self) -> None:
        os.close(self._requests)
        os.close(self._answers)
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def _start(self) -> Running:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from tokmill.base.children.child_serve import serve; "
            f"serve({self.target!r}, {requests}, {answers})"
        )
        try:
            self._scratch = Scratch()
            running = Running(
                [sys.executable, "-P", "-c", code],
                self.limits._replace(seconds=START),
                line=self.line,
                environment=os.environ | {"TMPDIR": self._scratch.path},
                files=(requests, answers),
            )
        except BaseException:
            self._clear()
            raise
        finally:
            os.close(requests)
            os.close(answers)
        running.add(self._answers, running.answers)
        os.set_blocking(self._requests, False)
        self._running = running
        self._result(running)
        return running

    def _send(self, running: Running, data: bytes) -> None:
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

    def _result(self, running: Running) -> Any:
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
            raise self._died(mebibytes(self.limits.memory))
        raise _error(kind, value)

    def _died(self, passed: str, why: str = "") -> ChildDied:
        running, self._running = self._running, None
        assert running is not None
        ended = running.end(passed)
        self._clear()
        died = ChildDied(
            f"the process that calls {self.target} {why or ended.why()}",
            hint="its arguments made it fail, or its limits are too small",
        )
        died.ended = ended
        return died


def call(
    target: str, *arguments: Any, limits: Limits, line: Callable[[str], bool] | None = None
) -> Any:
    """Call a function once, in a new child; see `Child`."""
    with Child(target, limits, line=line) as child:
        return child(*arguments)


_shared: dict[tuple[int, str], Child] = {}


def shared(target: str, limits: Limits) -> Child:
    """Return the child of this process for a function; it is started once and ends with it."""
    key = os.getpid(), target
    if key not in _shared:
        for other in [one for one in _shared if one[0] != key[0]]:
            del _shared[other]
        _shared[key] = Child(target, limits)
        atexit.register(_shared[key].close)
    return _shared[key]


def _error(kind: str, value: Any) -> TokmillError:
    kind_of_error = getattr(errors, kind, None)
    if (
        isinstance(kind_of_error, type)
        and issubclass(kind_of_error, TokmillError)
        and len(value) == 3
    ):
        what, where, hint = map(str, value)
        return kind_of_error(what, where=where, hint=hint)
    return ChildError(f"{kind}: {value}", hint="the function itself failed in the child")
