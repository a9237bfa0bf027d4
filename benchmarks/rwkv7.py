"""RWKV-7 on a processor: chunks beside single steps.

The gate is a test: tests/unit/models/test_wkv7.py (both forms are one function).

    python benchmarks/rwkv7.py
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from measure import highest
from tokmill.models.model import Tensors
from tokmill.models.model_inputs import Inputs
from tokmill.models.rwkv import rwkv7
from tokmill.models.rwkv.rwkv7 import RWKV7, RWKV7Config
from tokmill.models.rwkv.wkv7 import Form, wkv7
from tokmill.tasks.next_token import NextToken, NextTokenConfig

FORMS: tuple[Form, ...] = ("step_by_step", "chunked")
SHAPES = ((4, 256, 4), (2, 512, 12), (1, 4096, 12))
CONFIG = RWKV7Config(dim=256, layers=4)


def operands(rows: int, length: int, heads: int) -> list[Tensor]:
    """Return r, w, k, v, a, b as the model makes them."""
    torch.manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(rows, length, heads, 64)

    unit = F.normalize(draw(), dim=-1)
    made = [draw(), -0.6065 * torch.sigmoid(draw()), draw(), draw()]
    made += [-unit, unit * torch.sigmoid(draw())]
    return [x.requires_grad_() for x in made]


def once(form: Form, shape: tuple[int, int, int]) -> Callable[[], None]:
    """Return a forward and backward pass of the recurrence."""
    inputs = operands(*shape)

    def run() -> None:
        y, _ = wkv7(*inputs, form=form)
        y.sum().backward()

    return run


def in_turns(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the best time of each, after one that does not count."""
    best = [float("inf")] * len(runs)
    for number in range(rounds + 1):
        for place, run in enumerate(runs):
            started = time.perf_counter()
            run()
            if number:
                best[place] = min(best[place], time.perf_counter() - started)
    return best


def batch(rows: int, length: int) -> Tensors:
    """Return rows of a column `token`."""
    ids = torch.randint(0, 4096, (rows, length))
    place = torch.arange(length).expand_as(ids)
    zeros = torch.zeros_like(ids)
    return Tensors({"token": ids}, zeros, place, True, targets={"token": ids})


def learner(form: Form) -> NextToken:
    """Return a model of 4 layers with its head; `form` of the recurrence, for all models."""
    torch.manual_seed(0)
    sizes = {"token": 4096}
    task = NextToken(NextTokenConfig(tied=False), RWKV7(CONFIG, Inputs(sizes)), Inputs(sizes))
    rwkv7.wkv7 = partial(wkv7, form=form)  # type: ignore[assignment]
    return task


def whole(form: Form, made: Tensors) -> Callable[[], None]:
    """Return a forward and backward pass of a model."""
    task = learner(form)
    recurrence = rwkv7.wkv7

    def run() -> None:
        rwkv7.wkv7 = recurrence
        loss, _ = task(made)
        loss.backward()

    return run


def peak(form: str, length: int) -> int:
    """Return the bytes that a pass over one row adds to a process (a child)."""
    done = subprocess.run(
        [sys.executable, __file__, form, str(length)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def measure_peak(form: str, length: int) -> None:
    """Print by how much a forward and backward pass of the recurrence raises the peak."""
    inputs = operands(1, length, 12)
    # A peak as getrusage has it begins with the pages of the process that started this one.
    Path("/proc/self/clear_refs").write_text("5")
    before = highest()
    y, _ = wkv7(*inputs, form=form)  # type: ignore[arg-type]
    y.sum().backward()
    print(highest() - before)


def main(rounds: int = 4) -> list[str]:
    """Measure; return the section for RESULTS.md."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = [
        "One thread, fp32, forward and backward; best of turns. Heads are 64 wide.",
        "",
        "| rows, positions, heads | step by step, ms | chunked, ms | ratio |",
        "|---|---|---|---|",
    ]
    for shape in SHAPES:
        slow, fast = in_turns([once(form, shape) for form in FORMS], rounds)
        lines.append(
            f"| {', '.join(f'{n:,}' for n in shape)} | {slow * 1e3:,.0f} | {fast * 1e3:,.0f} | "
            f"{slow / fast:.1f} |"
        )
    made = batch(4, 256)
    slow, fast = in_turns([whole(form, made) for form in FORMS], rounds)
    size = sum(p.numel() for p in learner("auto").parameters()) / 1e6
    lines += [
        "",
        f"| a model of {size:.1f} million weights, 4 rows of 256 | tokens/s | ratio |",
        "|---|---|---|",
        f"| step by step | {1024 / slow:,.0f} | 1.00 |",
        f"| chunked | {1024 / fast:,.0f} | {slow / fast:.2f} |",
    ]
    most, least = (peak(form, 4096) for form in FORMS)
    lines += [
        "",
        "| memory of the recurrence at 4,096 positions, 12 heads | MiB | share |",
        "|---|---|---|",
        f"| step by step | {most / 2**20:,.0f} | 1.00 |",
        f"| chunked | {least / 2**20:,.0f} | {least / most:.3f} |",
    ]
    torch.set_num_threads(threads)
    return lines


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in get_args(Form):
        measure_peak(sys.argv[1], int(sys.argv[2]))
    else:
        print("\n".join(main()))
