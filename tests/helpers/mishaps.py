"""Functions that are called in a child and do what foreign code may do."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from tokmill.base.errors import UsageError

calls = 0


def count(*arguments: Any) -> list[Any]:
    """Return how often it was called, the process and the arguments."""
    global calls
    calls += 1
    return [calls, os.getpid(), list(arguments)]


def mishap(kind: str, *more: Any) -> Any:
    """Do what `kind` says; return "fine" for "fine"."""
    return {
        "fine": lambda: "fine",
        "segfault": lambda: ctypes.string_at(0),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "loop": _loop,
        "hold": lambda: ctypes.PyDLL(None).sleep(1000),
        "allocate": _allocate,
        "reserve": lambda: len(bytearray(1 << 40)),
        "print": lambda: _print(sys.stdout),
        "complain": lambda: _print(sys.stderr),
        "exit": lambda: sys.exit(7),
        "panic": _panic,
        "raise": lambda: {}["no such key"],
        "refuse": _refuse,
        "refuse by a class of its own": _refuse_specially,
        "object": object,
        "scribble": lambda: _scribble(b"\xff" * (2 << 20)),
        "garble": lambda: _scribble((1).to_bytes(8, "little") + b"\xff"),
        "child": lambda: subprocess.Popen(["sleep", "1000"]).pid,
        "echo": lambda: more,
        "litter": lambda: tempfile.mkstemp()[1],
        "lines": lambda: [print(f"line {i}", flush=True) or time.sleep(0.05) for i in range(400)],
    }[kind]()


def _loop() -> None:
    while True:
        pass


def _allocate() -> None:
    kept = []
    while True:
        kept.append(b"1" * (1 << 24))


def _print(stream: Any) -> None:
    while True:
        stream.write("x" * 4096 + "\n")


def _scribble(data: bytes) -> None:
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(number, data)


def _panic() -> None:
    raise BaseException("a panic of another language")


class _OwnError(UsageError):
    """An error that no other module knows."""


def _refuse_specially() -> None:
    raise _OwnError("this kind", hint="another one")


def _refuse() -> None:
    raise UsageError("not so", where="recipe.toml: key", hint="thus")
