"""Trainings of several tasks: whole, and stopped in the middle and resumed."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import tokmill
from tokmill.base.errors import Interrupted
from toy import losses, stop_after, weights


def end_group() -> None:
    """End what a training leaves behind that does not expect its process to go on."""
    if not torch.distributed.is_initialized():
        return
    if find_spec("deepspeed"):
        from deepspeed import comm

        if comm.comm.cdb:
            comm.destroy_process_group()
            return
    torch.distributed.destroy_process_group()


def train_all(names: Iterable[str], recipe: Callable[[str], dict[str, Any]], folder: Path) -> None:
    """Train every task, whole and stopped after four steps."""
    for name in names:
        for kind, stop in (("whole", 0), ("parts", 4)):
            with pytest.MonkeyPatch.context() as patch:
                stop_after(stop, patch)
                out = folder / name / kind
                try:
                    tokmill.train(recipe(name), out, quiet=True)
                except (Interrupted, SystemExit):
                    end_group()
                    tokmill.train(recipe(name), out, quiet=True)


def same(left: Path, right: Path, *names: str) -> None:
    """Check that two runs are the same training, but for rounding."""
    for name in ("loss", "grad_norm", "tokens", "val_loss", *names):
        assert losses(left, name) == pytest.approx(losses(right, name), rel=1e-5, abs=1e-5), name
    kept = weights(right)
    for name, tensor in weights(left).items():
        # Adam divides by the size of gradients: where they are near 0, it is rounding that moves
        # a weight, by a small part of the learning rate each step.
        torch.testing.assert_close(tensor, kept[name], atol=5e-4, rtol=1e-4)
