"""Sums of a task over micro-batches, batches and processes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tokmill.training.engines.engine import Engine


def add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def over_processes(engine: Engine, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return sums over all processes as numbers."""
    values = engine.total([value.item() for value in sums.values()])
    return dict(zip(sums, values, strict=True))


def on_first(engine: Engine, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sums that every process has in full, as 0 on all but rank 0, for `over_processes`."""
    return {name: value if engine.rank == 0 else value * 0 for name, value in sums.items()}


def most(engine: Engine, number: int) -> int:
    """Return the largest of the numbers that all processes call this with."""
    given = [0.0] * engine.world
    given[engine.rank] = number
    return int(max(engine.total(given)))
