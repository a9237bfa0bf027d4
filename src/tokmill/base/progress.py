"""Progress of long work: one line that is written over, or a line every 30 seconds in a log."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokmill.base.errors import UsageError

EVERY = 30.0
TIMES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def human_time(seconds: float) -> str:
    """Return a number of seconds as 4.2s, 3m10s or 2h05m."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def parse_seconds(text: str) -> float:
    """Return the seconds of a text such as 90s, 10m or 1.5h."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if not match:
        raise UsageError(f"{text!r} is not a time", hint="write it as 90s, 10m or 1.5h")
    return float(match[1]) * TIMES[match[2]]


def human_bytes(number: float) -> str:
    """Return a number of bytes in a readable unit (powers of 1,000)."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        digits = 0 if unit == "B" else 1
        if abs(round(number, digits)) < 1000 or unit == "TB":
            return f"{number:.{digits}f} {unit}"
        number /= 1000
    raise AssertionError


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as 2GB, 512MiB or 1000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise UsageError(f"{text!r} is not a number of bytes", hint="such as 2GB or 512MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def human_count(number: int, noun: str, nouns: str = "") -> str:
    """Return a count with its noun: 1 program, 2,000 programs.

    `nouns` is the plural if it is not `noun` + s.
    """
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def human_share(share: float, digits: int = 1) -> str:
    """Return a share in percent; only exact shares of 0 and 1 are shown as 0% and 100%."""
    least = 10.0**-digits
    if 0 < share < 1 and not least <= round(100 * share, digits) <= 100 - least:
        return f"<{least:.{digits}f}%" if share < 0.5 else f">{100 - least:.{digits}f}%"
    return f"{share:z.{digits}%}"


def human_metric(value: float) -> str:
    """Return a metric: 1,234 for a count, 4 decimals for a fraction, 1.2346e+06 from there on."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4e}" if 1e6 <= abs(value) < math.inf else f"{value:.4f}"


def human_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return names in words, and their values: whole numbers with commas, shares in percent."""
    return {
        name.replace("_", " "): human_share(value) if isinstance(value, float)
        else f"{value:,}" if isinstance(value, int) else str(value)
        for name, value in facts.items()
    }  # fmt: skip


def live() -> bool:
    """Return whether a line on stderr can be written over: in a terminal and in a notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")


def _write_over(text: str) -> None:
    """Write a line over the last one, which is as long as the window or shorter."""
    width = shutil.get_terminal_size().columns - 1
    # A line that wraps cannot be written over.
    text = text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"
    # Directly to the stream: the wrapper of stderr would escape the return.
    stream = getattr(sys.stderr, "inner", sys.stderr)
    stream.write(f"\r{text:<{width}}" if text else f"\r{'':{width}}\r")
    stream.flush()


@contextlib.contextmanager
def elapsed(what: str | Callable[[], str]) -> Iterator[None]:
    """Print what is running (now, if it is a function) and for how long.

    For work whose end cannot be estimated.

    Where a line can be written over once a second, elsewhere every 30 seconds.
    """
    terminal = live()
    ended = threading.Event()
    begun = time.monotonic()

    def tell() -> None:
        while not ended.wait(1 if terminal else EVERY):
            label = what if isinstance(what, str) else what()
            text = f"{label}: {human_time(time.monotonic() - begun)}"
            if terminal:
                _write_over(text)
            else:
                print(text, file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if terminal:
            _write_over("")


class Progress:
    """Shows how much of some work is done, with rate and time left, on stderr.

    `total` and `advance` count in `unit`; "B" is shown as KB, MB, …, other units as plain numbers.
    `extra` may return more text for the line (memory, loss, …).
    """

    def __init__(
        self,
        title: str,
        total: float,
        *,
        unit: str = "B",
        done: float = 0,
        extra: Callable[[], str] | None = None,
        quiet: bool = False,
    ) -> None:
        self.title, self.total, self.unit, self.extra = title, total, unit, extra
        self.done = self.already = self.ahead = done
        self.started = time.monotonic()
        self.shown = self.started
        self.quiet = quiet
        self.terminal = live()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.terminal and not self.quiet:
            self._show()
            print(file=sys.stderr, flush=True)

    def advance(self, amount: float) -> None:
        self.done += amount
        self.tick()

    def reach(self, amount: float) -> None:
        """Show this much as done already, although `advance` has not counted all of it yet."""
        self.ahead = max(self.ahead, amount)
        self.tick()

    def tick(self) -> None:
        """Print the line again if it is time."""
        now = time.monotonic()
        if not self.quiet and now - self.shown >= (0.1 if self.terminal else EVERY):
            self.shown = now
            self._show()

    @property
    def reached(self) -> float:
        """Units that are done, including those that `advance` has not counted yet."""
        return max(self.done, self.ahead)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def rate(self) -> float:
        """Units a second, not counting what was done before the start."""
        return (self.reached - self.already) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Seconds for the rest at this rate; infinite before the first unit."""
        return (self.total - self.reached) / self.rate if self.rate > 0 else float("inf")

    def _show(self) -> None:
        def amount(value: float) -> str:
            return human_bytes(value) if self.unit == "B" else f"{value:,.0f}"

        def speed(value: float) -> str:
            if self.unit == "B" or value >= 9.95:
                return amount(value)
            return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"

        unit = "" if self.unit == "B" else f" {self.unit}"
        share = self.reached / self.total if self.total else 1.0
        left = "" if self.rate <= 0 or share >= 1 else f", {human_time(self.seconds_left)} left"
        text = (
            f"{self.title}: {amount(self.reached)} of {amount(self.total)}{unit} ({share:.0%}), "
            f"{speed(self.rate)}{unit}/s{left}"
        )
        if self.extra and (more := self.extra()):
            text += f", {more}"
        if self.terminal:
            _write_over(text)
        else:
            print(text, file=sys.stderr, flush=True)
