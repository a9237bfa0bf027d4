"""How fast a run is, how much of the device it uses, and how long it will take."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokmill.training.recipe.config import RunConfig
from tokmill.training.runs.checkpoint import State

PEAKS: dict[str, dict[str, float]] = {
    # "half": fp16, and bf16 where the device has it; "single": fp32. In 10¹² a second.
    "B200": {"half": 2250, "single": 75},
    "H200": {"half": 989, "single": 67},
    "H100 PCIe": {"half": 756, "single": 51},
    "H100 NVL": {"half": 835, "single": 60},
    "H100": {"half": 989, "single": 67},
    "A100": {"half": 312, "single": 19.5},
    "A10G": {"half": 70, "single": 35},
    "A10": {"half": 125, "single": 31.2},
    "A40": {"half": 149.7, "single": 37.4},
    "L40S": {"half": 362, "single": 91.6},
    "L4": {"half": 121, "single": 30.3},
    "V100": {"half": 125, "single": 15.7},
    "T4": {"half": 65, "single": 8.1},
    "RTX 4090": {"half": 165.2, "single": 82.6},
    "RTX 3090": {"half": 71, "single": 35.6},
}
"""Words of a GPU's name → its peak. The first line that fits counts, so longer names come first."""

OTHER = re.compile(r"laptop|ti|super|d|mig|grid|\d+[abcq]")
"""A GPU with such a word in its name is another board, a slice (A100 … MIG 1g.5gb) or a virtual GPU
(NVIDIA A40-48Q): no peak is known of it."""


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


def peak_flops(config: RunConfig, device: torch.device) -> float:
    """Return the operations a second that a device can do in a recipe's precision; 0: not known.

    `run.peak_flops` wins over the table. Nothing is known of a CPU: a short measurement at the
    start depends on what else the machine does, and steps have reached more than twice its result.
    """
    if config.peak_flops:
        return config.peak_flops
    if device.type == "cpu":
        return 0.0
    return known(torch.cuda.get_device_name(device), config.precision)


def known(name: str, precision: str) -> float:
    """Return the peak of a GPU by its name, 0 where the table has none.

    Products in fp32 are those of PyTorch's default, without TF32.
    """
    words = name.replace("-", " ").lower().split()
    for part, figures in PEAKS.items():
        if all(word in words for word in part.lower().split()) and not any(
            map(OTHER.fullmatch, words)
        ):
            return figures["single" if precision == "fp32" else "half"] * 1e12
    return 0.0
