"""The parts of training, alone: for a loop of one's own around any module.

Gradients are clipped by `tokmill.training.engines.optim.clip_gradients`.
"""

from __future__ import annotations

import json
import math
import operator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tokmill.errors import TokmillError, UsageError
from tokmill.store.schema import Array
from tokmill.training.engines.tensors import read_metadata, read_tensors, write_tensors

MODEL, OPTIMIZER = "model.", "optimizer."


def cosine_schedule(step: int, max_lr: float, min_lr: float, warmup: int, steps: int) -> float:
    """Return the learning rate of a step, 0, 1, ….

    It rises linearly from 0 to `max_lr` at `warmup`, falls along half a cosine to `min_lr` at
    `steps`, and stays there (Loshchilov and Hutter 2017, "SGDR", without restarts). A run's own
    schedule is `tokmill.training.engines.optim.learning_rate`, whose first step is not 0.
    """
    if step < warmup:
        return max_lr * step / warmup
    if step >= steps:
        return min_lr
    share = (step - warmup) / (steps - warmup)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * share)) / 2


def sample_batch(
    array: Array,
    batch_size: int,
    context_length: int,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return windows that begin anywhere in an array of ids, and the ids that follow each.

    `array` is (n,), in memory or mapped; both results are int64 (batch_size, context_length).
    `generator` is of the CPU, None: torch's own. Raises `UsageError` where no window fits.
    """
    places = len(array) - context_length
    if places < 1 or context_length < 1:
        raise UsageError(
            f"no window of {context_length} ids and the next one fits into {len(array)}",
            hint="take a smaller context_length, or a longer array",
        )
    starts = torch.randint(places, (batch_size, 1), generator=generator).numpy()
    windows = torch.from_numpy(array[starts + np.arange(context_length + 1)].astype(np.int64))
    x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    return x.to(device), y.to(device)


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    target: Path | str | BufferedIOBase,
) -> None:
    """Write weights, the optimiser's state and the step to a path or an open file.

    The format is safetensors: tensors `model.NAME` and `optimizer.NUMBER.KEY`, with the number of
    the parameter, and what is no tensor as JSON in the metadata. Nothing is pickled.
    """
    kept = optimizer.state_dict()
    tensors = {MODEL + name: value for name, value in model.state_dict().items()}
    plain: dict[str, Any] = {"step": step, "groups": kept["param_groups"], "state": {}}
    for number, state in kept["state"].items():
        plain["state"][number] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{number}.{key}"] = value
            else:
                plain["state"][number][key] = value
    where = Path(target) if isinstance(target, str) else target
    write_tensors(where, tensors, {name: json.dumps(value) for name, value in plain.items()})


def load_checkpoint(
    source: Path | str | BufferedIOBase, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Put back what `save_checkpoint` wrote, and return the step.

    Raises `TokmillError` where the file is damaged or is of another model or optimiser.
    """
    where = Path(source) if isinstance(source, str) else source
    try:
        metadata, tensors = read_metadata(where), read_tensors(where)
    except TokmillError as error:
        # What to do about it is said for the checkpoints of a run, which have others beside them.
        raise TokmillError(error.what, where=error.where, hint="take an older one") from error
    try:
        plain = {n: json.loads(metadata.get(n, "null")) for n in ("step", "groups", "state")}
        if None in plain.values():
            raise ValueError("it holds no step and no state of an optimiser")
        # JSON has no tuples, and Adam's betas are one.
        groups = [
            {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in group.items()}
            for group in plain["groups"]
        ]
        step = operator.index(plain["step"])
        weights: dict[str, Tensor] = {}
        state: dict[int, dict[str, Any]] = {int(n): entry for n, entry in plain["state"].items()}
        for name, tensor in tensors.items():
            if name.startswith(MODEL):
                weights[name.removeprefix(MODEL)] = tensor
            else:
                number, _, key = name.removeprefix(OPTIMIZER).partition(".")
                state[int(number)][key] = tensor
        model.load_state_dict(weights)
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        # RecursionError, for nesting without end, is a RuntimeError.
        raise unlike(source, str(error)) from error
    except (KeyError, IndexError) as error:
        raise unlike(source, f"{error} is not there") from error
    return step


def unlike(source: Path | str | BufferedIOBase, what: str) -> TokmillError:
    """Return the error for a checkpoint that does not fit."""
    named = source if isinstance(source, Path | str) else getattr(source, "name", "an open file")
    return TokmillError(
        f"the checkpoint does not fit: {what}",
        where=str(named),
        hint="make model and optimiser as they were when it was saved",
    )
