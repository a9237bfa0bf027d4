"""The device of a process, the precision of its matrix products, and batches on it.

Weights, gradients and Adam's moments are float32 in every precision: autocast rounds copies of
weights and inputs for each matrix product, and updates are added to the float32 weights
(Micikevicius et al. 2018, "Mixed Precision Training"). bf16 has the range of float32, so the loss
need not be scaled.
"""

import ctypes
import dataclasses
import os
import random
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError
from tokmill.models.model import Tensors
from tokmill.training.launch import Place
from tokmill.training.recipe.settings import tell

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def moved(batch: Tensors, device: torch.device) -> Tensors:
    """Return a batch on a device; from pinned memory it is copied while the device computes."""

    def move(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: move(one) for name, one in value.items()}
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    if device.type == "cpu":
        return batch
    return Tensors(**{f.name: move(getattr(batch, f.name)) for f in dataclasses.fields(batch)})


def pick_device(name: str, here: Place | None = None) -> torch.device:
    """Return the device called `name`; "auto" is CUDA where there is one.

    `here`: the place of this process; each of several processes gets its own GPU.
    """
    here = here or Place()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"{name!r} is not a device", where="run.device", hint="cpu or cuda"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"{name!r} is not supported", where="run.device", hint="cpu or cuda")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device", where="run.device", hint="--device cpu")
    if here.world == 1:
        # torch takes one without a number as the current device, but not everywhere.
        return torch.device("cuda", device.index or 0)
    count = torch.cuda.device_count()
    if device.index is not None or here.local_world > count:
        seen = f"torch sees {count}" if device.index is None else f"{name} is a single one"
        raise UsageError(
            f"{here.local_world} processes need a GPU each, and {seen}",
            where="run.device",
            hint=f"--processes {count} --device cuda",
        )
    return torch.device("cuda", here.local_rank)


class Precision:
    """The precision of a run's matrix products.

    Raises `UsageError` if the device does not support it.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.device, self.dtype = device, DTYPES[name]
        # Without hardware for bf16, torch emulates it, which is slower than float32.
        if name == "bf16" and device.type == "cuda":
            with torch.cuda.device(device):
                supported = torch.cuda.is_bf16_supported(including_emulation=False)
            if not supported:
                raise UsageError(
                    "this GPU does not compute in bf16",
                    where="run.precision",
                    hint='--set run.precision="fp32"',
                )
        emulated = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if name == "bf16" and device.type == "cpu" and emulated:
            tell("this processor does not compute in bf16; --set run.precision=fp32 is faster")

    def autocast(self) -> torch.autocast:
        """Return the context that a forward pass runs in."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`; see mallopt(3)."""
KEPT, LARGEST = 1 << 30, 32 << 20
"""Bytes that may stay unused, and the largest block that is taken from them (glibc's maximum)."""


def keep_freed_memory() -> bool:
    """Let the process keep freed memory between steps; return whether it does.

    The kernel clears each page that it hands out, which can take a sixth of a step on the CPU.
    Nothing is changed if the environment has settings for malloc, or if malloc is not glibc's.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST) and mallopt(TRIM_THRESHOLD, KEPT))


class RandomStates(msgspec.Struct):
    """The states of the random generators of a process, fit for JSON."""

    torch: str
    """In hexadecimal, as that of CUDA."""
    cuda: list[str]
    python: tuple[int, list[int], float | None]
    numpy: tuple[str, list[int], int, int, float]


def seed_random_states(seed: int) -> None:
    """Seed torch, numpy and Python, so that a run depends on nothing before it."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_for(seed: int, step: int, rank: int) -> None:
    """Seed one of several processes for the steps from `step` on, each with another seed."""
    words = np.random.SeedSequence((seed % 2**64, step, rank)).generate_state(1, np.uint64)
    seed_random_states(int(words[0]) >> 1)


def on_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def random_states() -> RandomStates:
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, normal = np.random.get_state(legacy=True)
    return RandomStates(
        torch=torch.get_rng_state().numpy().tobytes().hex(),
        cuda=[torch.cuda.get_rng_state().numpy().tobytes().hex()] if on_cuda() else [],
        python=(version, list(internal), gauss),
        numpy=(str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(normal)),
    )


def set_random_states(states: RandomStates, where: str = "") -> None:
    """Put back what `random_states` returned.

    Raises `TokmillError` if it is not a valid state; `where`: the file that holds it.
    """

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, internal, gauss = states.python
    name, keys, place, has_gauss, normal = states.numpy
    try:
        if not 0 <= place <= len(keys):
            raise ValueError(f"the place {place} among {len(keys)}")  # numpy does not check this
        torch.set_rng_state(tensor(states.torch))
        if states.cuda and torch.cuda.is_available():
            # For the current device, which may have had another number when this was saved.
            torch.cuda.set_rng_state(tensor(states.cuda[0]))
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state((name, np.asarray(keys, np.uint32), place, has_gauss, normal))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise TokmillError(
            f"the file is damaged: it holds no states of random generators ({error})",
            where=where,
            hint="remove the folder of this checkpoint: the one before is then used",
        ) from error


def torch_states() -> list[torch.Tensor]:
    """Return the states that dropout uses; this is cheap enough for every step."""
    cuda = [torch.cuda.get_rng_state()] if on_cuda() else []
    return [torch.get_rng_state(), *cuda]


def set_torch_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
