"""A thread that computes the next results of an iterator while the last one is being used."""

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
_END = object()
PATIENCE = 5.0
"""Seconds to wait for the thread to end. One that takes longer is left, so that Ctrl-C works."""


def prefetch(source: Iterable[T], most: int = 1) -> Generator[T, None, None]:
    """Yield the results of `source`, computed in a thread that is at most `most` results ahead.

    Order and errors stay the same. Closing the generator ends the thread.
    """
    results: queue.Queue[object] = queue.Queue(max(1, most))
    ended = threading.Event()

    def put(result: object) -> bool:
        while not ended.is_set():
            try:
                results.put(result, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for result in source:
                if not put(result):
                    return
            put(_END)
        except BaseException as error:
            put(_Failed(error))

    thread = threading.Thread(target=work, name="tokmill-prefetch", daemon=True)
    thread.start()
    try:
        while (result := results.get()) is not _END:
            if isinstance(result, _Failed):
                raise result.error
            yield result  # type: ignore[misc]
    finally:
        ended.set()
        thread.join(PATIENCE)


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error
