"""Panics of libraries in Rust: a `BaseException` that is no `Exception`, and lines on stderr."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_one_at_a_time = threading.Lock()


class Panic(ValueError):
    """A library in Rust panicked."""


@contextlib.contextmanager
def no_panic(*, hide: bool = False) -> Iterator[None]:
    """Turn a panic of a library in Rust into the exception `Panic`.

    Rust also writes the place in its source to stderr, and a trace if RUST_BACKTRACE is set.

    Args:
        hide: if the library panics, drop its output on stderr. During the call the stderr of the
            whole process is held back, also that of other threads, so this is for short calls.

    Raises `Panic` with the first line of its message.
    """
    with _Held() if hide else contextlib.nullcontext() as held:
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            if held is not None:
                held.drop()
            lines = str(error).splitlines() or ["it gave up"]
            raise Panic(lines[0][:300]) from None


class _Held:
    """Holds back the output of this process on file descriptor 2 until the end."""

    def __enter__(self) -> _Held:
        _one_at_a_time.acquire()
        self._kept = self._held = -1
        with contextlib.suppress(OSError):
            self._kept = os.dup(2)
            self._held = os.memfd_create("stderr")
            os.dup2(self._held, 2)
        return self

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._held, 0)

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.suppress(OSError):
                os.dup2(self._kept, 2)
                os.lseek(self._held, 0, os.SEEK_SET)
                while block := os.read(self._held, 1 << 16):
                    os.write(2, block)
            for descriptor in (self._kept, self._held):
                if descriptor >= 0:
                    os.close(descriptor)
        finally:
            _one_at_a_time.release()
