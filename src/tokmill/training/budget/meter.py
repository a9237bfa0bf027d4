"""How fast a run is, how much of the device it uses, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tokmill.training.runs.checkpoint import State


class Meter:
    """The clock of one process of training.

    Rates count the time of training alone: what happens inside `aside()` (evaluation, checkpoints)
    is no part of them. `State.seconds` and the time left count all.

    `read` is for the caller to add to: tokens that the model has read, hidden ones and others,
    padding apart. Rates count these, while `State.tokens` counts what was learned from.

    `flops_per_token`: of a step; `peak`: operations a second of all devices, 0: not known; `unit`:
    what is read, in the line of progress.
    """

    def __init__(
        self, state: State, steps: int, flops_per_token: float, peak: float, unit: str = "tokens"
    ) -> None:
        self.unit = unit
        self.state, self.steps = state, steps
        self.flops_per_token, self.peak = flops_per_token, peak
        self.started = self.reported = time.monotonic()
        self.seconds_before, self.first_step = state.seconds, state.step
        self.read, self.reported_read, self.elsewhere = 0, 0, 0.0
        self.tokens_per_second = 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the time of this context from the rates."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.elsewhere += time.monotonic() - begun

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, in earlier processes too."""
        return self.seconds_before + time.monotonic() - self.started

    @property
    def seconds_left(self) -> float:
        """Seconds that the rest will take, if it goes on as in this process so far."""
        done = self.state.step - self.first_step
        spent = time.monotonic() - self.started
        return spent / max(done, 1) * (self.steps - self.state.step)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the model's operations as a share of the peak; 0: not known.

        Defined by Chowdhery et al. 2022, PaLM, appendix B. Padding does not count, nor do blocks
        that run twice.
        """
        return self.flops_per_token * self.tokens_per_second / self.peak if self.peak else 0.0

    def report(self) -> dict[str, float]:
        """Return the metrics of the time since the last report."""
        now = time.monotonic()
        spent = max(now - self.reported - self.elsewhere, 1e-9)
        self.tokens_per_second = (self.read - self.reported_read) / spent
        self.reported, self.reported_read, self.elsewhere = now, self.read, 0.0
        self.state.seconds = self.seconds
        values = {
            "targets": self.state.tokens,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds": round(self.state.seconds, 3),
            "seconds_left": round(self.seconds_left, 1),
        }
        return {**values, "mfu": round(self.mfu, 4)} if self.peak else values

    def line(self) -> str:
        """Return the speed as the end of a line of progress; empty before the first report."""
        if not self.tokens_per_second:
            return ""
        share = f", MFU {self.mfu:.0%}" if self.peak else ""
        places = 0 if self.tokens_per_second >= 100 else 1
        return f", {self.tokens_per_second:,.{places}f} {self.unit}/s{share}"
