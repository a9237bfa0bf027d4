"""How much memory reading a file may take: a small file cannot take all that the machine has.

A few bytes can stand for gigabytes: of repeated texts, of nested arrays, of what a header promises.
The kernel refuses such allocations (`RLIMIT_DATA`); the reader's error names the file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from tokmill.base.errors import MachineError, TokmillError

A = TypeVar("A", bound=Path | str)
P = ParamSpec("P")
R = TypeVar("R")
BASE = 300 << 20
"""Bytes that reading any file may take, beyond what the process has when it begins."""
TIMES = 64
"""More bytes for each byte of the file: a graph is larger in memory than in Parquet."""
own_process = False
"""Whether this process does nothing but the work of tokmill, so that it may limit itself. A limit
is for all threads of a process, so those of programs that import tokmill have none."""
reading: list[str] = []
"""Files that are read now inside of `bounded`."""


@contextlib.contextmanager
def bounded(path: Path | str, size: int = 0, *, limit: bool = True) -> Iterator[None]:
    """Bound the memory that is taken inside of the `with` block, by the size of a file.

    Args:
        path: the file, which errors name.
        size: bytes that are read, if they are not those of the file.
        limit: False where the memory is known not to grow; then errors are only named.

    Raises `TokmillError` for more memory than that, and for endless nesting.
    """
    most = BASE + TIMES * (size or _size(path))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit and own_process
    if limit:
        soft = _data() + most
        if before[0] != resource.RLIM_INFINITY:
            soft = min(soft, before[0])
        resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    reading.append(str(path))
    try:
        yield
    except MemoryError:
        raise (TokmillError if limit else MachineError)(
            f"reading it takes more than {most >> 20:,} MiB" if limit else "memory ran out",
            where=str(path),
            hint="a few of its bytes may stand for very many; of Parquet and Arrow, groups of "
            "fewer rows take less",
        ) from None
    except RecursionError:
        raise TokmillError(
            "it is nested too deeply",
            where=str(path),
            hint="is it what it should be? look for a long run of [ or { in it",
        ) from None
    finally:
        reading.remove(str(path))
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def bounded_reader(read: Callable[Concatenate[A, P], R]) -> Callable[Concatenate[A, P], R]:
    """Let a function, whose first argument is a file, read it inside of `bounded`."""

    @functools.wraps(read)
    def reader(path: A, /, *arguments: P.args, **named: P.kwargs) -> R:
        with bounded(path):
            return read(path, *arguments, **named)

    return reader


def _size(path: Path | str) -> int:
    """Return the bytes that a file takes on its disk, at most its size: it may have holes."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return 0
    return min(status.st_size, status.st_blocks * 512)


def _data() -> int:
    """Return the bytes of this process that count for `RLIMIT_DATA`."""
    with open("/proc/self/statm", "rb") as file:
        # Data and stack; the stack is small.
        return int(file.read().split()[5]) * resource.getpagesize()
