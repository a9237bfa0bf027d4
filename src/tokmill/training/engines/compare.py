"""A step of a task that compares the entries of a batch with each other.

Its loss needs the vectors of the whole step, of all micro-batches and processes. They are made
without a gradient and gathered; the loss and the gradient of each vector are worked out once; then
each micro-batch is run again, with the same dropout, and backward from its part of that gradient
(the gradient cache of Gao et al. 2021, arXiv 2101.06983). So loss and gradients are the same for
any number of processes and micro-batches, and memory is that of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokmill.models.model import Tensors
from tokmill.tasks.task import Task
from tokmill.training.engines.engine import Engine
from tokmill.training.engines.rng import set_torch_states, torch_states


def compare_step(
    engine: Engine, task: Task, parts: Sequence[Tensors], scale: float
) -> dict[str, Tensor]:
    """Run forward and backward of the summed loss × `scale` of a step; return the task's sums.

    `parts`: the micro-batches of this process, as many in each. Every process calls this. The sums
    are those of the whole step on rank 0, and 0 elsewhere, so that they can be added up.

    The loss has a gradient through the vectors alone: `Task.compare` has no weights.
    """
    states: list[list[Tensor]] = []
    made: list[dict[str, Tensor]] = []
    for part in parts:
        states.append(torch_states())
        made.append(results_of(engine, part, sum(map(len_of, made))))
    rows, order, counts = of_all(engine, made)
    vectors = rows.pop("vectors").float().requires_grad_()
    loss, sums = task.compare(vectors, rows)
    (found,) = torch.autograd.grad(loss, vectors)
    pull = found.new_zeros(sum(counts), *found.shape[1:])
    pull[order] = found * scale
    mine = torch.split(pull, counts)[engine.rank]
    pulls = torch.split(mine, [len_of(one) for one in made])
    for number, (part, state, own) in enumerate(zip(parts, states, pulls, strict=True), 1):
        set_torch_states(state)
        engine.micro(part, number == len(parts), 1.0, own)
    return {name: value if engine.rank == 0 else value * 0 for name, value in sums.items()}


def results_of_all(engine: Engine, parts: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return what a task gives for all rows of a batch without dropout, as `Task.compare` has it.

    `parts`: the micro-batches of this process, as many in each. Every process calls this, and each
    gets all of it.
    """
    made: list[dict[str, Tensor]] = []
    for part in parts:
        made.append(results_of(engine, part, sum(map(len_of, made)), train=False))
    return of_all(engine, made)[0]


def of_all(
    engine: Engine, made: Sequence[dict[str, Tensor]]
) -> tuple[dict[str, Tensor], Tensor, list[int]]:
    """Return results of all processes and micro-batches, with entries numbered from 0.

    Without the rows that are in no entry. And the number of each row among those of all processes
    end to end (`order_of`), and how many of these each process has.
    """
    mine = {name: torch.cat([one[name] for one in made]) for name in made[0]}
    whole = {name: engine.gather(value) for name, value in mine.items()}
    order, entry = order_of(whole["entry"])
    rows = {name: torch.cat(values)[order] for name, values in whole.items()}
    return rows | {"entry": entry}, order, [len(one) for one in whole["entry"]]


def results_of(engine: Engine, part: Tensors, before: int, train: bool = True) -> dict[str, Tensor]:
    """Return what a task gives for the rows of a micro-batch, and the entry of each.

    `before`: rows of the micro-batches before it, for rows that are each an entry. `train`: with
    dropout.
    """
    results = engine.act(part, train=train)
    some = next(iter(results.values()))
    entry = torch.arange(before, before + len(some)) if part.entry is None else part.entry
    return results | {"entry": entry.to(some.device)}


def len_of(results: dict[str, Tensor]) -> int:
    """Return of how many rows results are."""
    return len(results["entry"])


def order_of(entries: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return in which order the rows of all processes stand in a step, and the entry of each.

    entries: of each process, (rows,) int64: numbers within its part of the batch, -1: of a row that
    is left out. The order does not depend on how batches were cut: by process, then by entry. It is
    int64 (N,), as are the entries, which are numbered from 0.
    """
    most = max(int(one.max()) for one in entries) + 1
    number = torch.cat([rank * most + one for rank, one in enumerate(entries)])
    there = torch.cat(list(entries)) >= 0
    order = torch.argsort(number, stable=True)
    order = order[there[order]]
    return order, torch.unique_consecutive(number[order], return_inverse=True)[1]
