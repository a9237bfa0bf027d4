"""When to stop early: a signal or a time limit, noticed between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from ctypes import c_double
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_ONCE = 0.5
"""Seconds within which signals are one: `timeout` sends SIGTERM twice."""


class Stop:
    """Notes a signal or the end of the time. A second signal acts as it did before.

    Signals are handled only in the main thread, where Python allows it, until the end of the
    `with` block. `note` is printed at the first one. With `ends_at_second` off a second signal is
    ignored: the kernel sends one for each thread of a launcher that dies.
    """

    def __init__(self, until: float, *, note: str = "", ends_at_second: bool = True) -> None:
        self.until: c_double = RawValue("d", until)
        """`value`: monotonic seconds at which to stop; a signal sets it to now. Processes that are
        given it share it."""
        self.signal = ""
        """Name of the signal that came; "": none."""
        self.note, self.ends_at_second = note, ends_at_second
        self._came = 0.0
        self._before: dict[int, Any] = {}

    @property
    def reason(self) -> str:
        """Why to stop; "": go on."""
        return self.signal or ("the time limit" if time.monotonic() >= self.until.value else "")

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # `nohup` has SIGHUP ignored.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        self._give_back()

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal:
            self.signal = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._came, self.until.value = now, min(self.until.value, now)
            with contextlib.suppress(OSError):
                # Not by `print`: the signal may have come within one.
                os.write(2, self.note.encode())
        elif self.ends_at_second and now - self._came > AT_ONCE:
            self._give_back()
            signal.raise_signal(number)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
