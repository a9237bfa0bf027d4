"""RWKV-7's recurrence on a GPU: the kernels of fla beside chunks in torch.

Times and memory of forward and backward passes. The gate is a test: tests/unit/models/test_wkv7.py.

    python benchmarks/gpu/wkv7.py
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tokmill.models.rwkv.wkv7 import HAS_FLA, Form, wkv7

SHAPES = ((8, 4096, 64, 64), (1, 32768, 16, 64))
Recurrence = Callable[..., tuple[Tensor, Tensor]]
WARM = 3
"""Rounds that do not count: kernels are compiled in the first."""


def cuda() -> torch.device:
    """Return the device; end with a line where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: this benchmark is for GPUs")
    return torch.device("cuda")


def describe() -> str:
    """Describe device and software in a line."""
    kernels = "no fla-core"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        kernels = f"fla-core {importlib.metadata.version('fla-core')}"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {kernels}."


def in_turns(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median milliseconds of each on the device; they take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(WARM + rounds):
        for run, found in zip(runs, times, strict=True):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            run()
            ended.record()
            ended.synchronize()
            if number >= WARM:
                found.append(begun.elapsed_time(ended))
    return [statistics.median(found) for found in times]


def peak(run: Callable[[], object]) -> int:
    """Return the bytes that a run allocates on the device at a time, besides what is there."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Contestant:
    """A way to compute the recurrence, from inputs of one type."""

    name: str
    run: Recurrence
    dtype: torch.dtype

    def forward(self, inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Return a forward pass that keeps what the backward pass takes."""

        def run() -> tuple[Tensor, ...]:
            return self.run(*inputs)

        return run

    def both(self, inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Return a forward and backward pass: outputs, the last state, and the gradients."""
        torch.manual_seed(1)
        # Numbers that are the same in every type.
        of_y = torch.randn(inputs[0].shape, device=inputs[0].device, dtype=torch.bfloat16)

        def run() -> tuple[Tensor, ...]:
            y, state = self.run(*inputs)
            return y, state, *torch.autograd.grad(y, inputs, of_y.to(y.dtype))

        return run


def of(form: Form) -> Recurrence:
    """Return a form of `wkv7`."""
    return lambda *inputs: wkv7(*inputs, form=form)


def contestants() -> list[Contestant]:
    """Return all that can run here."""
    found = [Contestant("chunked, bf16", of("chunked"), torch.bfloat16)]
    if HAS_FLA:
        found.insert(0, Contestant("fla, bf16", of("fla"), torch.bfloat16))
    else:
        print("fla-core is not installed: see benchmarks/gpu/README.md", file=sys.stderr)
    return found


def operands(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return r, w, k, v, a, b as the model makes them."""
    torch.manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    unit = F.normalize(draw(), dim=-1)
    made = [draw(), -0.6065 * torch.sigmoid(draw()), draw(), draw()]
    made += [-unit, unit * torch.sigmoid(draw())]
    return [x.requires_grad_() for x in made]


def speed(shape: tuple[int, ...], device: torch.device, rounds: int) -> list[str]:
    """Return Markdown rows of times and memory; what does not fit into memory has none."""
    lines = [
        f"| B, T, H, N = {', '.join(f'{n:,}' for n in shape)} | forward, ms | "
        "forward and backward, ms | GiB |",
        "|---|---|---|---|",
    ]
    able, sizes, failed = [], [], []
    for one in contestants():
        try:
            inputs = operands(shape, one.dtype, device)
            sizes.append(peak(one.both(inputs)))
            able.append((one, inputs))
        except torch.cuda.OutOfMemoryError:
            failed.append(f"| {one.name} | out of memory | | |")
    forward = in_turns([one.forward(inputs) for one, inputs in able], rounds)
    both = in_turns([one.both(inputs) for one, inputs in able], rounds)
    for (one, _), first, all_of_it, size in zip(able, forward, both, sizes, strict=True):
        lines.append(f"| {one.name} | {first:.2f} | {all_of_it:.2f} | {size / 2**30:.2f} |")
    return [*lines, *failed]


def main(rounds: int = 20) -> list[str]:
    """Measure; return Markdown."""
    device = cuda()
    lines = [f"{describe()} Medians of {rounds}, in turns.", ""]
    for shape in SHAPES:
        lines += [*speed(shape, device, rounds), ""]
    return lines


if __name__ == "__main__":
    print("\n".join(main()))
