"""torch.compile around a task, with clear errors where it cannot work."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import torch

from tokmill.errors import MachineError, TokmillError
from tokmill.models.model import Tensors
from tokmill.tasks.task import Task

OFF = "or train without it: --set run.compile=false"


def compile_task(task: Task, device: torch.device) -> None:
    """Compile the forward and backward pass of a task in place; names of weights stay.

    The first batch of each shape is compiled, which takes about a minute. Raises `MachineError` if
    no compiler is installed.
    """
    variable, usual = ("CC", "gcc") if device.type == "cuda" else ("CXX", "g++")
    compiler = os.environ.get(variable) or usual
    if shutil.which(compiler) is None:
        raise MachineError(
            f"torch.compile needs a compiler, and there is no {compiler!r}",
            where="run.compile",
            hint=f"install {usual}, name another one in the variable {variable}, {OFF}",
        )
    # Whole or trimmed rows, the last micro-batch, evaluation: each has a compiled program.
    torch._dynamo.config.recompile_limit = 32
    task.compile(dynamic=False)


def any_number_of_documents(batch: Tensors) -> None:
    """Let one compiled program serve batches of a shape with any number of documents."""
    if batch.cu_seqlens is not None:
        torch._dynamo.maybe_mark_dynamic(batch.cu_seqlens, 0)


@contextlib.contextmanager
def compile_errors() -> Iterator[None]:
    """Turn a failure of torch.compile into a `TokmillError`."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        first = str(error).strip().partition("\n")[0]
        raise TokmillError(
            f"torch.compile failed: {first}", where="run.compile", hint=f"report it, {OFF}"
        ) from error
