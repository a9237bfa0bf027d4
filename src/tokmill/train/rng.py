"""Random states of a process: seeded at the start of a run, kept in its checkpoints.

Rows and masks do not depend on them (they come from keys); first weights and dropout do, and so may
a task of one's own.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_random_states(seed: int) -> None:
    """Seed torch, numpy and Python, so that a run depends on nothing before it."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_for(seed: int, step: int, rank: int) -> None:
    """Seed one process of several for the steps from `step` on, unlike every other process."""
    words = np.random.SeedSequence((seed % 2**64, step, rank)).generate_state(1, np.uint64)
    seed_random_states(int(words[0]) >> 1)


def on_cuda() -> bool:
    """Say whether this process computes on a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of this process, fit for JSON."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [torch.cuda.get_rng_state().numpy().tobytes().hex()] if on_cuda() else [],
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` returned."""

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(tensor(states["torch"]))
    if states["cuda"] and torch.cuda.is_available():
        # Of the device that this process computes on, whatever its number was then.
        torch.cuda.set_rng_state(tensor(states["cuda"][0]))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))


def torch_states() -> list[torch.Tensor]:
    """Return the states that dropout draws from; taking them is cheap enough for every step."""
    cuda = [torch.cuda.get_rng_state()] if on_cuda() else []
    return [torch.get_rng_state(), *cuda]


def set_torch_states(states: list[torch.Tensor]) -> None:
    """Put back what `torch_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
