"""When to stop early: a signal or a time limit, noticed between two steps."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from tokmill.training.launch import place


class Stop:
    """Notes a signal or the end of the time. A second signal acts as it did before the training.

    One of several processes ignores a second signal: its launcher kills it at the second one, and
    the kernel sends one signal for each thread of a launcher that dies.

    Signals are handled only in the main thread, where Python allows it, until the end of the
    `with` block.
    """

    def __init__(self, max_seconds: float) -> None:
        self._until = time.monotonic() + max_seconds
        self._signal = ""
        self._before: dict[int, Any] = {}

    @property
    def reason(self) -> str:
        """Why the training should stop; "": it should go on."""
        return self._signal or ("the time limit" if time.monotonic() >= self._until else "")

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._signal = "Ctrl-C" if number == signal.SIGINT else name
        if place().world > 1:
            for known in self._before:
                signal.signal(known, signal.SIG_IGN)
        else:
            self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
