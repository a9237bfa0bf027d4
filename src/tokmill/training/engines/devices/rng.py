"""Random states of a process: seeded at the start of a run, kept in its checkpoints.

First weights and dropout depend on them, and perhaps a task of your own. Rows and masks do not:
they are computed from keys.
"""

from __future__ import annotations

import random

import msgspec
import numpy as np
import torch

from tokmill.base.errors import TokmillError


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
    """Say whether this process computes on a GPU."""
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

    Raises `TokmillError` if it is no valid state; `where`: the file that holds it.
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
            hint="remove the folder of this checkpoint: --resume then goes on from the one before",
        ) from error


def torch_states() -> list[torch.Tensor]:
    """Return the states that dropout uses; this is cheap enough for every step."""
    cuda = [torch.cuda.get_rng_state()] if on_cuda() else []
    return [torch.get_rng_state(), *cuda]


def set_torch_states(states: list[torch.Tensor]) -> None:
    """Put back what `torch_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
