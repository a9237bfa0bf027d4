"""The child's side of `child.Child`: it answers calls of one function, one after the other.

A message is its size in 8 bytes, then msgpack. An answer is ("value", result), or (name of the
exception, text); for a `TokmillError` the text is (what, where, hint).
"""

import fcntl
import importlib
import os
import select
import signal
from typing import Any, BinaryIO

import msgspec

from tokmill.base.errors import TokmillError


def frame(data: bytes) -> bytes:
    """Return a message preceded by its size."""
    return len(data).to_bytes(8, "little") + data


def frame_size(data: bytes | bytearray) -> int:
    return int.from_bytes(data[:8], "little")


def serve(target: str, requests: int, answers: int) -> None:
    """Import `module:function`, then answer calls until `requests` (a file descriptor) ends."""
    end_with_parent()
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    with open(requests, "rb") as asked, open(answers, "wb", buffering=0) as replies:
        _tell(replies, ("value", None))
        while len(head := asked.read(8)) == 8:
            arguments = msgspec.msgpack.decode(asked.read(frame_size(head)))
            _tell(replies, _answer(function, arguments))


def _answer(function: Any, arguments: list[Any]) -> bytes | tuple[str, Any]:
    try:
        return msgspec.msgpack.encode(("value", function(*arguments)))
    except TokmillError as error:
        # The parent knows the classes of `errors` alone: another one is sent as what it extends.
        sent = next(one for one in type(error).__mro__ if one.__module__ == TokmillError.__module__)
        return sent.__name__, (error.what, error.where, error.hint)
    except Exception as error:
        return type(error).__name__, str(error)


def _tell(stream: BinaryIO, answer: bytes | tuple[str, Any]) -> None:
    data = answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer)
    rest = memoryview(frame(data))
    while rest:
        rest = rest[stream.write(rest) :]


def end_with_parent() -> None:
    """Make the kernel end this process when stdin is closed, even while no Python code can run."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    gone = select.poll()
    gone.register(0, select.POLLHUP)
    if gone.poll(0):
        os._exit(1)
