"""What a task sums up over micro-batches, batches and processes, and what these agree on."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tokmill.training.engines.engine import Engine


def add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add sums by name, on the device."""
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def over_processes(engine: Engine, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return sums over all processes as numbers."""
    values = engine.total([value.item() for value in sums.values()])
    return dict(zip(sums, values, strict=True))


def most(engine: Engine, number: int) -> int:
    """Return the largest of the numbers that the processes give."""
    given = [0.0] * engine.world
    given[engine.rank] = number
    return int(max(engine.total(given)))
