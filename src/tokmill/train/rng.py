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


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of this process, fit for JSON."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` returned."""

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(tensor(states["torch"]))
    if states["cuda"] and torch.cuda.is_available():
        for number, text in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(tensor(text), number)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
