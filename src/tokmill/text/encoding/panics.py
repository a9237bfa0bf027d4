"""Panics of libraries in Rust: a `BaseException` that is no `Exception`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Panic(ValueError):
    """A library in Rust panicked."""


@contextlib.contextmanager
def no_panic() -> Iterator[None]:
    """Turn a panic of a library in Rust into the exception `Panic`, with its first line.

    Rust also writes the place in its source to stderr, and a trace if RUST_BACKTRACE is set.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        lines = str(error).splitlines() or ["it gave up"]
        raise Panic(lines[0][:300]) from None
