"""Locks: one process at a time writes a store, a run or a file.

A lock is a file with an exclusive `flock`, which ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import (
    LONGEST_NAME,
    is_file_at,
    machine_error,
    machine_errors,
    make_folder,
    new_folder,
    remove,
    remove_leftovers,
)

LOCK_MARK = b"tokmill lock\n"
"""Content of a folder's lock file, by which tokmill knows the folder as its own."""


def lock_of(path: Path) -> Path:
    """Return the lock of who writes a file, and what belongs to it: `.NAME.lock` beside it."""
    name = os.fsdecode(os.fsencode(path.name)[: LONGEST_NAME - len("..lock")])
    return path.with_name(f".{name}.lock")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Keep other processes from writing a file, and what belongs to it, before the block ends.

    Makes the folder, and removes what killed writers of the file left. Raises `MachineError` if
    another process writes it.
    """
    what = f"another process is writing {path.name}"
    with new_folder(path.parent), locked(lock_of(path), what, "wait, or choose another place"):
        try:
            remove_leftovers(path.parent, path.name)
            yield
        finally:
            remove(lock_of(path))


@contextlib.contextmanager
def locked(path: Path, what: str, hint: str, wait: float = 0) -> Iterator[None]:
    """Hold an exclusive lock on a file; if another process holds it for `wait` seconds, raise.

    Raises `MachineError` too if the file system has no locks. The holder may remove the file; a
    process that waited then makes file and folder again. A new file gets the content `LOCK_MARK`; a
    file with other content is the user's own, and an error.
    """
    until = time.monotonic() + wait
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(_opened(path))
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise MachineError(what, where=str(path.parent), hint=hint) from None
                time.sleep(0.05)
                continue
            except OSError as error:
                raise _not_locked(handle, path, error) from error
            if is_file_at(handle, path):
                break
            stack.close()
            make_folder(path.parent)
            handle = stack.enter_context(_opened(path))
        _mark(handle, path)
        yield


def _opened(path: Path) -> BinaryIO:
    with machine_errors("lock", path):
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise TokmillError(
                "a lock has this name, but it is not a plain file",
                where=str(path),
                hint="move it, or choose another folder",
            )
        return open(path, "a+b")


def is_lock(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if stat.S_ISREG(path.lstat().st_mode):
            with open(path, "rb") as handle:
                return handle.read(len(LOCK_MARK) + 1) == LOCK_MARK
    return False


def _not_locked(handle: BinaryIO, path: Path, error: OSError) -> MachineError:
    """Return the error for a lock that cannot be had; remove its file if nobody has marked it."""
    with contextlib.suppress(OSError):
        if not os.fstat(handle.fileno()).st_size and is_file_at(handle, path):
            os.unlink(path)
    return machine_error("lock", path, error)


def _mark(handle: BinaryIO, path: Path) -> None:
    try:
        handle.seek(0)
        there = handle.read(len(LOCK_MARK) + 1)
        if not there:
            os.write(handle.fileno(), LOCK_MARK)
    except OSError as error:
        raise _not_locked(handle, path, error) from error
    if there != LOCK_MARK[: len(there)]:
        raise TokmillError(
            "the file is not one of tokmill",
            where=str(path),
            hint="move it, or choose another folder",
        )
